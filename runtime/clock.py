"""The one seam for time, sleeping, spawning and randomness; everything else is told the time."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

_log = logging.getLogger("headrace.clock")


class Clock(Protocol):
    """Real in production (`SystemClock`), virtual in simulations (`VirtualClock`)."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wall(self) -> float:
        """Unix seconds."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start a task that is referenced until it ends; its exception is logged and counted, never lost."""
        ...

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...

    def random_hex(self, nbytes: int) -> str:
        """Random bytes as hexadecimal text; epochs are `random_hex(8)`."""
        ...


class Tasks:
    """Strong references to running tasks; the exception of each is logged, counted and kept for tests to see."""

    def __init__(self, *, keep_errors: int = 16) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._keep = keep_errors
        self.failed = 0
        self.errors: list[BaseException] = []
        self.on_error: Callable[[str, BaseException], None] | None = None

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start `coro` as a task on the running loop."""
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self.failed += 1
        if len(self.errors) < self._keep:
            self.errors.append(error)
        _log.error("task %s failed: %r", task.get_name(), error, exc_info=error)
        if self.on_error is not None:
            self.on_error(task.get_name(), error)

    async def cancel_all(self) -> None:
        """Cancel every task but the caller's and wait until they have ended."""
        current = asyncio.current_task()
        tasks = [t for t in self._running if t is not current]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)

    def __len__(self) -> int:
        return len(self._running)


class SystemClock:
    """The real clock of this machine."""

    def __init__(self) -> None:
        self.tasks = Tasks()
        self._random = random.SystemRandom()

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""
        await asyncio.sleep(seconds)

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start a task that is referenced until it ends; its exception is logged and counted."""
        return self.tasks.spawn(coro, name=name)

    def random(self) -> float:
        """Uniform in [0, 1)."""
        return self._random.random()

    def random_hex(self, nbytes: int) -> str:
        """Random bytes as hexadecimal text."""
        return self._random.randbytes(nbytes).hex()


class SeededClock:
    """Base of clocks for simulations: randomness is a function of the seed, time is the running loop's."""

    def __init__(self, seed: int = 0, *, wall_at_zero: float = 1_700_000_000.0) -> None:
        self.tasks = Tasks()
        self._random = random.Random(seed)
        self._wall_at_zero = wall_at_zero
        self._loop: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        """Seconds on the running loop's clock; in a thread, on that of the loop that asked last."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            if self._loop is None:
                raise
        return self._loop.time()

    def wall(self) -> float:
        """Unix seconds; `wall_at_zero` at loop time 0."""
        return self._wall_at_zero + self.now()

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""
        await asyncio.sleep(seconds)

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start a task that is referenced until it ends; its exception is logged and counted."""
        return self.tasks.spawn(coro, name=name)

    def random(self) -> float:
        """Uniform in [0, 1), from the seed."""
        return self._random.random()

    def random_hex(self, nbytes: int) -> str:
        """Bytes from the seed as hexadecimal text."""
        return self._random.randbytes(nbytes).hex()


