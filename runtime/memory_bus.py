"""The bus inside one process: for tests, simulations and virtual time. As strict and as bounded as the real one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from runtime.bus import BusMessage, Handler
from runtime.clock import Clock
from runtime.pending import Pending
from runtime.requests import Requests
from runtime.wire import check_pattern, check_size, check_subject, decode_headers, encode_headers, matches
from schemas.errors import BusUnavailable

MAX_ROUTES = 16_384
MAX_FROZEN = 65_536


@dataclass(frozen=True, slots=True)
class Faults:
    """What may happen to each message between two connections; randomness is the broker's clock's."""

    delay_s: tuple[float, float] = (0.0, 0.0)
    drop: float = 0.0


@dataclass(slots=True)
class _Route:
    plain: list[_Member]
    queues: dict[str, list[_Member]]


@dataclass(slots=True, eq=False)
class _Member:
    bus: MemoryBus
    pending: Pending

    async def unsubscribe(self) -> None:
        """Deliver nothing from now on."""
        self.bus._leave(self)


class MemoryBroker:
    """Connects the `MemoryBus`es of one event loop."""

    def __init__(self, clock: Clock, *, max_payload: int = 1_048_576, re_raise: bool = False) -> None:
        self.clock = clock
        self.max_payload = max_payload
        self.re_raise = re_raise
        self.faults: dict[str, Faults] = {}  # by connection name, for what it sends
        self.default_faults = Faults()
        self.errors: list[BaseException] = []
        self.lost = 0
        self.routed = 0
        self._members: list[_Member] = []
        self._routes: dict[str, _Route] = {}
        self._partitions: set[frozenset[str]] = set()

    def connect(self, name: str, *, on_closed: Callable[[], None] | None = None) -> MemoryBus:
        """Return a new connection; names need not be unique, partitions and faults go by name."""
        return MemoryBus(self, name, on_closed)

    def partition(self, a: str, b: str) -> None:
        """Lose everything between connections named `a` and `b`, both ways, until `heal`."""
        self._partitions.add(frozenset((a, b)))

    def heal(self) -> None:
        """End all partitions."""
        self._partitions.clear()

    def raise_errors(self) -> None:
        """Raise the first error of a handler, if `re_raise` is set and there was one."""
        if self.re_raise and self.errors:
            raise self.errors[0]

    def has_listener(self, subject: str) -> bool:
        """Whether any subscription matches."""
        route = self._route(subject)
        return bool(route.plain or route.queues)

    def _route(self, subject: str) -> _Route:
        route = self._routes.get(subject)
        if route is None:
            route = _Route([], {})
            for member in self._members:
                if matches(member.pending.pattern, subject):
                    if member.pending.queue_group:
                        route.queues.setdefault(member.pending.queue_group, []).append(member)
                    else:
                        route.plain.append(member)
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            self._routes[subject] = route
        return route

    def _join(self, member: _Member) -> None:
        self._members.append(member)
        self._routes.clear()

    def _leave(self, members: list[_Member]) -> None:
        if members:
            gone = set(map(id, members))
            self._members = [m for m in self._members if id(m) not in gone]
            self._routes.clear()

    def _send(self, source: MemoryBus, message: BusMessage) -> None:
        self.routed += 1
        route = self._route(message.subject)
        if not route.plain and not route.queues:
            if message.reply and not message.no_responders:
                self._send(source, BusMessage(message.reply, b"", no_responders=True))
            return
        for member in route.plain:
            self._deliver(source, member, message)
        for group in route.queues.values():
            self._deliver(source, group[int(self.clock.random() * len(group))], message)

    def _deliver(self, source: MemoryBus, member: _Member, message: BusMessage) -> None:
        if self._partitions and frozenset((source.name, member.bus.name)) in self._partitions:
            self.lost += 1
            return
        faults = self.faults.get(source.name, self.default_faults)
        if faults.drop and self.clock.random() < faults.drop:
            self.lost += 1
            return
        low, high = faults.delay_s
        if not high:
            member.pending.offer(message)
            return
        # Later messages of one publisher never overtake earlier ones; timers of one moment fire in no order.
        at = self.clock.now() + low + (high - low) * self.clock.random()
        at = max(at, math.nextafter(source._not_before.get(member.bus, 0.0), math.inf))
        source._not_before[member.bus] = at
        asyncio.get_running_loop().call_at(at, member.pending.offer, message)


class MemoryBus(Requests):
    """One connection to a `MemoryBroker`; see `runtime.bus.Bus`."""

    def __init__(self, broker: MemoryBroker, name: str, on_closed: Callable[[], None] | None = None) -> None:
        super().__init__(f"_INBOX.{broker.clock.random_hex(8)}")
        self.name = name
        self.on_closed = on_closed
        self._broker = broker
        self._clock = broker.clock
        self._members: list[_Member] = []
        self._up = True
        self._closed = False
        self._frozen = False
        self._held: list[BusMessage] = []
        self._not_before: WeakKeyDictionary[MemoryBus, float] = WeakKeyDictionary()
        self._connected_since = broker.clock.now()
        self._count = dict.fromkeys(
            ("published", "published_bytes", "dropped_disconnected", "dropped_outbox_full", "disconnects",
             "handler_errors", "dropped_pending", "handled"), 0)  # fmt: skip

    @property
    def connected(self) -> bool:
        """Whether messages pass."""
        return self._up and not self._closed

    @property
    def max_payload(self) -> int:
        """Largest message in bytes, headers included."""
        return self._broker.max_payload

    @property
    def connected_since(self) -> float:
        """Monotonic time of the last (re)connect."""
        return self._connected_since

    def push(self) -> None:
        """What is published is on its way at once."""

    def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Send without waiting; dropped and counted while disconnected.

        Raises:
            TooLarge: if payload and headers exceed `max_payload`; nothing is sent.
            ValueError: if the subject or a header is malformed.
        """
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise TypeError(f"a payload is bytes, not {type(payload).__name__}")
        check_subject(subject)
        if reply:
            check_subject(reply)
        size = len(payload)
        fields = None
        if headers:
            block = encode_headers(headers)
            size += len(block)
            fields = decode_headers(block)[1]
        check_size(size, self._broker.max_payload)
        if not self.connected:
            self._count["dropped_disconnected"] += 1
            return
        message = BusMessage(subject, bytes(payload), reply, fields)
        if self._frozen:
            # A stopped process sends what it had prepared once it goes on.
            if len(self._held) >= MAX_FROZEN:
                self._count["dropped_outbox_full"] += 1
            else:
                self._held.append(message)
            return
        self._count["published"] += 1
        self._count["published_bytes"] += size
        self._broker._send(self, message)

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65_536
    ) -> _Member:
        """Deliver messages on `subject` to `handler` from the event loop.

        Raises:
            ValueError: if the subject or queue group is malformed.
            BusUnavailable: if this connection is closed.
        """
        check_pattern(subject, queue)
        if self._closed:
            raise BusUnavailable(f"cannot subscribe to {subject}: the connection is closed")
        pending = Pending(subject, queue, handler, max_pending)
        pending.hold = self._frozen
        if self._broker.re_raise:
            pending.on_error = self._broker.errors.append
        member = _Member(self, pending)
        self._members.append(member)
        if self._up:
            self._broker._join(member)
        return member

    def _leave(self, member: _Member) -> None:
        if member in self._members:
            member.pending.close()
            self._members.remove(member)
            self._broker._leave([member])
            self._absorb(member.pending)

    def _absorb(self, pending: Pending) -> None:
        self._count["handled"] += pending.handled
        self._count["handler_errors"] += pending.errors
        self._count["dropped_pending"] += pending.dropped

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until everything published so far has reached the broker.

        Raises:
            BusUnavailable: if the connection is down.
        """
        await self._clock.sleep(0)
        if not self.connected:
            raise BusUnavailable(f"the bus did not confirm a flush within {timeout_s} s")

    async def drain(self, timeout_s: float) -> int:
        """Withdraw all interest, let what has come be handled, close; returns how many were left unhandled."""
        end = self._clock.now() + timeout_s
        self._broker._leave(self._members)
        while (left := sum(len(m.pending) for m in self._members)) and self._clock.now() < end:
            await self._clock.sleep(0.001)
        await self.close()
        return left

    async def close(self) -> None:
        """Deliver and send nothing from now on."""
        if self._closed:
            return
        self._closed = True
        self._broker._leave(self._members)
        for member in self._members:
            member.pending.close()
            self._absorb(member.pending)
        self._members.clear()

    def statistics(self) -> dict[str, float]:
        """Counters since the connect."""
        out: dict[str, float] = dict(self._count)
        for member in self._members:
            out["handled"] += member.pending.handled
            out["handler_errors"] += member.pending.errors
            out["dropped_pending"] += member.pending.dropped
        out["pending"] = sum(len(m.pending) for m in self._members)
        out["subscriptions"] = len(self._members)
        return out

    # --- what tests do to a connection -----------------------------------------------------------------

    def disconnect(self) -> None:
        """Lose the connection, as if the server had gone; subscriptions come back with `reconnect`."""
        if self._up:
            self._up = False
            self._count["disconnects"] += 1
            self._broker._leave(self._members)

    def reconnect(self) -> None:
        """Come back."""
        if not self._up and not self._closed:
            self._up = True
            self._connected_since = self._clock.now()
            for member in self._members:
                self._broker._join(member)

    def fail(self) -> None:
        """Close for good, as the real client does after an error of the server."""
        if not self._closed:
            self.vanish()
            if self.on_closed is not None:
                asyncio.get_running_loop().call_soon(self.on_closed)

    def vanish(self) -> None:
        """Be gone at once, without a word: what SIGKILL does."""
        self._closed = True
        self._held.clear()
        self._broker._leave(self._members)
        for member in self._members:
            member.pending.close()
        self._members.clear()

    def freeze(self) -> None:
        """Handle and send nothing, while messages still queue up: what SIGSTOP does."""
        self._frozen = True
        for member in self._members:
            member.pending.hold = True

    def thaw(self) -> None:
        """Go on: what SIGCONT does."""
        self._frozen = False
        held, self._held = self._held, []
        for member in self._members:
            member.pending.hold = False
            member.pending.schedule()
        for message in held:
            self._count["published"] += 1
            self._broker._send(self, message)
