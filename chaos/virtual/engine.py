"""An engine that steps on the loop instead of in a thread, so that a run in virtual time is a function of its seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from actors.engine_host import EngineActor
from engine.core import EngineCore
from engine.live import StepResult

PACE_S = 0.02


class SteppedEngine:
    """What `EngineThread` is to its actor, on the loop: a step every `PACE_S` while there is work."""

    def __init__(
        self, core: EngineCore, deliver: Callable[[StepResult], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.core = core
        self.steps = 0
        self.load = core.load()
        self.statistics = core.statistics()
        self.frozen = self.stopped = False
        self._deliver, self._loop = deliver, loop
        self._timer: asyncio.TimerHandle | None = None

    def call(self, fn: Callable[[EngineCore], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.stopped:
            future.cancel()
            return future
        try:
            future.set_result(fn(self.core))
        except Exception as exc:
            future.set_exception(exc)
        self.load = self.core.load()
        self.wake()
        return future

    def wake(self) -> None:
        if self._timer is None and self.core.has_work and not self.frozen and not self.stopped:
            self._timer = self._loop.call_later(PACE_S, self._step)

    def _step(self) -> None:
        self._timer = None
        if self.stopped or self.frozen or not self.core.has_work:
            return
        result = self.core.step()
        self.steps += 1
        self.load, self.statistics = self.core.load(), self.core.statistics()
        if result.eventful or result.num_tokens:
            self._deliver(result)
        self.wake()

    def stop(self) -> bool:
        self.stopped = True
        return True


class SteppedEngineActor(EngineActor):
    """An engine that steps on the loop."""

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.prefix.index.start()
        self.thread = SteppedEngine(self._build(), self._deliver, self._loop)  # type: ignore[assignment]
        self.state = "ready"

    @property
    def stepped(self) -> SteppedEngine:
        assert isinstance(self.thread, SteppedEngine)
        return self.thread
