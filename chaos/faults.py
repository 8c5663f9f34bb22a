"""Performs faults on processes: kill at once, freeze and thaw, or freeze and then kill."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, assert_never

FaultKind = Literal["kill", "freeze", "freeze_then_kill"]


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was performed."""

    fault: FaultKind
    victim: str
    pid: int
    at: float  # monotonic seconds, when the victim stopped working


def send_signal(pid: int, signum: signal.Signals) -> bool:
    """Signal a process; false if it is gone already."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


class Faults:
    """Strikes processes; frozen ones are thawed in the end, whatever happens."""

    def __init__(self, now: Callable[[], float], *, thaw_after_s: float = 5.0) -> None:
        self._now = now
        self._thaw_after_s = thaw_after_s
        self._thawing: dict[asyncio.Task[None], int] = {}

    def kill(self, pid: int, victim: str) -> Done:
        """SIGKILL."""
        at = self._now()
        send_signal(pid, signal.SIGKILL)
        return Done("kill", victim, pid, at)

    def freeze(self, pid: int, victim: str) -> Done:
        """SIGSTOP now and SIGCONT later; a supervisor may have killed the process by then, which is its right."""
        at = self._now()
        send_signal(pid, signal.SIGSTOP)
        task = asyncio.create_task(self._thaw(pid), name=f"thaw {victim}")
        self._thawing[task] = pid
        task.add_done_callback(lambda t: self._thawing.pop(t, None))
        return Done("freeze", victim, pid, at)

    async def _thaw(self, pid: int) -> None:
        try:
            await asyncio.sleep(self._thaw_after_s)
        finally:
            send_signal(pid, signal.SIGCONT)

    async def settle(self) -> None:
        """Wait until every frozen process has been thawed."""
        if self._thawing:
            await asyncio.wait(list(self._thawing))

    def perform(self, kind: FaultKind, pid: int, victim: str) -> Done:
        """Perform a fault by its name; `freeze_then_kill` is its kill, the freeze came before."""
        match kind:
            case "kill" | "freeze_then_kill":
                return self.kill(pid, victim)
            case "freeze":
                return self.freeze(pid, victim)
            case _:
                assert_never(kind)
