"""A tiny real node process for tests of supervisors: `python -m tests.support.child_node URL NAME [MODE]`."""

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


class Wedged(Idle):
    """Says after half a second that it has failed, as an engine does whose loop is stuck; its heartbeats go on."""

    def tick(self) -> None:
        self.ticks = getattr(self, "ticks", 0) + 1
        if self.ticks > 10:
            self.state, self.reason = "failed", "no step for 31 s"


KINDS = {"busy": Busy, "wedged": Wedged}


async def main(url: str, name: str, mode: str) -> int:
    clock = SystemClock()
    control = await NatsBus.connect(url, name=f"{name}-control", clock=clock)
    stream = await NatsBus.connect(url, name=f"{name}-stream", clock=clock)
    node = Node(
        name, "host", control=control, stream=stream, clock=clock, telemetry=Telemetry(name, otlp_endpoint=""),
        drain_limit_s=60.0,
    )  # fmt: skip
    node.add("idle", name, KINDS.get(mode, Idle))
    return await node.run()


if __name__ == "__main__":
    mode = sys.argv[3] if len(sys.argv) > 3 else ""
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], mode)))
