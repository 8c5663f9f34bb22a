"""The `Context` that a node gives each of its actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime.bus import Bus, BusMessage, Subscription
from runtime.clock import Clock, Tasks
from schemas.codec import encode, encode_hot
from schemas.messages import Message
from schemas.subjects import Ref, hot
from schemas.subjects import anycast as anycast_subject

if TYPE_CHECKING:
    from runtime.mailbox import Mailbox
    from runtime.membership import Membership
    from runtime.neighbours import Neighbours
    from runtime.telemetry import Telemetry


@dataclass(slots=True)
class ActorContext:
    """See `runtime.actor.Context`."""

    ref: Ref
    node: str
    host: str
    clock: Clock
    membership: Membership
    telemetry: Telemetry
    control: Bus
    stream: Bus
    tasks: Tasks
    well: Callable[[], bool]
    neighbours: Neighbours
    private: bool = False
    mailbox: Mailbox | None = None
    subscriptions: list[Subscription] = field(default_factory=list)
    shared: list[Subscription] = field(default_factory=list)  # in queue groups: given up at once by a drain

    @property
    def bus_ok(self) -> bool:
        """Whether silence of others may count."""
        return self.well()

    @property
    def bus_age_s(self) -> float:
        """Seconds since the stream connection was made last; 0 while it is down."""
        return self.clock.now() - self.stream.connected_since if self.stream.connected else 0.0

    def send(self, to: Ref, message: Message) -> None:
        """Send a control message to one incarnation's mailbox; one in this node gets it without the bus.

        Raises:
            TooLarge: if the bus cannot carry it.
        """
        subject, payload = to.subject, encode(message, self.ref)
        if not self.neighbours.take(subject, payload):
            self.control.publish(subject, payload)

    def anycast(self, kind: str, message: Message) -> None:
        """Send a control message to any one actor of a stateless kind: to the one in this node if that is idle.

        Raises:
            TooLarge: if the bus cannot carry it.
        """
        subject, payload = anycast_subject(kind), encode(message, self.ref)
        if not self.neighbours.take_any(kind, subject, payload):
            self.control.publish(subject, payload)

    def send_hot(self, to: Ref, kind: str, body: list[Any]) -> None:
        """Send items, acks or frames to a mailbox, on the stream connection.

        Raises:
            TooLarge: if the bus cannot carry it.
        """
        subject, payload = hot(to), encode_hot(kind, self.ref, body)
        if not self.neighbours.take(subject, payload):
            self.stream.publish(subject, payload)

    def publish(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        """Publish raw bytes on the stream connection.

        Raises:
            TooLarge: if the bus cannot carry it.
        """
        self.stream.publish(subject, payload, reply=reply)

    def hurry(self) -> None:
        """Let what was sent so far leave now."""
        self.control.push()
        self.stream.push()

    async def subscribe(
        self, subject: str, handler: Callable[[BusMessage], None], *, queue: str = ""
    ) -> Subscription:
        """Deliver messages to `handler` like to the actor's own handlers: an exception is counted, not lost."""

        def guarded(message: BusMessage) -> None:
            assert self.mailbox is not None
            self.mailbox.call(lambda: handler(message))

        subscription = await self.stream.subscribe(subject, guarded, queue=queue)
        (self.shared if queue else self.subscriptions).append(subscription)
        return subscription

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start a task that ends with the node; its exception is logged and counted."""
        return self.tasks.spawn(coro, name=name)
