"""What an actor is, and what a node gives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from runtime.bus import BusMessage, Subscription
from runtime.clock import Clock
from schemas.messages import Message
from schemas.subjects import Ref

if TYPE_CHECKING:
    from runtime.membership import Membership
    from runtime.telemetry import Telemetry


class Context(Protocol):
    """Everything that an actor may touch outside itself."""

    ref: Ref
    node: str
    host: str
    clock: Clock
    membership: Membership
    telemetry: Telemetry
    private: bool  # works for this node alone: joins no queue group, and other nodes do not choose it

    @property
    def bus_ok(self) -> bool:
        """Whether silence of others may count: the bus is up and this loop's lag is under 200 ms (R7)."""
        ...

    @property
    def bus_age_s(self) -> float:
        """Seconds since the stream connection was made last; 0 while it is down."""
        ...

    def send(self, to: Ref, message: Message) -> None:
        """Send a control message to one incarnation's mailbox, on the control connection."""
        ...

    def anycast(self, kind: str, message: Message) -> None:
        """Send a control message to any one actor of a stateless kind."""
        ...

    def send_hot(self, to: Ref, kind: str, body: list[Any]) -> None:
        """Send items, acks or frames to a mailbox, on the stream connection."""
        ...

    def publish(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        """Publish raw bytes on the stream connection (frames to native clients, broadcasts)."""
        ...

    def hurry(self) -> None:
        """Let what was sent so far leave now: somebody waits for it, and this turn of the loop may go on for a while.

        What a mailbox's handler sends leaves when it returns, without asking, unless more messages wait.
        """
        ...

    async def subscribe(
        self, subject: str, handler: Callable[[BusMessage], None], *, queue: str = ""
    ) -> Subscription: ...

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]: ...


class Actor:
    """Base of all actors: synchronous handlers on the node's loop, one message at a time.

    A node subscribes the mailbox, calls `start`, then `receive` for each message in order, and `tick` every 50 ms.
    Handlers must not block; work of more than a millisecond goes to a thread or a task.
    """

    kind: ClassVar[str]
    anycast: ClassVar[bool] = False  # also reached by `actor.<kind>`, queue group `<kind>`
    tells_ease: ClassVar[bool] = False  # a heartbeat goes out as soon as its load has halved

    def __init__(self, context: Context) -> None:
        self.context = context
        self.ref = context.ref
        self.clock = context.clock
        self.state = "starting"
        self.reason = ""

    async def start(self) -> None:
        """Acquire what the actor needs; the node's heartbeats say `starting` until `state` is `ready`."""
        self.state = "ready"

    async def stop(self) -> None:
        """Release everything; nothing may remain of the actor afterwards."""

    def receive(self, message: Message, sender: Ref | None) -> None:
        """Handle one control message."""
        raise NotImplementedError

    def receive_hot(self, kind: str, body: list[Any], sender: Ref | None) -> None:
        """Handle one hot message (`schemas.items`)."""

    def tick(self) -> None:
        """Called every 50 ms."""

    def member_down(self, ref: Ref, reason: str) -> None:
        """An incarnation is gone: `exit` (confirmed by its supervisor) or `silent` (suspected)."""

    def member_changed(self, ref: Ref, state: str) -> None:
        """A member appeared or changed its state (`starting`, `ready`, `draining`, `failed`)."""

    def drain(self) -> None:
        """Take no new work from now on; the node leaves once `idle` is true or its drain limit is over."""
        self.state = "draining"

    @property
    def idle(self) -> bool:
        """Whether nothing is held that stopping would lose."""
        return True

    def load(self) -> dict[str, Any]:
        """The load snapshot that rides in heartbeats."""
        return {}

    def statistics(self) -> dict[str, float]:
        """Counters and gauges by name; shown in metrics with the prefix `headrace_<kind>_`."""
        return {}
