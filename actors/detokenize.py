"""The detokenize hop: ids to text, stop strings, the finish, and frames to whoever asked.

It alone writes to a reply subject once it is opened (R4), decides the finish by item index (R8), repeats frames until
they are acknowledged (R5), and answers `fenced` to whatever comes under a lower fence (R3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from actors import replies
from actors.heirs import ORPHAN_RESEND_S, heir
from actors.retired import Retired
from actors.sessions import KEEPALIVE_S, Session
from runtime.actor import Actor, Context
from runtime.bus import BusMessage
from schemas import messages as m
from schemas import subjects
from schemas.errors import BadRequest, Cancelled, DeadlineExceeded, from_info
from schemas.items import ACKS, FRAMES, ITEMS, Ack, ItemBatch, acks_body, frame, parse_acks, parse_items
from schemas.record import Fence
from schemas.subjects import Ref

MAX_SESSIONS = 8192
FINISHED_RESEND_S = 0.2
# "No responders" is a suspicion; three within this time are a client that has left (R6). Before the first item there
# is only a keepalive per second: three of them take a little more than two.
NO_RESPONDER_WINDOW_S = 2.5
NO_RESPONDERS = 3
# After a restart of the bus a client may come back later than this node: nats clients wait 2 s between two attempts.
RECONNECT_GRACE_S = 2.5
SLOW_READER_S = 30.0  # a client that acknowledges nothing for so long, although items wait for it, is given up
SLOW_KEPT_S = 5.0  # and forgotten so long after that
# Owners send `Open` and `Dispatch` together, so items may come first; a lost `Open` is repeated after 0.2 s.
EARLY_S = 0.5
MAX_EARLY = 1024  # requests
FENCING = ("fenced", "superseded")  # reasons of a `Close` after which a request goes on elsewhere
MAX_EARLY_BATCHES = 64  # of one request; what is dropped is repeated


def head_of(msg: m.RequestMessage) -> dict[str, Any]:
    """Return what every message about a request carries."""
    return {
        "request_id": msg.request_id, "fence": msg.fence, "deadline": msg.deadline, "traceparent": msg.traceparent,
    }  # fmt: skip


class Vocabulary(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    def visible_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an output token shows; control tokens show nothing."""
        ...


@dataclass(slots=True)
class _Early:
    """Items of a request that is not open here yet."""

    source: Ref
    until: float
    batches: list[ItemBatch] = field(default_factory=list)


class DetokenizeActor(Actor):
    """Holds one `Session` per open request.

    Args:
        load_vocabulary: called once in a thread; the actor is ready when it returns.
        slow_reader_s: how long a client may take nothing of what waits for it.
    """

    kind: ClassVar[str] = "detokenize"

    def __init__(
        self, context: Context, *, load_vocabulary: Callable[[], Vocabulary], slow_reader_s: float = SLOW_READER_S
    ) -> None:
        super().__init__(context)
        self._slow_reader_s = slow_reader_s
        self._load_vocabulary = load_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._sessions: dict[str, Session] = {}
        self._retired = Retired()
        self._early: dict[str, _Early] = {}
        self._dirty_acks: dict[Ref, set[str]] = {}
        telemetry = context.telemetry
        self._tokens = telemetry.counter("detokenize_items_total", "Items received in order")
        self._fenced = telemetry.counter("detokenize_fenced_total", "Item batches refused under a lower fence")
        self._resent = telemetry.counter("detokenize_frames_resent_total", "Frames repeated unacknowledged")
        self._slow = telemetry.counter("slow_readers_total", "Requests ended because their client took nothing")

    async def start(self) -> None:
        """Load the vocabulary and listen for native clients' acknowledgements."""
        self._vocabulary = await asyncio.get_running_loop().run_in_executor(None, self._load_vocabulary)
        await self.context.subscribe(subjects.acks_of(self.ref), self._on_native_ack)
        self.state = "ready"

    @property
    def idle(self) -> bool:
        """Whether no stream depends on this actor."""
        return not any(not s.ended or not s.client_done for s in self._sessions.values())

    def load(self) -> dict[str, Any]:
        """Open sessions, and the ids of some of them."""
        live = [s.request_id for s in self._sessions.values() if not s.ended]
        return {"running": len(live), "waiting": 0, "requests": live[:64]}

    def statistics(self) -> dict[str, float]:
        """Sessions held, ended ones included."""
        return {"sessions": len(self._sessions)}

    # --- control --------------------------------------------------------------------------------

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        """Open, fence, close and settle."""
        match message:
            case m.Open():
                self._open(message, sender)
            case m.FenceIds():
                self._fence_ids(message, sender)
            case m.Close():
                self._close(message, sender)
            case m.Claim():
                self._claim(message, sender)
            case m.Closed():
                session = self._sessions.get(message.request_id)
                if session is not None and sender == session.source:
                    session.engine_closed = True
                    self._retire(session)
            case m.FinishedAck():
                session = self._sessions.get(message.request_id)
                if session is not None and sender is not None:
                    session.former.discard(sender)
                # A former owner's word may come when another one has opened the request here.
                if session is not None and (sender == session.record.owner or session.orphaned):
                    session.finished_acked = True
                    self._retire(session)
            case _:
                self.context.telemetry.log.warning("unexpected message", type=type(message).__name__)

    def _open(self, msg: m.Open, sender: Ref | None) -> None:
        if self._vocabulary is None or sender is None:
            return  # repeated until answered
        now, wall = self.clock.now(), self.clock.wall()
        session = self._sessions.get(msg.request_id)
        if self._superseded(msg, sender, session):
            return
        if session is not None and session.silent and msg.fence > session.fence:
            del self._sessions[msg.request_id]  # it was fenced off here, and is wanted here again
            session = None
        if session is not None:
            session.reopen(msg)
            session.former = {r for r in session.former if self._may_speak(r)}
            self._tell_former(session, now)
            if session.ended and not session.silent:
                # Its owner does not know, or no more: one whose answer is complete may be asked again by a late try.
                session.finished_acked = False
                self._tell_owner(session, now)
        else:
            if len(self._sessions) >= MAX_SESSIONS:
                return  # the owner repeats, or chooses another
            left = self._retired.fence(msg.request_id)
            if left is not None and left >= msg.fence:
                return  # a repeat that was overtaken by the end
            session = Session.open(
                msg,
                token_bytes=self._vocabulary.visible_bytes,
                eos_ids=self._vocabulary.eos_ids,
                now=now,
                remaining_s=msg.deadline - wall,
            )
            self._sessions[msg.request_id] = session
        if not self._may_speak(session.record.owner):
            session.orphan(now)  # these were its last words
        self.context.send(sender, m.Opened(request_id=msg.request_id, fence=msg.fence))
        early = self._early.pop(msg.request_id, None)
        if early is not None:
            self._items(early.batches, early.source)

    def _claim(self, msg: m.Claim, sender: Ref | None) -> None:
        """Another owner looks for the request of a dead one."""
        if sender is None:
            return
        session = self._sessions.get(msg.request_id)
        ownerless = session is not None and not self.context.membership.is_up(session.record.owner)
        if not ownerless and self._superseded(msg, sender, session):
            return
        if session is not None and session.ended and not session.silent and not session.untaken:
            session.reopen(m.Open(**head_of(msg), record=session.record.model_copy(update={"owner": sender})))
            self._tell_owner(session, self.clock.now())
            return
        if session is not None and not session.silent:
            self.context.send(sender, self._orphan(session))
            return
        # What was only fenced off here may run elsewhere: whoever has it speaks for itself.
        ended = not session.fenced_off if session is not None else self._retired.ended(msg.request_id)
        self.context.send(sender, m.Unclaimed(request_id=msg.request_id, fence=msg.fence, ended=ended))

    def _orphan(self, session: Session) -> m.Orphan:
        return m.Orphan(
            request_id=session.request_id,
            fence=session.fence,
            deadline=session.record.deadline,
            traceparent=session.record.traceparent,
            record=session.record,
            source=session.source,
        )

    def _report_orphan(self, session: Session, now: float) -> None:
        """Tell an admission actor that a request has no owner; `Open` or `FinishedAck` is the answer."""
        session.orphan_at = now + ORPHAN_RESEND_S
        to = self._heir(session)
        session.orphan_tries += 1
        if to is not None and not session.ended:
            self.context.send(to, self._orphan(session))

    def _heir(self, session: Session) -> Ref | None:
        members = [e.ref for e in self.context.membership.members("admission")]
        return heir(session.record, session.record.owner, members, session.orphan_tries)

    def _superseded(self, msg: m.RequestMessage, sender: Ref, session: Session | None) -> bool:
        """Whether another owner commands, or has ended, this request under a higher fence; the lower one is told so."""
        known = session.fence if session is not None else self._retired.fence(msg.request_id)
        if known is None or known <= msg.fence or known.owner == msg.fence.owner:
            return False
        self._tell_superseded(sender, msg.request_id, known)
        return True

    def _may_speak(self, ref: Ref) -> bool:
        """Whether an actor is not known to be dead; one that was not heard yet may have been started just now."""
        member = self.context.membership.get(ref)
        return member is None or not member.exited

    def _tell_former(self, session: Session, now: float) -> None:
        session.former_told_at = now
        for owner in session.former:
            self._tell_superseded(owner, session.request_id, session.fence)

    def _tell_superseded(self, owner: Ref, request_id: str, fence: Fence) -> None:
        error = Cancelled("another owner serves this request", code="superseded")
        self.context.send(owner, m.Finished(request_id=request_id, fence=fence, error=error.info()))

    def _fence_ids(self, msg: m.FenceIds, sender: Ref | None) -> None:
        if sender is None:
            return
        session = self._sessions.get(msg.request_id)
        if self._superseded(msg, sender, session):
            return
        if session is None:
            self.context.send(sender, m.FencedIds(request_id=msg.request_id, fence=msg.fence, known=False))
            return
        session.fence = max(session.fence, msg.fence)
        session.last_item_at = self.clock.now()
        answer = m.FencedIds(
            request_id=msg.request_id,
            fence=msg.fence,
            known=True,
            outputs=[list(c.text.ids) for c in session.choices],
            finished=[i for i, c in enumerate(session.choices) if c.finished],
            ended=session.ended,
        )
        self.context.send(sender, answer)

    def _close(self, msg: m.Close, sender: Ref | None) -> None:
        session = self._sessions.get(msg.request_id)
        # Who commands it under this very fence may want it here, now or next.
        over = msg.fence.before if msg.reason == "fenced" else msg.fence
        if session is not None and over >= session.fence:
            session.fence = over
            error = from_info(msg.error) if msg.error is not None else None
            now, ended = self.clock.now(), session.ended
            if error is not None:
                session.end(error, now)
            else:
                session.end(Cancelled(f"closed: {msg.reason}"), now, silent=True)
                if not ended and msg.reason in FENCING:
                    # Its engine may be at work under this very fence already: it is its owner's to command.
                    session.fenced_off = session.engine_closed = True
                session.finished_acked = True
                owner = session.record.owner
                if sender is not None and sender.kind == "admission" and sender != owner and self._may_speak(owner):
                    session.former.add(owner)  # it was silent for a while, and still thinks that it owns this
                    self._tell_former(session, now)
                self._retired.note(msg.request_id, over, fenced_off=session.fenced_off)
            self._after(session, now)
            self._flush([session])
        self._early.pop(msg.request_id, None)
        reply = msg.reply or sender
        if reply is not None:
            self.context.send(reply, m.Closed(request_id=msg.request_id, fence=msg.fence))

    # --- items in -------------------------------------------------------------------------------

    def receive_hot(self, kind: str, body: list[Any], sender: Ref | None) -> None:
        """Items from engines, acknowledgements from edges."""
        if sender is None:
            return
        if kind == ITEMS:
            self._items(parse_items(body), sender)
        elif kind == ACKS:
            now = self.clock.now()
            touched = []
            for ack in parse_acks(body):
                session = self._sessions.get(ack.request_id)
                if session is not None:
                    self._client_ack(session, ack, now)
                    touched.append(session)
            self._flush(touched)

    def _items(self, batches: list[ItemBatch], sender: Ref) -> None:
        now = self.clock.now()
        urgent: list[Ack] = []
        touched: list[Session] = []
        for batch in batches:
            session = self._sessions.get(batch.request_id)
            if session is None or (session.fenced_off and batch.fence > session.fence):
                if not self._keep_early(batch, sender, now):
                    fence = self._retired.fence(batch.request_id) or batch.fence
                    urgent.append(Ack(batch.request_id, fence, "done", [], 0))
                continue
            if batch.fence < session.fence:
                self._fenced.inc()
                urgent.append(Ack(batch.request_id, session.fence, "fenced", [], 0))
                continue
            session.fence = batch.fence
            finished = sum(c.finished for c in session.choices)
            before = session.completion_tokens
            session.accept(batch, sender, now)
            self._tokens.inc(session.completion_tokens - before)
            touched.append(session)
            if session.ended:
                self._after(session, now)
            if session.ended or sum(c.finished for c in session.choices) != finished:
                urgent.append(session.engine_ack())
            else:
                self._dirty_acks.setdefault(sender, set()).add(session.request_id)
        self._flush(touched)
        if urgent:
            self.context.send_hot(sender, ACKS, acks_body(urgent))

    def _keep_early(self, batch: ItemBatch, sender: Ref, now: float) -> bool:
        """Keep items whose `Open` may be on its way; false if their request has ended here, or there is no room."""
        if self._retired.covers(batch.request_id, batch.fence):
            return False
        early = self._early.get(batch.request_id)
        if early is None:
            if len(self._early) >= MAX_EARLY:
                return False
            early = self._early[batch.request_id] = _Early(sender, now + EARLY_S)
        if early.source == sender and len(early.batches) < MAX_EARLY_BATCHES:
            early.batches.append(batch)
        return True

    def _forget_early(self, now: float) -> None:
        """Nobody has opened these requests here: their engines are told that nothing of them is wanted."""
        for request_id, early in list(self._early.items()):
            if now >= early.until:
                del self._early[request_id]
                ack = Ack(request_id, early.batches[-1].fence, "done", [], 0)
                self.context.send_hot(early.source, ACKS, acks_body([ack]))

    def _after(self, session: Session, now: float) -> None:
        """An ending was decided: tell the engine and the owner; both are repeated by `tick`."""
        if not session.traced:
            session.traced, wall = True, self.clock.wall()
            self.context.telemetry.hop(
                "hop.detokenize",
                session.record.traceparent,
                wall - (now - session.opened_at),
                wall,
                request_id=session.request_id,
                completion_tokens=session.completion_tokens,
            )
        if session.source is not None and not session.engine_closed:
            self._close_engine(session)
        self._tell_owner(session, now)

    def _close_engine(self, session: Session) -> None:
        assert session.source is not None
        close = m.Close(
            request_id=session.request_id, fence=session.fence, reason=session.close_reason, reply=self.ref
        )  # fmt: skip
        self.context.send(session.source, close)

    def _tell_owner(self, session: Session, now: float) -> None:
        session.next_finished = now + FINISHED_RESEND_S
        if session.finished_acked:
            return
        if session.untaken and now < session.deadline and self.state != "draining":
            return  # what the client has not taken is only here: the owner still has to see to it if this dies
        targets = [self._heir(session) if session.orphaned else session.record.owner]
        if session.finished_told:  # nobody has answered: its backup would end it once more half a second after D
            targets.append(session.record.backup)
        session.finished_told += 1
        session.orphan_tries += 1
        finished = session.finished_message(self.clock.wall(), now)
        for to in dict.fromkeys(targets):
            if to is not None:
                self.context.send(to, finished)

    # --- frames out -----------------------------------------------------------------------------

    def _flush(self, sessions: list[Session]) -> None:
        """Send what the clients' windows allow, one message per edge."""
        now = self.clock.now()
        boxes: dict[str, list[dict[str, Any]]] = {}
        for session in sessions:
            while (out := session.take_frame(now)) is not None:
                if session.record.reply.mode == "mailbox":
                    boxes.setdefault(session.record.reply.subject, []).append(out)
                else:
                    replies.write(self.context, session.record.reply, session.request_id, out)
        for subject, frames in boxes.items():
            self.context.send_hot(subjects.parse_mailbox(subject), FRAMES, frames)

    def _on_native_ack(self, message: BusMessage) -> None:
        request_id, of_end = subjects.acked(message.subject)
        session = self._sessions.get(request_id)
        if session is None:
            return
        now = self.clock.now()
        if message.no_responders:
            self._no_responders(session, now)
            return
        try:
            body = replies.read(message.payload, session.record.reply.encoding)
            nexts = [int(n) for n in body.get("next", [])]
            status = "done" if body.get("done") else "ok"
            window = int(body.get("window", -1))
        except (BadRequest, ValueError, TypeError):
            self.context.telemetry.log.warning("malformed acknowledgement", request_id=session.request_id)
            return
        self._client_ack(session, Ack(session.request_id, session.fence, status, nexts, window), now, of_end=of_end)
        self._flush([session])

    def _client_ack(self, session: Session, ack: Ack, now: float, *, of_end: bool = False) -> None:
        """Take an acknowledgement; `of_end`: it answers a terminal, after which a native client need not say `done`."""
        if ack.status == "fenced":
            # The heir may have opened the request here already, or do so next: the fence is its to raise.
            if ack.fence <= session.fence:
                return
            session.fenced_off = session.fenced_off or not session.ended
            session.end(Cancelled("another owner serves this request", code="superseded"), now, silent=True)
            self._after(session, now)
            return
        untaken = session.untaken
        session.client_ack(ack.status, ack.next, ack.window, now)
        if ack.status == "done" and not session.ended:
            session.end(Cancelled("the client wants no more"), now, silent=True)
            self._after(session, now)
        everything = all(c.acked >= len(c.items) for c in session.choices)
        if of_end and session.ended and (everything or session.error is not None):
            session.client_done = True
        if untaken and not session.untaken:
            self._tell_owner(session, now)
        self._retire(session)

    def _no_responders(self, session: Session, now: float) -> None:
        """Three in two seconds, on a connection that is older than that, are a client that has left."""
        if self.context.bus_age_s < RECONNECT_GRACE_S:
            return
        marks = [t for t in session.no_responder_at if now - t < NO_RESPONDER_WINDOW_S]
        session.no_responder_at = [*marks, now]
        if len(session.no_responder_at) >= NO_RESPONDERS and self.context.bus_ok:
            session.end(Cancelled("nobody listens on the reply subject"), now, silent=True)
            session.client_done = True
            self._after(session, now)

    # --- time -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Acknowledge, repeat, keep alive, report stalls, end what is past its deadline."""
        now = self.clock.now()
        for source, ids in self._dirty_acks.items():
            acks = [self._sessions[i].engine_ack() for i in ids if i in self._sessions]
            if acks:
                self.context.send_hot(source, ACKS, acks_body(acks))
        self._dirty_acks.clear()
        self._forget_early(now)
        resend = []
        for session in list(self._sessions.values()):
            if session.orphaned and now >= session.orphan_at:
                self._report_orphan(session, now)
            if session.former and now - session.former_told_at >= FINISHED_RESEND_S:
                self._tell_former(session, now)
            if session.ended:
                self._tick_ended(session, now)
            elif now >= session.deadline:
                session.end(DeadlineExceeded("the request's deadline passed"), now)
                self._after(session, now)
                resend.append(session)
            elif session.stalled(now):
                nexts = [len(c.text.ids) for c in session.choices]
                stalled = m.Stalled(request_id=session.request_id, fence=session.fence, next=nexts)
                self.context.send(session.record.owner, stalled)
            if not self.context.bus_ok:
                session.waits_since = now  # what the client takes, or does not, cannot be heard
            if session.give_up_reader(self._slow_reader_s, now):
                self._slow.inc()
                self._after(session, now)
            if session.rewind(now):
                self._resent.inc()
                resend.append(session)
            elif now - session.last_frame_at >= KEEPALIVE_S and not session.ended:
                session.last_frame_at = now
                # Nobody listens if the client has left, and an edge that is served by others says so.
                empty = frame(session.request_id, session.fence)
                replies.write(self.context, session.record.reply, session.request_id, empty)
            elif not session.client_done:
                resend.append(session)
        self._flush(resend)

    def _tick_ended(self, session: Session, now: float) -> None:
        if now >= session.next_finished:
            if not session.engine_closed and session.source is not None:
                if self.context.membership.is_up(session.source):
                    self._close_engine(session)
                else:
                    session.engine_closed = True
            self._tell_owner(session, now)
        # While the bus is away nobody can be told: the second after the deadline begins when it is back.
        over = now >= session.deadline + 1.0 and self.context.bus_ok
        if over or (session.silent and now >= session.last_frame_at + 5.0):
            session.client_done = session.finished_acked = session.engine_closed = True
        if session.slow_at and now >= session.slow_at + SLOW_KEPT_S:
            session.client_done = True
        self._retire(session)

    def _retire(self, session: Session) -> None:
        if session.settled and self._sessions.pop(session.request_id, None) is not None:
            self._retired.note(session.request_id, session.fence, fenced_off=session.fenced_off)

    def drain(self) -> None:
        """Deliver what is complete before it leaves: its owner lets go of it, and does not have it computed again."""
        super().drain()
        now = self.clock.now()
        for session in list(self._sessions.values()):
            if session.untaken:
                self._tell_owner(session, now)

    def member_changed(self, ref: Ref, state: str) -> None:
        """An owner that was only silent commands again what nobody has claimed meanwhile (R7)."""
        if ref.kind == "admission":
            for session in self._sessions.values():
                if session.orphaned and session.record.owner == ref:
                    session.orphaned = False

    def member_down(self, ref: Ref, reason: str) -> None:
        """Report what a dead owner leaves; forget what a dead edge would still have to answer."""
        now = self.clock.now()
        if ref.kind == "admission":
            for session in list(self._sessions.values()):
                if session.record.owner == ref:
                    session.orphan(now)
                    if session.ended:
                        self._tell_owner(session, now)
                    else:
                        self._report_orphan(session, now)
        if reason != "exit":
            return
        for session in list(self._sessions.values()):
            if session.source == ref:
                session.engine_closed = True
            session.former.discard(ref)
            if session.record.reply.subject == ref.subject and not session.ended:
                session.end(Cancelled("the edge is gone"), now, silent=True)
                self._after(session, now)
            self._retire(session)
