"""The second holder of each record, and the adoption of orphans, as an admission actor does them (R2).

All decisions are those of `actors.keeping`, `actors.heirs` and `actors.adoption`; this performs them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from actors import adoption, keeping, poison
from actors import ownership as own
from runtime.actor import Context
from schemas import messages as m
from schemas import subjects
from schemas.errors import Cancelled, TooLarge
from schemas.record import Fence, Record, Strike
from schemas.subjects import Ref

REMEMBERED = 8192  # ids of ended requests: nobody runs one of them again
TELL_S = 1.0  # between the words to an owner that is back, of what has ended meanwhile


class Records:
    """What an admission actor holds of other owners' requests, and who holds its own.

    Args:
        table: of the requests that are owned here.
        perform: performs directives.
        accept: tells a client that its request was taken.
        strikes: what was heard here of crashes in steps of a request.
    """

    def __init__(
        self,
        context: Context,
        table: own.Ownership,
        perform: Callable[[list[own.Directive]], None],
        accept: Callable[[Record, Fence], None],
        strikes: Callable[[str], list[Strike]],
    ) -> None:
        self._context = context
        self._table = table
        self._perform = perform
        self._accept = accept
        self._strikes = strikes
        self._keeping = keeping.Keeping(context.ref)
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._deferred: dict[str, str] = {}  # held records to be adopted when there is room, and why
        self._untold: dict[str, tuple[Ref, Fence]] = {}  # settled here while their owner was silent: it may come back
        self._tell_at = 0.0

    def statistics(self) -> dict[str, float]:
        """Records of others that are held, requests of whom nobody else holds one, and how many were accepted so."""
        return {
            "records_held": len(self._keeping),
            "records_refused": self._keeping.refused,
            "accepted_without_backup": self._keeping.without,
        }

    # --- as an owner ----------------------------------------------------------------------------

    def choose(self, request_id: str) -> Ref | None:
        """Return who is to hold a new request's record too."""
        return self._keeping.begin(request_id, self._others(), self._context.clock.now())

    def keep(self, request_id: str, to: Ref) -> None:
        """Send a new request's record to its backup, after what its first token waits for.

        That is its `Tokenize`, and where a neighbour answers in the next turn of the loop, its `Dispatch`.
        """
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._send_keep, request_id, to)

    def waits(self, request_id: str) -> bool:
        """Whether a request may not be accepted yet."""
        return self._keeping.waits(request_id)

    def renew(self, request_id: str) -> None:
        """A request's fence has changed: its backup has to know."""
        self._keeping.renew(request_id, self._context.clock.now())

    def ended(self, request_id: str, *, elsewhere: bool = False) -> None:
        """A request of this owner's has ended, or with `elsewhere` has another owner, and may come back."""
        self._keeping.ended(request_id, self._context.clock.now())
        if not elsewhere:
            self._remember(request_id)

    def _remember(self, request_id: str) -> None:
        self._ended[request_id] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _send_keep(self, request_id: str, to: Ref) -> None:
        owned = self._open(request_id)
        if owned is None:
            return
        owned.record = owned.record.model_copy(update={"backup": to})
        keep = m.Keep(
            request_id=request_id,
            fence=owned.fence,
            deadline=owned.record.deadline,
            record=owned.record,
            body=owned.body,
            max_tokens=owned.max_tokens,
        )
        try:
            self._context.send(to, keep)
        except TooLarge:
            kept = m.Kept(request_id=request_id, fence=owned.fence)
            if self._keeping.on_kept(kept, to, self._context.clock.now()):
                self._accept(owned.record, owned.fence)  # what cannot travel ends with the error of who needs it

    def _open(self, request_id: str) -> own.Owned | None:
        owned = self._table.get(request_id)
        return owned if owned is not None and owned.stage is own.Stage.OPEN else None

    def _others(self) -> list[Ref]:
        """Admission actors that take work; those of other nodes if there are any: a node dies as a whole."""
        context = self._context
        members = [e for e in context.membership.members("admission") if e.ref != context.ref]
        return [e.ref for e in members if e.node != context.node] or [e.ref for e in members]

    # --- messages -------------------------------------------------------------------------------

    def receive(self, message: m.Message, sender: Ref) -> bool:
        """Take a message about records; false if it is about something else."""
        now = self._context.clock.now()
        match message:
            case m.Keep():
                self._on_keep(message, sender, now)
            case m.Kept():
                owned = self._open(message.request_id)
                if self._keeping.on_kept(message, sender, now) and owned is not None:
                    self._accept(owned.record, owned.fence)
            case m.Release():
                self._keeping.on_release(message, sender)
                self._context.send(sender, m.Released(request_ids=message.request_ids))
            case m.Released():
                self._keeping.on_released(message, sender)
            case m.Orphan():
                self._on_orphan(message, sender, now)
            case m.FinishedAck():
                self._untold.pop(message.request_id, None)
            case m.Unclaimed():
                owned = self._open(message.request_id)
                if owned is not None:
                    self._perform(adoption.on_unclaimed(self._table, owned, message, sender, now))
                    if message.request_id not in self._table:
                        self.ended(message.request_id)
            case _:
                return False
        return True

    def _on_keep(self, msg: m.Keep, sender: Ref, now: float) -> None:
        remaining_s = msg.deadline - self._context.clock.wall()
        owned = self._open(msg.request_id)
        # Whoever owns it by a lower fence is about to hear so, and is then a holder like any other.
        mine = owned is not None and owned.fence > msg.fence
        if not mine and not self._keeping.on_keep(msg, sender, now + remaining_s):
            return
        self._context.send(sender, m.Kept(request_id=msg.request_id, fence=msg.fence))
        member = self._context.membership.get(sender)
        if member is not None and not member.up:
            self._adopt_of(sender, "exit")

    def on_finished(self, msg: m.Finished) -> None:
        """A detokenizer tells a backup of an end that its owner has not heard of."""
        held = self._keeping.held.get(msg.request_id)
        if held is None or msg.fence < held.keep.fence:
            return
        held.finished = msg
        if not self._context.membership.is_up(held.owner):
            self._settle(held)

    def _settle(self, held: keeping.Held) -> None:
        """A request has ended whose owner is gone: its account is written here."""
        assert held.finished is not None
        self._keeping.take(held.keep.request_id)
        self._remember(held.keep.request_id)
        now, error = self._context.clock.now(), held.finished.error
        outcome = "stop" if error is None else str(error.get("code") or "error")
        if error is None and "length" in held.finished.finish_reasons:
            outcome = "length"
        self._perform([own.Ended(held.keep.record, outcome, held.finished, 0, now, {})])
        if len(self._untold) < REMEMBERED:
            fence = keeping.above(held.keep.fence, f"{self._context.ref.id}.{self._context.ref.epoch}")
            self._untold[held.keep.request_id] = held.owner, fence

    def _tell_returned(self, now: float) -> None:
        """Owners that were only silent let go of what has ended meanwhile, instead of keeping it to its deadline."""
        self._tell_at = now + TELL_S
        membership = self._context.membership
        for request_id, (owner, fence) in list(self._untold.items()):
            member = membership.get(owner)
            if member is None or member.exited:
                del self._untold[request_id]
            elif membership.is_up(owner):
                error = Cancelled("it has ended, and its account is written", code="superseded")
                self._context.send(owner, m.Finished(request_id=request_id, fence=fence, error=error.info()))

    # --- taking over ----------------------------------------------------------------------------

    def resubmitted(self, request_id: str, term: int) -> bool:
        """A client asks here for a request whose record is held here: it is taken over, dead owner or not.

        But not by an earlier try than the one that a living owner serves: such a one has only waited here.
        """
        held = self._keeping.held.get(request_id)
        if held is None:
            return False
        if term <= held.keep.fence.term and self._context.membership.is_up(held.owner):
            return True
        self._adopt(held, "resubmitted")
        return True

    def _adopt_of(self, owner: Ref, reason: str) -> None:
        for held in self._keeping.of_owner(owner):
            if held.finished is not None:
                self._settle(held)
            else:
                self._adopt(held, reason)

    def _adopt(self, held: keeping.Held, reason: str) -> None:
        keep = held.keep
        if self._table.full and keep.request_id not in self._table:
            if len(self._deferred) >= keeping.MAX_HELD:
                self._deferred = {r: why for r, why in self._deferred.items() if r in self._keeping.held}
            self._deferred[keep.request_id] = reason  # nobody else may have it: it stays held, and waits for room
            return
        self._keeping.take(keep.request_id)
        self._take_over(keep.record, keep.body, keep.fence, keep.max_tokens, reason)

    def _take_over(
        self, record: Record, body: dict[str, Any], fence: Fence, max_tokens: int | None, reason: str
    ) -> None:
        context, now, wall = self._context, self._context.clock.now(), self._context.clock.wall()
        if record.request_id in self._table or self._table.full:
            return
        backup = self._keeping.begin(record.request_id, self._others(), now, accepted=True)
        record = record.model_copy(update={"owner": context.ref, "backup": backup})
        record = poison.told(record, self._strikes(record.request_id))  # of engines that died with their owner
        detokenizers = [e.ref for e in context.membership.members("detokenize", states=("ready", "draining"))]
        self._perform(
            adoption.adopt(
                self._table, context.ref, record, body, fence=fence, reason=reason, max_tokens=max_tokens,
                remaining_s=record.deadline - wall, detokenizers=detokenizers, now=now,
            )
        )  # fmt: skip
        if backup is not None:
            self.keep(record.request_id, backup)
        if self._edge_gone(record):
            self._perform(self._table.cancel(record.request_id, "edge_gone", now))

    def _edge_gone(self, record: Record) -> bool:
        if record.reply.mode != "mailbox":
            return False
        member = self._context.membership.get(subjects.parse_mailbox(record.reply.subject))
        return member is not None and member.exited

    def _on_orphan(self, msg: m.Orphan, sender: Ref, now: float) -> None:
        owned = self._table.get(msg.request_id)
        if owned is None and msg.request_id in self._ended:
            fence = keeping.above(msg.fence, f"{self._context.ref.id}.{self._context.ref.epoch}")
            self._context.send(sender, m.Close(request_id=msg.request_id, fence=fence, reason="drop"))
            return
        if owned is None and msg.record.owner == self._context.ref:
            # It was mine, and is no more: whoever was away when it ended, or went elsewhere, has heard nothing since.
            self._context.send(sender, m.Close(request_id=msg.request_id, fence=msg.fence, reason="drop"))
            return
        if owned is None:
            if self._context.membership.is_up(msg.record.owner):
                return  # it may have been cut off from its owner, or hear of it too late
            held = self._keeping.held.get(msg.request_id)
            if held is not None and held.keep.fence > msg.fence and self._context.membership.is_up(held.owner):
                close = m.Close(request_id=msg.request_id, fence=held.keep.fence, reason="fenced")
                self._context.send(sender, close)  # another owner has it, which this one was not told
                return
            if self._table.full:
                return  # whoever reports it asks another one next
            held = self._keeping.take(msg.request_id)
            fence = max(msg.fence, held.keep.fence) if held is not None else msg.fence
            self._take_over(msg.record, {}, fence, None, "orphan")
            owned = self._table.get(msg.request_id)
        if owned is not None:
            is_up = self._context.membership.is_up
            self._perform(adoption.on_orphan(self._table, owned, msg, sender, is_up, now))

    # --- time -----------------------------------------------------------------------------------

    def member_down(self, ref: Ref, reason: str) -> None:
        """An admission actor is gone: what it held is held by others, what it owned is owned here."""
        self._keeping.member_down(ref, reason, self._context.clock.now())
        self._adopt_of(ref, reason)

    def leaving(self, ref: Ref) -> None:
        """An admission actor drains: what it holds has to be held by another; what it owns it ends by itself."""
        self._keeping.member_down(ref, "drain", self._context.clock.now())

    def _adopt_deferred(self) -> None:
        """Take over what there was no room for, unless its owner is back, has ended it, or somebody else has it."""
        for request_id, reason in list(self._deferred.items()):
            if self._table.full:
                return
            del self._deferred[request_id]
            held = self._keeping.held.get(request_id)
            if held is not None and not self._context.membership.is_up(held.owner):
                self._adopt(held, reason)

    def tick(self) -> list[keeping.Held]:
        """Look for backups, repeat releases; returns records whose request nobody has ended in time."""
        now = self._context.clock.now()
        if self._deferred:
            self._adopt_deferred()
        if self._untold and now >= self._tell_at:
            self._tell_returned(now)
        others = self._others() if self._keeping.seeks else []
        due = self._keeping.tick(others, now)
        for request_id in due.accept:
            owned = self._open(request_id)
            if owned is not None:
                self._accept(owned.record, owned.fence)
        for request_id, to in due.keep:
            self._send_keep(request_id, to)
        for to, ids in due.release:
            self._context.send(to, m.Release(request_ids=ids))
        for held in due.expired:
            self._remember(held.keep.request_id)
        return due.expired
