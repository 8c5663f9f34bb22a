"""The one seam for time, sleeping, spawning and randomness; everything else is told the time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol


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
