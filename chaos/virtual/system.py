"""Several nodes in one process on one in-memory broker, for tests of actors and for storms, in real or virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from runtime.bus import BusMessage
from runtime.clock import Clock, SystemClock
from runtime.memory_bus import MemoryBroker, MemoryBus
from runtime.node import Node
from runtime.telemetry import Telemetry
from schemas.codec import decode, encode
from schemas.messages import ExitNotice, Message
from schemas.subjects import EXIT, Ref


class NodeClock:
    """One node's view of the system's clock: while the node is frozen, none of its sleeps ends."""

    def __init__(self, base: Clock) -> None:
        self._base = base
        self._thawed = asyncio.Event()
        self._thawed.set()

    def now(self) -> float:
        return self._base.now()

    def wall(self) -> float:
        return self._base.wall()

    async def sleep(self, seconds: float) -> None:
        await self._base.sleep(seconds)
        while not self._thawed.is_set():
            await self._thawed.wait()

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        return self._base.spawn(coro, name=name)

    def random(self) -> float:
        return self._base.random()

    def random_hex(self, nbytes: int) -> str:
        return self._base.random_hex(nbytes)

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()


@dataclass(slots=True)
class _Slot:
    node: Node
    control: MemoryBus
    stream: MemoryBus
    clock: NodeClock
    gone: bool = False


class MemorySystem:
    """`async with MemorySystem(clock=...) as system`; errors of handlers and tasks are raised at its end.

    Args:
        clock: the system's; a `SystemClock` if absent.
        max_payload: of the broker, in bytes.
        strict: raise at exit what handlers and tasks of nodes raised.
    """

    def __init__(self, *, clock: Clock | None = None, max_payload: int = 1_048_576, strict: bool = True) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.broker = MemoryBroker(self.clock, max_payload=max_payload, re_raise=strict)
        self.errors: list[BaseException] = []
        self._slots: dict[str, _Slot] = {}
        self._strict = strict
        self._next_pid = 1000
        self.outside: MemoryBus = self.broker.connect("outside")  # a connection for the test itself

    async def __aenter__(self) -> MemorySystem:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for slot in self._slots.values():
            if not slot.gone:
                self.thaw(slot.node)
                await slot.node.stop()
        await self.outside.close()
        if kind is None and self._strict:
            if self.errors:
                raise self.errors[0]
            self.broker.raise_errors()

    def node(self, name: str, *, host: str = "host-a", **options: Any) -> Node:
        """Make a node on connections of its own, named `<name>-control` and `<name>-stream`."""
        self._next_pid += 1
        clock = NodeClock(self.clock)
        control = self.broker.connect(f"{name}-control")
        stream = self.broker.connect(f"{name}-stream")
        telemetry = Telemetry(name, clock=clock, level="error", otlp_endpoint="", spans_file="")
        node = Node(
            name, host, control=control, stream=stream, clock=clock, telemetry=telemetry, pid=self._next_pid, **options
        )
        node.on_error = self.errors.append
        control.on_closed = stream.on_closed = node.bus_closed
        self._slots[name] = _Slot(node, control, stream, clock)
        return node

    def is_gone(self, name: str) -> bool:
        """Whether the last node of this name was killed."""
        return self._slots[name].gone

    def mend(self, a: str, b: str) -> None:
        """End the partition of two connections; `broker.heal` ends all of them."""
        self.broker._partitions.discard(frozenset((a, b)))

    def buses(self, *names: str) -> list[MemoryBus]:
        """Return the connections of these nodes, or of all."""
        return [b for n, s in self._slots.items() if not names or n in names for b in (s.control, s.stream)]

    async def start(self, *nodes: Node) -> None:
        """Start the given nodes, or all that have not been started, in the order of their making."""
        for slot in self._slots.values():
            if (slot.node in nodes) if nodes else (slot.node._loop is None and not slot.gone):
                await slot.node.start()

    async def kill(
        self, node: Node, *, announce: bool = True, code: int = -9, computing: Sequence[str] = ()
    ) -> None:
        """Let a node vanish as by SIGKILL; unless told otherwise a supervisor announces it at once.

        Args:
            computing: requests of the step in which it crashed, if it did; `code` is another one then.
        """
        slot = self._slots[node.name]
        slot.gone = True
        slot.control.vanish()
        slot.stream.vanish()
        if announce:
            notice = ExitNotice(
                node=node.name, pid=node.pid, code=code, refs=node.refs, computing=list(computing)
            )
            self.outside.publish(EXIT, encode(notice))
        await node.vanish()

    def freeze(self, node: Node) -> None:
        """Stop a node as by SIGSTOP: messages queue up, nothing is handled or sent, its clock's sleeps do not end."""
        slot = self._slots[node.name]
        slot.clock.freeze()
        node.pause(True)
        slot.control.freeze()
        slot.stream.freeze()

    def thaw(self, node: Node) -> None:
        """Let a frozen node go on, as by SIGCONT."""
        slot = self._slots[node.name]
        slot.clock.thaw()
        node.pause(False)
        slot.control.thaw()
        slot.stream.thaw()

    def send(self, to: Ref, message: Message, *, sender: Ref | None = None) -> None:
        """Send a control message from outside."""
        self.outside.publish(to.subject, encode(message, sender))

    async def tap(self, subject: str) -> list[Message]:
        """Return a list that grows by every control message seen on `subject` (wildcards allowed)."""
        seen: list[Message] = []

        def take(message: BusMessage) -> None:
            seen.append(decode(message.payload)[0])

        await self.outside.subscribe(subject, take)
        return seen

    async def until(self, condition: Any, *, limit_s: float = 5.0) -> None:
        """Wait until `condition()` is true.

        Raises:
            TimeoutError: if it is not within `limit_s` of the system's time.
        """
        end = self.clock.now() + limit_s
        while not condition():
            if self.clock.now() >= end:
                raise TimeoutError("the condition did not come true in time")
            await self.clock.sleep(0.005)
