"""A bus for a handful of actors on one loop that loses, doubles and overtakes their messages, in time that is told.

Messages are encoded and decoded as on the real one. Everything is a function of the generator, but for the moment at
which a thread is done.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from chaos.kv.model import HOST, Tally
from runtime.actor import Actor
from runtime.bus import BusMessage
from runtime.clock import Clock, Tasks
from runtime.membership import Membership
from runtime.telemetry import Telemetry
from schemas.codec import decode, encode, split
from schemas.messages import ExitNotice, Heartbeat, Message
from schemas.subjects import EXIT, Ref
from schemas.subjects import anycast as anycast_subject

TASK_LIMIT_S = 30.0
MOST_PASSED = 13  # deliveries: those of a step or two


class TellTime:
    """A clock that stands still until it is told; tasks run on the real loop."""

    def __init__(self, rng: random.Random) -> None:
        self.tasks = Tasks()
        self.running: set[asyncio.Task[Any]] = set()
        self._rng = rng
        self._now = 100.0

    def now(self) -> float:
        """Seconds."""
        return self._now

    def wall(self) -> float:
        """Unix seconds."""
        return 1_700_000_000.0 + self._now

    def pass_(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds

    async def sleep(self, seconds: float) -> None:
        """Let others run; time does not pass by it."""
        await asyncio.sleep(0)

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start a task; the wire waits for it before it says that all is quiet."""
        task = self.tasks.spawn(coro, name=name)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task

    def random(self) -> float:
        """Uniform in [0, 1)."""
        return self._rng.random()

    def random_hex(self, nbytes: int) -> str:
        """Bytes as hexadecimal text."""
        return self._rng.randbytes(nbytes).hex()


@dataclass(slots=True, eq=False)
class _Parcel:
    subject: str
    payload: bytes
    kind: str
    number: int
    wait: int = 0  # deliveries that it lets pass when its turn comes
    overtaken: bool = False
    counts: bool = True  # a second copy was counted already


@dataclass(slots=True)
class _Seat:
    actor: Actor
    membership: Membership


class _Subscription:
    async def unsubscribe(self) -> None:
        """Nothing is to be done: it goes with its actor."""


class WireContext:
    """See `runtime.actor.Context`."""

    def __init__(self, wire: Wire, ref: Ref, telemetry: Telemetry) -> None:
        self.ref, self.node, self.host = ref, f"{ref.kind}-{ref.id}", HOST
        self.clock: Clock = wire.clock
        self.membership = Membership(wire.clock)
        self.telemetry = telemetry
        self.private = False
        self._wire = wire

    @property
    def bus_ok(self) -> bool:
        """Whether silence of others may count."""
        return True

    @property
    def bus_age_s(self) -> float:
        """Seconds since the connection was made."""
        return self.clock.now()

    def send(self, to: Ref, message: Message) -> None:
        """Send to a mailbox."""
        self._wire.post(to.subject, encode(message, self.ref))

    def anycast(self, kind: str, message: Message) -> None:
        """Send to any one of a kind."""
        self._wire.post(anycast_subject(kind), encode(message, self.ref))

    def send_hot(self, to: Ref, kind: str, body: list[Any]) -> None:
        """Nobody here has items."""

    def publish(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        """Send to whoever listens."""
        self._wire.post(subject, payload)

    def hurry(self) -> None:
        """Nothing waits here."""

    async def subscribe(self, subject: str, handler: Callable[[BusMessage], None], *, queue: str = "") -> _Subscription:
        """Listen, for as long as the actor is there."""
        self._wire.listen(self.ref, subject, handler)
        return _Subscription()

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start a task."""
        return self.clock.spawn(coro, name=name)


class Wire:
    """Delivers messages one at a time.

    Args:
        rng: decides what happens to which message.
        tally: told what happened.
        trouble: how likely each message between living actors is lost, as likely is doubled, as likely is overtaken.
    """

    def __init__(self, rng: random.Random, tally: Tally, trouble: float) -> None:
        self.clock = TellTime(rng)
        self.trouble = trouble
        self._rng, self._tally = rng, tally
        self._queue: deque[_Parcel] = deque()
        self._held: list[_Parcel] = []
        self._seats: dict[Ref, _Seat] = {}
        self._listeners: dict[str, list[tuple[Ref, Callable[[BusMessage], None]]]] = {}
        self._telemetry = Telemetry("chaos", clock=self.clock, level="error", otlp_endpoint="", spans_file="")
        self._beats = self._number = 0

    # --- who is there ---------------------------------------------------------------------------

    def context(self, kind: str, epoch: str) -> WireContext:
        """Return the context of an incarnation that is about to come."""
        return WireContext(self, Ref(kind, "0", epoch), self._telemetry)

    async def seat(self, actor: Actor) -> None:
        """Start an actor that was made with a context of this wire."""
        self._seats[actor.ref] = _Seat(actor, actor.context.membership)
        actor.context.membership.listen(down=actor.member_down, changed=actor.member_changed)
        await actor.start()

    async def kill(self, actor: Actor) -> None:
        """Let an incarnation vanish, and tell the others; what is on its way to it reaches nobody."""
        del self._seats[actor.ref]
        for listeners in self._listeners.values():
            listeners[:] = [(ref, handler) for ref, handler in listeners if ref != actor.ref]
        await actor.stop()
        notice = ExitNotice(node=actor.context.node, pid=1, code=-9, refs=[actor.ref])
        for seat in self._seats.values():
            seat.membership.handle(BusMessage(EXIT, encode(notice)))

    def beat(self) -> None:
        """Let everybody hear everybody's heartbeat."""
        self._beats += 1
        beats = [
            Heartbeat(
                ref=ref, node=f"{ref.kind}-{ref.id}", host=HOST, pid=1, seq=self._beats, sent_at=self.clock.wall(),
                state=seat.actor.state, load=seat.actor.load(),
            )
            for ref, seat in self._seats.items()
        ]  # fmt: skip
        for seat in self._seats.values():
            for beat in beats:
                seat.membership.heard(beat)

    def tick(self) -> None:
        """Tell every actor that time has passed."""
        for seat in list(self._seats.values()):
            self._call(seat.actor.tick)

    # --- messages -------------------------------------------------------------------------------

    def listen(self, ref: Ref, subject: str, handler: Callable[[BusMessage], None]) -> None:
        """Deliver what is published on a subject."""
        self._listeners.setdefault(subject, []).append((ref, handler))

    def post(self, subject: str, payload: bytes) -> None:
        """Take a message; what is to happen to it is decided now."""
        if not self._reaches(subject):
            return
        self._number += 1
        parcel = _Parcel(subject, bytes(payload), split(payload)[1], self._number)
        draw = self._rng.random() / self.trouble if self.trouble else 3.0
        if draw < 1.0:
            self._tally.fault(f"{parcel.kind} lost", effective=True)
            return
        self._queue.append(parcel)
        if draw < 2.0:
            self._tally.fault(f"{parcel.kind} doubled", effective=True)
            self._queue.append(replace(parcel, wait=self._rng.randrange(1, MOST_PASSED), counts=False))
        elif draw < 3.0:
            parcel.wait = self._rng.randrange(1, MOST_PASSED)

    async def settle(self) -> None:
        """Deliver until nothing is under way, but for who lets others pass, and nobody works.

        Raises:
            TimeoutError: if a task hangs.
        """
        while True:
            parcel = self._take()
            if parcel is not None:
                self._deliver(parcel)
            elif self._queue:
                continue
            elif self.clock.running:
                tasks = set(self.clock.running)
                done, _ = await asyncio.wait(tasks, timeout=TASK_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise TimeoutError(f"{len(tasks)} tasks do not end")
            else:
                await asyncio.sleep(0)
                if not (self._queue or self.clock.running):
                    return

    def _take(self) -> _Parcel | None:
        """Return who is next; nothing if nobody is, or that one lets others pass."""
        due = next((parcel for parcel in self._held if parcel.wait <= 0 or not self.trouble), None)
        if due is not None:
            self._held.remove(due)
            return due
        if not self._queue:
            return None
        parcel = self._queue.popleft()
        if parcel.wait > 0 and self.trouble:
            self._held.append(parcel)
            return None
        return parcel

    def _deliver(self, parcel: _Parcel) -> None:
        for other in self._held:
            other.wait -= 1
            other.overtaken |= other.subject == parcel.subject and other.number < parcel.number
        if parcel.overtaken and parcel.counts:
            self._tally.fault(f"{parcel.kind} overtaken", effective=True)
        seat = next((seat for ref, seat in self._seats.items() if ref.subject == parcel.subject), None)
        if seat is not None:
            message, sender = decode(parcel.payload)
            self._call(partial(seat.actor.receive, message, sender))
        for _, handler in list(self._listeners.get(parcel.subject, ())):
            self._call(partial(handler, BusMessage(parcel.subject, parcel.payload)))

    def _reaches(self, subject: str) -> bool:
        return any(ref.subject == subject for ref in self._seats) or bool(self._listeners.get(subject))

    def _call(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as exc:
            self._tally.expect(False, f"a handler failed: {exc!r}")

    async def close(self) -> None:
        """Stop everybody; what tasks raised is a violation."""
        for seat in list(self._seats.values()):
            await seat.actor.stop()
        self._seats.clear()
        await self.clock.tasks.cancel_all()
        for error in self.clock.tasks.errors:
            self._tally.expect(False, f"a task failed: {error!r}")
