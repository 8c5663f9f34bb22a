"""Performs faults on processes: kill, freeze and thaw, and whatever else is registered in `FAULTS`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaos.instance import Instance


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was performed."""

    fault: str
    victim: str
    pid: int
    at: float  # monotonic seconds, when the victim stopped working


@dataclass(frozen=True, slots=True)
class Target:
    """Who is struck, and for how long if the fault passes."""

    victim: str
    pid: int
    for_s: float = 5.0


def send_signal(pid: int, signum: signal.Signals) -> bool:
    """Signal a process; false if it is gone already."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


class Faults:
    """Strikes processes; frozen ones are thawed in the end, whatever happens.

    Args:
        now: monotonic seconds.
        instance: the private system under test; absent when it is somebody else's.
        proxy: what stands between the nodes and NATS, where a scenario needs one.
    """

    def __init__(self, now: Callable[[], float], *, instance: Instance | None = None, proxy: Any = None) -> None:
        self.now = now
        self.instance = instance
        self.proxy = proxy
        self._passing: set[asyncio.Task[None]] = set()

    def kill(self, pid: int, victim: str) -> Done:
        """SIGKILL."""
        at = self.now()
        send_signal(pid, signal.SIGKILL)
        return Done("kill", victim, pid, at)

    def freeze(self, pid: int, victim: str, *, for_s: float = 5.0) -> Done:
        """SIGSTOP now and SIGCONT later; a supervisor may have killed the process by then, which is its right."""
        at = self.now()
        send_signal(pid, signal.SIGSTOP)
        self.later(for_s, lambda: send_signal(pid, signal.SIGCONT), victim)
        return Done("freeze", victim, pid, at)

    def later(self, after_s: float, undo: Callable[[], Any], victim: str) -> None:
        """Call `undo` after a while, or at once if this is torn down before."""

        async def wait() -> None:
            try:
                await asyncio.sleep(after_s)
            finally:
                undo()

        task = asyncio.create_task(wait(), name=f"end the fault of {victim}")
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def settle(self) -> None:
        """Wait until every passing fault is over."""
        if self._passing:
            await asyncio.wait(list(self._passing))

    async def perform(self, name: str, target: Target) -> Done:
        """Perform a fault by its name.

        Raises:
            KeyError: if there is no such fault.
        """
        return await FAULTS[name](self, target)


Perform = Callable[[Faults, Target], Awaitable[Done]]


async def _kill(faults: Faults, target: Target) -> Done:
    return faults.kill(target.pid, target.victim)


async def _freeze(faults: Faults, target: Target) -> Done:
    return faults.freeze(target.pid, target.victim, for_s=target.for_s)


FAULTS: dict[str, Perform] = {"kill": _kill, "freeze": _freeze}
