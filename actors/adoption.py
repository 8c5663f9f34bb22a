"""Taking over the requests of a dead owner: pure. What runs goes on, under a higher term; what is lost is done again.

An adopter knows a record (R2), and maybe who told it. It asks the detokenizers for the request; the one that holds it
names the engine that feeds it, and that engine is redirected to where it sends already, so that no step is lost. When
nobody holds anything the request runs from the beginning. Two adopters at once: receivers keep the higher fence, the
other one is told `superseded` and lets go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from actors import poison
from actors.keeping import above
from actors.ownership import Directive, Failover, Owned, Ownership, Stage
from actors.placement import Placement
from schemas import messages as m
from schemas.record import Fence, Record
from schemas.subjects import Ref

CLAIM_S = 0.3  # a detokenizer that does not answer for so long has nothing, or is dead
SPEAK_UP_S = 0.05  # engines report orphans on their own; one that runs the request is better than a new one


def adopt(
    table: Ownership,
    me: Ref,
    record: Record,
    body: dict[str, object],
    *,
    fence: Fence,
    reason: str,
    max_tokens: int | None,
    remaining_s: float,
    detokenizers: Iterable[Ref],
    now: float,
) -> list[Directive]:
    """Own a request whose owner is gone.

    Args:
        record: with the new owner and its backup.
        body: to tokenize; not needed if the record has prompt ids.
        fence: the highest that is known of the former owner.
        reason: how it is known that the owner is gone, for the count of failovers.
        detokenizers: who may hold it.
    """
    owned = Owned(
        record=record,
        fence=above(fence, f"{me.id}.{me.epoch}"),
        body=body,
        accepted_at=now,
        deadline=now + remaining_s,
        max_tokens=max_tokens,
        ever_dispatched=True,
        ids_current=False,
        adopted=True,
        announce=True,
        claims=set(detokenizers),
        hold_until=now + CLAIM_S,
    )
    _take_prompt(owned, record)
    owned.timeline["adopted"] = now
    table.put(owned)
    return [Failover(record.request_id, "admission", reason), *table.advance(owned, now)]


def on_orphan(
    table: Ownership, owned: Owned, msg: m.Orphan, sender: Ref, is_up: Callable[[Ref], bool], now: float
) -> list[Directive]:
    """Somebody holds a part of a request that is owned here."""
    if msg.fence > owned.fence:
        if not owned.adopted or is_up(msg.record.owner):
            return []  # commanded by somebody who has come later
        owned.fence = above(msg.fence, owned.fence.owner)  # the dead one had raised it, and the backup had not heard
    if owned.stage is not Stage.OPEN:
        return table.close_elsewhere(owned, sender)
    if not owned.tokenized and msg.record.prompt_ids:
        _take_prompt(owned, msg.record)
    owned.record = poison.told(owned.record, msg.record.strikes)
    source = msg.source if msg.source is not None and is_up(msg.source) else None
    if sender.kind == "detokenize":
        return _detokenizer_speaks(table, owned, sender, source, now)
    if sender in owned.engines:
        return []
    if owned.adopted and owned.placement is None and source is not None and now < owned.hold_until:
        _run_on(owned, source)
        return _settle(table, owned, now)
    return table.close_elsewhere(owned, sender)


def on_unclaimed(table: Ownership, owned: Owned, msg: m.Unclaimed, sender: Ref, now: float) -> list[Directive]:
    """A detokenizer does not hold the request."""
    if sender not in owned.claims or msg.fence != owned.fence:
        return []
    owned.claims.discard(sender)
    if msg.ended and owned.detok is None:
        # It came to its end just before its owner died.
        table.drop(msg.request_id)
        return []
    return _settle(table, owned, now)


def _detokenizer_speaks(table: Ownership, owned: Owned, sender: Ref, source: Ref | None, now: float) -> list[Directive]:
    owned.claims.discard(sender)
    if owned.detok is None and now < owned.hold_until:
        owned.detok = sender
        owned.claims.clear()
        if source is not None and owned.placement is None:
            _run_on(owned, source)
        return _settle(table, owned, now)
    return [] if sender == owned.detok else table.close_elsewhere(owned, sender)


def _run_on(owned: Owned, source: Ref) -> None:
    """An engine runs it: it is to obey this owner, and goes on."""
    owned.placement = Placement(source, None)
    owned.dispatched = owned.started = owned.redirect = True


def _settle(table: Ownership, owned: Owned, now: float) -> list[Directive]:
    """Go on as soon as all that can be known is known."""
    if now >= owned.hold_until or owned.claims:
        return []
    if owned.placement is not None:
        owned.hold_until = now
    else:
        owned.hold_until = min(owned.hold_until, max(now, owned.accepted_at + SPEAK_UP_S))
    return table.advance(owned, now)


def _take_prompt(owned: Owned, record: Record) -> None:
    if not record.prompt_ids:
        return
    owned.record = owned.record.model_copy(update={"prompt_ids": record.prompt_ids, "sampling": record.sampling})
    owned.tokenized = True
    owned.body = {}
    owned.outputs = [[] for _ in range(owned.record.num_choices)]
