"""Live migration as the owner sees it: pure. An offer under a fence of its own, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actors.owned import Directive, MoveEnded, Offer, Owned, Send
from schemas import messages as m
from schemas.subjects import Ref


def offer(o: Owned, me: Ref, to: Ref, reason: str) -> list[Directive]:
    """Offer a running request to another engine, if nothing else goes on with it."""
    if not o.started or o.offer or o.redirect or o.probing or o.error or o.runner in (None, to):
        return []
    fence = o.next_fence()
    o.offer, o.offered = Offer(to, fence, reason), fence.n
    return migrate(o, me)


def migrate(o: Owned, me: Ref) -> list[Directive]:
    """Ask the source for the move, or how it ended."""
    if o.runner is None or o.offer is None:
        return []
    return [Send(o.runner, m.Migrate(**o.head(), to=o.offer.to, next=o.offer.fence, reply=me))]


def moved(o: Owned, me: Ref, is_up: Callable[[Ref], bool]) -> list[Directive]:
    """It runs at the other engine: from now on under the offer's fence."""
    taken, source = o.offer, o.runner
    assert taken is not None and source is not None and o.placement is not None
    o.fence, o.offer, o.leaving = taken.fence, None, None
    o.placement = replace(o.placement, first=taken.to, decode=None)
    o.dispatched = o.started = True
    out: list[Directive] = [MoveEnded(o.record.request_id, taken.reason, "moved")]
    if is_up(source):
        o.to_close[source] = m.Close(**o.head(), reason="fenced", reply=me)
        out.append(Send(source, o.to_close[source]))
    return out


def drop_offer(o: Owned, me: Ref, is_up: Callable[[Ref], bool]) -> list[Directive]:
    """Something is lost in the middle of a move; the fence has been raised above the offer's."""
    void, o.offer, o.leaving = o.offer, None, None
    if void is None:
        return []
    close = m.Close(**o.head(), reason="fenced", reply=me)
    if is_up(void.to):
        o.to_close[void.to] = close
    return [MoveEnded(o.record.request_id, void.reason, "lost"), Send(void.to, close)]
