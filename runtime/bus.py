"""What a bus is. `nats_bus` is the real one, `memory_bus` the one for virtual time; one contract test holds both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BusMessage:
    """A message as it arrives. `no_responders` marks the bus's own answer that nobody listens there."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: dict[str, str] | None = None
    no_responders: bool = False


Handler = Callable[[BusMessage], None]


class Subscription(Protocol):
    """A live subscription; `unsubscribe` takes effect at once on this side."""

    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    """Publish and subscribe, at most once, in order per publisher and subject.

    Handlers are synchronous, run on the event loop, and must not block; an exception in one is counted and logged
    and never ends the subscription.
    """

    @property
    def connected(self) -> bool: ...

    @property
    def max_payload(self) -> int:
        """Largest message in bytes, headers included, as the bus said at the last connect."""
        ...

    @property
    def connected_since(self) -> float:
        """Monotonic time of the last (re)connect."""
        ...

    def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Send without waiting. Dropped and counted while disconnected or when the bounded outbox is full.

        Raises:
            TooLarge: if payload and headers exceed `max_payload`; nothing is sent.
            ValueError: if the subject is malformed.
        """
        ...

    def push(self) -> None:
        """Let what was published so far leave now; without it that is when the loop's turn is over."""
        ...

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65_536
    ) -> Subscription: ...

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: dict[str, str] | None = None
    ) -> BusMessage:
        """Publish and wait for one reply.

        Raises:
            Unavailable: if nobody listens on the subject.
            DeadlineExceeded: if no reply came in time.
        """
        ...

    def new_inbox(self) -> str:
        """Return a subject that nobody else uses."""
        ...

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until everything published so far has reached the bus."""
        ...

    async def drain(self, timeout_s: float) -> int:
        """Stop new deliveries, let queued ones be handled, close; returns how many were left unhandled."""
        ...

    async def close(self) -> None: ...

    def statistics(self) -> dict[str, float]: ...
