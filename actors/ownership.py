"""The owner's view of its requests: pure. Messages and failures in, messages out; `now` is an argument.

A request is driven towards what it needs, in this order: an open detokenizer, prompt ids, the ids that have already
reached the detokenizer (after a failure), engines. Whatever is lost is struck out and `_advance` asks for it again
under a higher fence; so every failover, redirect and first run is the same code. Unanswered messages are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actors import asks, moves, poison
from actors.owned import (
    Accept,
    Anycast,
    Broadcast,
    Directive,
    Ended,
    Failover,
    MoveEnded,
    Offer,
    Owned,
    Send,
    Stage,
    Terminal,
)
from actors.placement import Placement
from schemas import messages as m
from schemas.errors import Cancelled, DeadlineExceeded, HeadraceError, SlowReader, from_info
from schemas.record import Fence, Record
from schemas.subjects import Ref

__all__ = [
    "Accept", "Anycast", "Broadcast", "Directive", "Ended", "Failover", "MoveEnded", "Offer", "Owned", "Ownership",
    "Send", "Stage", "Terminal",
]  # fmt: skip

RESEND_S = 0.2
LEAVE_S = 0.05  # after which streams leave a draining detokenizer: it says first which are complete
OWNER_GRACE_S = 0.3  # the detokenizer ends a stream at its deadline, the owner this much later
CLOSING_S = 2.0
MAX_OPEN = 4096


class Ownership:
    """Table of the requests that one admission actor owns.

    Args:
        me: the owner's address, part of every fence.
        is_up: whether an incarnation may still answer.
        choose_engines: `(record, suspects) -> Placement | None`; called again until it gives one.
        choose_detokenizer: `(record) -> Ref | None`.
        choose_target: `(record, avoid) -> Ref | None`: an engine that a running request can move to; without it nothing
            moves.
        refuse: `(record, placement, remaining_s) -> error | None`: asked once, before the first dispatch.
        promised_s: the time to the first token that a request was promised; an engine may refuse it for that.
        survivors: whether any engine could take work now.
    """

    def __init__(
        self,
        me: Ref,
        *,
        is_up: Callable[[Ref], bool],
        choose_engines: Callable[[Record, frozenset[Ref]], Placement | None],
        choose_detokenizer: Callable[[Record], Ref | None],
        context_limit: Callable[[], int],
        choose_target: Callable[[Record, frozenset[Ref]], Ref | None] | None = None,
        refuse: Callable[[Record, Placement, float], HeadraceError | None] | None = None,
        promised_s: Callable[[Record], float | None] = lambda record: None,
        survivors: Callable[[], bool] = lambda: True,
    ) -> None:
        self._me = me
        self._refuse = refuse
        self._promised_s = promised_s
        self._survivors = survivors
        self._is_up = is_up
        self._choose_engines = choose_engines
        self._choose_detokenizer = choose_detokenizer
        self._context_limit = context_limit
        self._choose_target = choose_target
        self._owned: dict[str, Owned] = {}

    def __len__(self) -> int:
        return len(self._owned)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._owned

    @property
    def full(self) -> bool:
        """Whether no more requests can be owned."""
        return len(self._owned) >= MAX_OPEN

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return sum(1 for o in self._owned.values() if o.stage is Stage.OPEN)

    def get(self, request_id: str) -> Owned | None:
        """Return what is known of a request."""
        return self._owned.get(request_id)

    def ids(self, limit: int) -> list[str]:
        """Return the ids of at most `limit` open requests."""
        out = []
        for request_id, o in self._owned.items():
            if o.stage is Stage.OPEN:
                out.append(request_id)
                if len(out) == limit:
                    break
        return out

    def oldest_age_s(self, now: float) -> float:
        """Age of the oldest open request."""
        return max((now - o.accepted_at for o in self._owned.values() if o.stage is Stage.OPEN), default=0.0)

    # --- events ---------------------------------------------------------------------------------

    def admit(
        self,
        record: Record,
        body: dict[str, Any],
        *,
        term: int,
        max_tokens: int | None,
        remaining_s: float,
        now: float,
        outputs: list[list[int]] | None = None,
    ) -> list[Directive]:
        """Own a request from now on.

        Args:
            remaining_s: the time to its deadline.
            outputs: ids per choice that an earlier owner's try has brought to the client.
        """
        owned = Owned(
            record=record,
            fence=Fence(term, f"{self._me.id}.{self._me.epoch}", 0),
            body=body,
            accepted_at=now,
            deadline=now + remaining_s,
            max_tokens=max_tokens,
            outputs=[list(ids) for ids in outputs or []],
        )
        self._owned[record.request_id] = owned
        return self._advance(owned, now)

    def raise_term(self, request_id: str, term: int, now: float) -> list[Directive]:
        """The client asks again under a higher term: everything that serves it learns the new fence."""
        owned = self._owned[request_id]
        if term <= owned.fence.term or owned.stage is Stage.CLOSING:
            return []
        if owned.adopted:
            return []  # the client will hear of this owner as soon as its detokenizer has
        owned.fence = Fence(term, owned.fence.owner, owned.fence.n)
        owned.opened = False
        return self._lose_engines(owned, now) + self._advance(owned, now)

    def on_tokenized(self, msg: m.Tokenized, now: float) -> list[Directive]:
        """Prompt ids are there, or the prompt is refused."""
        owned = self._open(msg.request_id)
        if owned is None or owned.tokenized:
            return []
        if msg.error is not None:
            return self._end_with(owned, from_info(msg.error), now)
        longest = max(len(p) for p in msg.prompt_ids)
        max_tokens = owned.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self._context_limit() - longest)
        sampling = owned.record.sampling.model_copy(update={"max_tokens": max_tokens})
        owned.record = owned.record.model_copy(update={"prompt_ids": msg.prompt_ids, "sampling": sampling})
        if len(owned.outputs) != owned.record.num_choices:
            owned.outputs = [[] for _ in range(owned.record.num_choices)]
        owned.tokenized = True
        owned.body = {}
        owned.timeline["tokenized"] = now
        owned.opened = False
        return self._advance(owned, now)

    def on_opened(self, msg: m.Opened, sender: Ref, now: float) -> list[Directive]:
        """The detokenizer holds the request."""
        owned = self._open(msg.request_id)
        if owned is None or sender != owned.detok or msg.fence != owned.fence or not owned.tokenized:
            return []
        owned.opened = True
        out: list[Directive] = []
        if owned.announce:
            owned.announce = owned.adopted = False
            out.append(Accept(owned.record, owned.fence))
        if owned.placement is not None and not owned.redirect:
            return out  # dispatched along with the `Open`; `tick` repeats it
        owned.next_send = now
        return out + self._advance(owned, now)

    def on_fenced_ids(self, msg: m.FencedIds, sender: Ref, now: float) -> list[Directive]:
        """The detokenizer refuses older work and says what has arrived."""
        owned = self._open(msg.request_id)
        if owned is None or sender != owned.detok or msg.fence != owned.fence or owned.ids_current:
            return []
        if not msg.known:
            owned.opened = False
            return self._advance(owned, now)
        if msg.ended:
            return []  # its `Finished` is on the way
        owned.outputs = [list(ids) for ids in msg.outputs]
        owned.finished = list(msg.finished)
        owned.ids_current = True
        owned.next_send = now
        return self._advance(owned, now)

    def on_dispatched(self, msg: m.Dispatched, sender: Ref, now: float) -> list[Directive]:
        """An engine holds the work, has started it after a hand-off, or refuses it."""
        owned = self._open(msg.request_id)
        if owned is None or owned.placement is None:
            return []
        if owned.offer is not None and msg.started and (sender, msg.fence) == (owned.offer.to, owned.offer.fence):
            return self._moved(owned, now)
        if msg.fence != owned.fence:
            return []
        if msg.error is not None:
            return self._engine_refused(owned, sender, from_info(msg.error), now)
        if msg.started:
            if sender == owned.placement.decode:
                owned.dispatched = owned.started = True
        elif sender == owned.placement.first:
            owned.dispatched = True
            owned.timeline.setdefault("dispatched", now)
            owned.started = owned.started or owned.placement.decode is None
        return []

    def on_engine_error(self, msg: m.EngineError, sender: Ref, now: float) -> list[Directive]:
        """An engine gave the request up."""
        owned = self._open(msg.request_id)
        if owned is None or msg.fence != owned.fence:
            closed = m.Closed(request_id=msg.request_id, fence=msg.fence)
            return [Send(sender, closed)]
        return self._engine_refused(owned, sender, from_info(msg.error), now)

    def on_redirected(self, msg: m.Redirected, sender: Ref, now: float) -> list[Directive]:
        """The engine sends to the new detokenizer, or does not know the request."""
        owned = self._open(msg.request_id)
        if owned is None or msg.fence != owned.fence or sender != owned.runner:
            return []
        owned.probing = False
        if msg.known:
            owned.redirect = False
            owned.started = True
            return [] if owned.opened else self._advance(owned, now)
        return self._fail_engines(owned, sender, "lost", now)

    def on_migrated(self, msg: m.Migrated, sender: Ref, now: float) -> list[Directive]:
        """The source of a move says how it ended."""
        owned = self._open(msg.request_id)
        offer = owned.offer if owned is not None else None
        if owned is None or offer is None or msg.next != offer.fence or sender != owned.runner:
            return []
        if msg.outcome == "moved":
            return self._moved(owned, now)
        ended = MoveEnded(msg.request_id, offer.reason, msg.outcome)
        if msg.outcome == "doubtful" or (msg.outcome == "unfit" and owned.leaving is not None):
            reason = "drain" if owned.leaving is not None else "migration"
            return [ended, *self._fail_engines(owned, sender, reason, now)]
        owned.offer = None  # off a draining engine it is offered again
        return [ended]

    def move(self, request_id: str, to: Ref, reason: str, now: float) -> list[Directive]:
        """Offer a running request to another engine, if nothing else goes on with it."""
        owned = self._open(request_id)
        return [] if owned is None else moves.offer(owned, self._me, to, reason)

    def runners(self) -> list[tuple[str, Ref]]:
        """Return the requests that could be moved, oldest first, and where they run."""
        return [
            (o.record.request_id, o.runner)
            for o in self._owned.values()
            if o.stage is Stage.OPEN and o.started and o.offer is None and o.runner is not None
        ]

    def on_stalled(self, msg: m.Stalled, heard_s: Callable[[Ref], float], now: float) -> list[Directive]:
        """No ids for a second: ask the engine, unless its silence is about to be noticed; a dead one is replaced."""
        owned = self._open(msg.request_id)
        if owned is None or msg.fence != owned.fence or not owned.dispatched or owned.runner is None:
            return []
        if owned.runner == owned.suspected:
            return []  # known to be silent, and nobody could take its work
        if not self._is_up(owned.runner):  # whoever was told of its end did not know yet that it runs there
            return self._fail_engines(owned, owned.runner, "lost", now)
        if owned.started and heard_s(owned.runner) < 1.0:
            owned.probing = True
            return self._redirect(owned)
        return []

    def on_finished(self, msg: m.Finished, sender: Ref, now: float) -> list[Directive]:
        """The detokenizer has ended the stream."""
        ack = Send(sender, m.FinishedAck(request_id=msg.request_id, fence=msg.fence))
        owned = self._open(msg.request_id)
        # The detokenizer alone decides the ending. It may do so just before it hears of a higher fence.
        if owned is None or (msg.fence < owned.fence and (sender != owned.detok or _superseded(msg))):
            return [ack]
        outcome = "stop" if msg.error is None else str(msg.error.get("code") or "error")
        if msg.error is None and "length" in msg.finish_reasons:
            outcome = "length"
        owned.timeline["ended"] = now
        reason = "superseded" if _superseded(msg) else "finish"
        return [ack, *self._close(owned, reason, now), self._ended(owned, outcome, msg)]

    def on_closed(self, msg: m.Closed, sender: Ref, now: float) -> list[Directive]:
        """An actor has nothing left of the request."""
        owned = self._owned.get(msg.request_id)
        if owned is not None:
            pending = owned.to_close.get(sender)
            if pending is not None and pending.fence <= msg.fence:
                del owned.to_close[sender]
            if owned.stage is Stage.CLOSING and not owned.to_close:
                del self._owned[msg.request_id]
        return []

    def cancel(self, request_id: str, reason: str, now: float) -> list[Directive]:
        """The client has left: stop everywhere."""
        owned = self._open(request_id)
        if owned is None:
            return []
        owned.fence = owned.next_fence()
        owned.timeline["ended"] = now
        outcome = reason if reason in (SlowReader.default_code, "superseded") else Cancelled.default_code
        return [*self._close(owned, reason, now), self._ended(owned, outcome or reason, None)]

    def edge_down(self, edge_subject: str, now: float) -> list[Directive]:
        """An edge incarnation is gone with all its connections: cancel what it asked for."""
        out: list[Directive] = []
        for o in list(self._owned.values()):
            if o.stage is Stage.OPEN and o.record.reply.subject == edge_subject:
                out += self.cancel(o.record.request_id, "edge_gone", now)
        return out

    def member_down(self, ref: Ref, reason: str, now: float) -> list[Directive]:
        """An incarnation has exited, is silent, or is draining away (`exit`, `silent`, `drain`)."""
        out: list[Directive] = []
        for o in list(self._owned.values()):
            o.claims.discard(ref)
            if reason == "exit" and ref in o.to_close:
                del o.to_close[ref]
                if o.stage is Stage.CLOSING and not o.to_close:
                    del self._owned[o.record.request_id]
            if o.stage is Stage.CLOSING:
                continue
            if o.offer is not None and ref == o.offer.to and ref != o.detok:
                if reason != "drain":
                    out += moves.migrate(o, self._me)  # the source knows whether it may run there already
                continue
            if ref == o.detok and o.error is not None:
                out += self._end_with(o, o.error, now)
            elif ref == o.detok and reason == "drain":
                # Its streams go to another one, if there is one; those that are complete end there, and it says so now.
                o.detok_leaves, o.next_send = True, min(o.next_send, now + LEAVE_S)
            elif ref == o.detok:
                out += self._lose_detok(o, ref, reason, now)
            elif ref in o.engines:
                out += self._engine_down(o, ref, reason, now)
        return out

    def tick(self, now: float) -> list[Directive]:
        """Repeat what is unanswered, end what is past its deadline, forget what is closed."""
        out: list[Directive] = []
        for o in list(self._owned.values()):
            if o.stage is Stage.CLOSING:
                if now >= o.closing_until or not o.to_close:
                    del self._owned[o.record.request_id]
                elif now >= o.next_send:
                    o.next_send = now + RESEND_S
                    out += [Send(to, msg) for to, msg in o.to_close.items()]
            elif now >= o.deadline + OWNER_GRACE_S:
                out += self._expire(o, now)
            elif now >= o.next_send:
                out += [Send(to, msg) for to, msg in o.to_close.items()]
                out += self._advance(o, now)
        return out

    # --- the drive ------------------------------------------------------------------------------

    def _advance(self, o: Owned, now: float) -> list[Directive]:
        """Ask for the first thing that is missing; called on every event and again every `RESEND_S`."""
        o.next_send = now + RESEND_S
        if now < o.hold_until:
            o.next_send = min(o.next_send, o.hold_until)
            return [Send(ref, m.Claim(**o.head())) for ref in sorted(o.claims)]
        if o.suspected is not None and not self._spoke(o) and self._survivors():
            return self._fail_engines(o, o.suspected, "silent", now)
        if o.detok is None or not self._is_up(o.detok):
            o.choose(self._choose_detokenizer(o.record))
        elif o.detok_leaves and self._choose_detokenizer(o.record) not in (None, o.detok):
            return self._lose_detok(o, o.detok, "drain", now)
        out: list[Directive] = []
        if not o.tokenized:
            out.append(Anycast("tokenize", self._tokenize(o)))
            return out
        if o.adopted and o.redirect:
            # With `Open` first, an engine's items of this moment would be refused under the new fence: it would stop.
            return out + self._redirect(o)
        told = o.open_sent
        if not o.opened:
            if o.detok is not None:
                out.append(Send(o.detok, m.Open(**o.head(), record=o.record)))
                o.open_sent = True
            # The very first dispatch does not wait for `Opened`: the detokenizer keeps items that overtake its `Open`.
            # After a failure, or another owner, what the detokenizer holds has to be known first.
            if o.detok is None or o.ever_dispatched or o.fence.term > 0 or not o.ids_current:
                return out
        if o.redirect:
            return out + self._redirect(o)
        if o.placement is None:
            if now < o.retry_at:
                return out
            refused = poison.verdict(o.record.strikes)
            if refused is not None:
                return self._end_with(o, refused, now)
            if not o.ids_current and o.detok is not None:
                return [Send(o.detok, m.FenceIds(**o.head()))]
            o.placement = self._choose_engines(o.record, frozenset(o.suspects))
            o.dispatched = o.started = False
            fresh = not o.ever_dispatched and o.fence.term == 0 and not any(o.outputs)
            o.late_at = self._late_at(o) if fresh else 0.0
            error = self._refusal(o, now) if fresh else None
            if error is not None:
                if not told:
                    o.choose(None)
                return self._end_with(o, error, now)
        if o.placement is None or o.detok is None:
            return out
        if not o.dispatched:
            o.ever_dispatched = True
            out.append(Send(o.placement.first, asks.dispatch(o, self._me, o.placement, o.detok)))
        elif o.probing:
            out += self._redirect(o)
        elif o.offer is not None:
            out += moves.migrate(o, self._me)
        elif o.leaving is not None:
            out += self._leave(o, now)
        return out

    def _refusal(self, o: Owned, now: float) -> HeadraceError | None:
        """Return why a fresh request is refused for what is expected."""
        if o.placement is None or self._refuse is None:
            return None
        error = self._refuse(o.record, o.placement, o.deadline - now)
        if error is not None:
            o.placement = None
        return error

    def _late_at(self, o: Owned) -> float:
        """Return when the first token of a fresh request is late, in Unix seconds; its deadline is in both clocks."""
        promised_s = self._promised_s(o.record)
        return 0.0 if promised_s is None else o.record.deadline - (o.deadline - o.accepted_at) + promised_s

    def _tokenize(self, o: Owned) -> m.Tokenize:
        return asks.tokenize(o, self._me, self._context_limit())

    def _redirect(self, o: Owned) -> list[Directive]:
        return asks.redirect(o, self._me)

    # --- moves ----------------------------------------------------------------------------------

    def _leave(self, o: Owned, now: float) -> list[Directive]:
        """Move a request off a draining engine; without another one it goes on there, and is looked at again."""
        assert self._choose_target is not None and o.leaving is not None
        to = self._choose_target(o.record, frozenset({*o.suspects, o.leaving}))
        return [] if to is None else self.move(o.record.request_id, to, "drain", now)

    def _moved(self, o: Owned, now: float) -> list[Directive]:
        """A move is done; the engine may have died before anybody said so."""
        out = moves.moved(o, self._me, self._is_up)
        if o.runner is not None and not self._is_up(o.runner):
            out += self._fail_engines(o, o.runner, "lost", now)
        return out

    # --- losses ---------------------------------------------------------------------------------

    def _engine_down(self, o: Owned, ref: Ref, reason: str, now: float) -> list[Directive]:
        placement = o.placement
        if placement is not None and ref == placement.first and placement.decode is not None and o.started:
            return []  # handed over already: the prefill engine holds nothing of it
        if reason == "drain" and placement is not None and ref == placement.first and placement.decode is not None:
            return []  # a draining prefill finishes its hand-offs
        if reason == "drain" and o.started and self._choose_target is not None:
            o.leaving = ref
            return self._leave(o, now) if o.offer is None else []
        if placement is not None and ref == placement.first and placement.decode is not None and o.dispatched:
            # It may have been handed over a moment ago: decode knows.
            o.suspects.add(ref)
            o.probing = True
            return self._redirect(o)
        if reason == "silent" and ref == o.runner and o.dispatched and not self._survivors():
            o.suspected = ref  # a suspect that speaks before anybody could take its work keeps it (R7)
            return []
        return self._fail_engines(o, ref, reason, now)

    def _spoke(self, o: Owned) -> bool:
        """Whether the engine that was silent speaks again, or has nothing to do with the request any more."""
        if o.suspected is not None and (self._is_up(o.suspected) or o.suspected not in o.engines):
            o.suspected = None
        return o.suspected is None

    def _fail_engines(self, o: Owned, ref: Ref, reason: str, now: float) -> list[Directive]:
        o.suspects.add(ref)
        o.failovers += 1
        o.retry_at = max(o.retry_at, o.again_at(now))
        report = Failover(o.record.request_id, ref.kind, reason)
        o.fence = o.next_fence()
        return [report, *self._lose_engines(o, now), *self._advance(o, now)]

    def _lose_engines(self, o: Owned, now: float) -> list[Directive]:
        """Strike the engines out under the present fence; they are told to drop their work."""
        out: list[Directive] = []
        for ref in o.engines:
            close = m.Close(**o.head(), reason="fenced", reply=self._me)
            out.append(Send(ref, close))
            if self._is_up(ref):
                o.to_close[ref] = close
        if o.offer is not None:
            out.append(MoveEnded(o.record.request_id, o.offer.reason, "lost"))
        o.placement = o.offer = o.leaving = o.suspected = None
        o.dispatched = o.started = o.redirect = o.probing = False
        o.ids_current = not o.ever_dispatched
        return out

    def _lose_detok(self, o: Owned, ref: Ref, reason: str, now: float) -> list[Directive]:
        o.failovers += 1
        o.fence = o.next_fence()
        out: list[Directive] = [Failover(o.record.request_id, ref.kind, reason)]
        out += moves.drop_offer(o, self._me, self._is_up)
        if self._is_up(ref) or reason in ("silent", "drain"):
            o.to_close[ref] = m.Close(**o.head(), reason="fenced", reply=self._me)
            out.append(Send(ref, o.to_close[ref]))
        o.choose(self._choose_detokenizer(o.record))
        if o.started:
            o.redirect = True  # the engine has every id and repeats them from 0
        elif o.placement is not None:
            out += self._lose_engines(o, now)
        if not o.redirect:
            # What the lost detokenizer had is gone with it: the new one gets everything from index 0.
            o.outputs = [[] for _ in range(o.record.num_choices)]
            o.finished = []
            o.ids_current = True
        return [*out, *self._advance(o, now)]

    def _engine_refused(self, o: Owned, sender: Ref, error: HeadraceError, now: float) -> list[Directive]:
        if error.status == 503 or isinstance(error, Cancelled):  # full or draining: somewhere else, a little later
            o.retry_at = now + RESEND_S
            o.fence = o.next_fence()
            o.suspects.add(sender)
            return [*self._lose_engines(o, now), *self._advance(o, now)]
        return self._end_with(o, error, now)

    # --- endings --------------------------------------------------------------------------------

    def _end_with(self, o: Owned, error: HeadraceError, now: float) -> list[Directive]:
        """End with an error: the detokenizer writes it if it holds the request, otherwise this owner does."""
        if o.opened and o.detok is not None and self._is_up(o.detok):
            for ref in o.engines:
                o.to_close[ref] = m.Close(**o.head(), reason="error", reply=self._me)
            o.placement, o.dispatched, o.redirect, o.ids_current = None, False, False, True
            o.retry_at = float("inf")  # nothing more is placed; its `Finished` will end it
            o.error = error
            o.to_close[o.detok] = m.Close(**o.head(), reason="error", error=error.info(), reply=self._me)
            return [Send(to, msg) for to, msg in o.to_close.items()]
        o.fence = o.next_fence()
        o.timeline["ended"] = now
        terminal = Terminal(o.record, o.fence, error)
        return [terminal, *self._close(o, "drop", now), self._ended(o, error.code or "error", None)]

    def _expire(self, o: Owned, now: float) -> list[Directive]:
        """The detokenizer should have ended it by now: fence everything and end it from here."""
        o.fence = o.next_fence()
        o.timeline["ended"] = now
        error = DeadlineExceeded("the request's deadline passed")
        terminal = Terminal(o.record, o.fence, error)
        return [terminal, *self._close(o, "expire", now), self._ended(o, error.code or "error", None)]

    def _close(self, o: Owned, reason: str, now: float) -> list[Directive]:
        o.stage = Stage.CLOSING
        o.elsewhere = reason == "superseded"
        o.closing_until = now + CLOSING_S
        o.next_send = now + RESEND_S
        targets = [r for r in (*o.engines, o.detok, *o.to_close) if r is not None]
        if reason == "finish":
            targets = [r for r in targets if r != o.detok]
        o.to_close = {
            ref: m.Close(**o.head(), reason=reason, reply=self._me) for ref in targets if self._is_up(ref)
        }
        o.body = {}
        out: list[Directive] = [Send(to, msg) for to, msg in o.to_close.items()]
        if not o.tokenized:  # any of them may have the prompt in its queue; none has to answer
            out.append(Broadcast("tokenize", m.Close(**o.head(), reason=reason)))
        return out

    def _ended(self, o: Owned, outcome: str, finished: m.Finished | None) -> Ended:
        return Ended(o.record, outcome, finished, o.failovers, o.accepted_at, dict(o.timeline))

    # --- for `actors.adoption` ------------------------------------------------------------------

    def put(self, owned: Owned) -> None:
        """Own a request that another one owned before."""
        self._owned[owned.record.request_id] = owned

    def drop(self, request_id: str) -> None:
        """Forget a request of which nothing is left anywhere."""
        self._owned.pop(request_id, None)

    def advance(self, owned: Owned, now: float) -> list[Directive]:
        """Ask for the first thing that is missing."""
        return self._advance(owned, now)

    def close_elsewhere(self, owned: Owned, ref: Ref) -> list[Directive]:
        """Return what tells an actor that the request is served without it, under the present fence, or is over."""
        reason = "fenced" if owned.stage is Stage.OPEN or owned.elsewhere else "drop"
        close = m.Close(**owned.head(), reason=reason, reply=self._me)
        owned.to_close[ref] = close
        return [Send(ref, close)]

    def _open(self, request_id: str) -> Owned | None:
        owned = self._owned.get(request_id)
        return owned if owned is not None and owned.stage is Stage.OPEN else None


def _superseded(msg: m.Finished) -> bool:
    """Whether a detokenizer only lets go: as an answer it is no ending for whoever commands it by now."""
    return msg.error is not None and msg.error.get("code") == "superseded"
