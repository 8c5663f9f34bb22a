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


class Died(BaseException):
    """Raised by a runner, or its script, in place of what would end the process."""


class MemoryNote:
    """What `runtime.step_note` is to a process: the requests of the last step."""

    def __init__(self) -> None:
        self.last: tuple[str, ...] = ()

    def begin(self, names: tuple[str, ...]) -> None:
        self.last = names

    def end(self) -> None:
        pass


class SteppedEngine:
    """What `EngineThread` is to its actor, on the loop: a step every `PACE_S` while there is work."""

    def __init__(
        self, core: EngineCore, deliver: Callable[[StepResult], None], loop: asyncio.AbstractEventLoop,
        on_death: Callable[[], None],
    ) -> None:  # fmt: skip
        self.core = core
        self.steps = 0
        self.load = core.load()
        self.statistics = core.statistics()
        self.frozen = self.stopped = False
        self._deliver, self._loop, self._on_death = deliver, loop, on_death
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
        try:
            result = self.core.step()
        except Died:
            self.stopped = True
            self._on_death()
            return
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

    on_death: Callable[[tuple[str, ...]], None] | None = None  # told the requests of the step that it died in
    _memory: MemoryNote | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.prefix.index.start()
        self.thread = SteppedEngine(self._build(), self._deliver, self._loop, self._died)  # type: ignore[assignment]
        self.state = "ready"

    def _note(self) -> MemoryNote:
        self._memory = MemoryNote()
        return self._memory

    def _died(self) -> None:
        assert self._memory is not None and self.on_death is not None, "an engine died where nobody buries it"
        self.on_death(self._memory.last)

    @property
    def stepped(self) -> SteppedEngine:
        assert isinstance(self.thread, SteppedEngine)
        return self.thread
