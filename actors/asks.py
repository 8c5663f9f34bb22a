"""What an owner asks of tokenizers and engines, from what it knows of a request: pure."""

from __future__ import annotations

from actors.owned import Directive, Owned, Send
from actors.placement import Placement
from schemas import messages as m
from schemas.subjects import Ref


def tokenize(o: Owned, me: Ref, limit: int) -> m.Tokenize:
    """Ask for the prompt's ids; `limit` is what prompt and answer may have together, in tokens."""
    return m.Tokenize(**o.head(), api=o.record.api, body=o.body, limit=limit, max_tokens=o.max_tokens, reply=me)


def dispatch(o: Owned, me: Ref, placement: Placement, detok: Ref) -> m.Dispatch:
    """Ask the first engine of a placement to begin."""
    return m.Dispatch(
        **o.head(),
        record=o.record,
        detokenize=detok,
        decode=placement.decode,
        outputs=o.outputs,
        finished=o.finished,
        late_at=o.late_at,
        reply=me,
    )


def redirect(o: Owned, me: Ref) -> list[Directive]:
    """Ask the engine that runs it to send to the present detokenizer from index 0, or whether it runs it at all."""
    if o.runner is None or o.detok is None:
        return []
    return [Send(o.runner, m.Redirect(**o.head(), detokenize=o.detok, reply=me))]
