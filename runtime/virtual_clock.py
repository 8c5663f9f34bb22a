"""Virtual time: an event loop whose clock jumps to the next timer whenever nothing else can run.

Timers of asyncio itself (`wait_for`, `timeout`, `call_later`) obey it too, so an hour of storm takes a moment.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from runtime.clock import SeededClock

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Raised when no task can run, no timer is set and no thread wakes the loop for ten real seconds."""


class _JumpingSelector(selectors.DefaultSelector):
    """Polls instead of waiting, and moves the loop's clock by the time that it would have waited."""

    virtual_now: float = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            # Only a thread can wake the loop now; that takes real time.
            ready = super().select(10.0)
            if not ready:
                raise DeadlockError("nothing can run, no timer is set, and no thread has woken the loop")
            return ready
        self.virtual_now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time; starts at second 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._jumping.virtual_now


class VirtualClock(SeededClock):
    """The clock of a simulation: to be used on a `VirtualLoop`, with randomness from `seed`."""


def run_virtual(main: Callable[[VirtualClock], Coroutine[Any, Any, T]], *, seed: int = 0) -> T:
    """Run `main(clock)` to its end on a fresh virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main(VirtualClock(seed)))
