"""A tiny real node process for supervisor tests: `python -m tests.support.child_node URL NAME [stubborn]`."""

from __future__ import annotations

import asyncio
import signal
import sys

from runtime.actor import Actor
from runtime.clock import SystemClock
from runtime.nats_bus import NatsBus
from runtime.node import Node
from runtime.telemetry import Telemetry
from schemas.messages import Message
from schemas.subjects import Ref


class Idle(Actor):
    """Does nothing."""

    kind = "idle"

    def receive(self, message: Message, sender: Ref | None) -> None:
        pass


class Busy(Idle):
    """Holds work for ever."""

    @property
    def idle(self) -> bool:
        return False


async def main(url: str, name: str, mode: str) -> int:
    clock = SystemClock()
    control = await NatsBus.connect(url, name=f"{name}-control", clock=clock)
    stream = await NatsBus.connect(url, name=f"{name}-stream", clock=clock)
    node = Node(
        name, "host", control=control, stream=stream, clock=clock, telemetry=Telemetry(name, otlp_endpoint=""),
        drain_limit_s=60.0,
    )  # fmt: skip
    node.add("idle", name, Busy if mode == "busy" else Idle)
    return await node.run()


if __name__ == "__main__":
    mode = sys.argv[3] if len(sys.argv) > 3 else ""
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], mode)))
