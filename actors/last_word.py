"""The last rung of the ladder of endings (R4): an engine tells a client of its deadline when nobody else is left.

Owner, backup and detokenizer may die at once, and with them who is asked to adopt what the engine reports. A client of
an edge hears of its deadline there; a native client has nobody but the engine that still holds its record.
"""

from __future__ import annotations

from actors import replies
from actors.work import Work
from runtime.actor import Context
from schemas.errors import DeadlineExceeded
from schemas.items import frame

LAST_WORD_S = 0.8  # after the deadline: the edge has told its clients at 0.7 s


def is_due(work: Work, up: bool, wall: float) -> bool:
    """Whether it is time for it; `up`: whether its detokenizer may still write."""
    late = wall >= work.record.deadline + LAST_WORD_S
    return late and work.orphaned and not up and not work.last_word and work.record.reply.mode == "inbox"


def say(context: Context, work: Work) -> None:
    """Write the terminal, once."""
    work.last_word = True
    error = DeadlineExceeded("the request's deadline passed")
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    terminal = {"usage": usage, "items": [], "error": error.info()}
    out = frame(work.request_id, work.fence.next(), terminal=terminal)
    replies.write(context, work.record.reply, work.request_id, out)
