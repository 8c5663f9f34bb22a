"""The engine's thread: commands between steps, steps while there is work, silence otherwise."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.core import EngineCore
from engine.live import StepResult

T = TypeVar("T")

MAX_CRASHES = 3  # steps that fail one after the other before the engine is given up
LET_GO_S = 1e-6  # a wait this short lets another thread have the interpreter
STALLED_WAIT_S = 0.05  # with work that cannot go on now (blocks are held elsewhere), look again this often


class EngineThread:
    """Owns a core. Everything that touches the core runs here, in the order in which it was asked for."""

    def __init__(
        self,
        core: EngineCore,
        deliver: Callable[[StepResult], None],
        on_crash: Callable[[str], None],
        *,
        name: str = "engine",
    ) -> None:
        """Prepare; `start` begins.

        Args:
            core: the engine.
            deliver: called on this thread after each step that did anything.
            on_crash: called once, on this thread, when steps fail one after the other; the thread goes on.
            name: of the thread.
        """
        self._core = core
        self._deliver = deliver
        self._on_crash = on_crash
        self._commands: deque[tuple[Callable[[EngineCore], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._crashes = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.steps = 0
        self.last_step_at = core.now()
        self.last_error = ""
        self.load: dict[str, Any] = core.load()
        self.statistics: dict[str, float] = core.statistics()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def call(self, fn: Callable[[EngineCore], T]) -> Future[T]:
        """Run `fn(core)` between steps; calls run in order. After `stop` the future is cancelled."""
        future: Future[T] = Future()
        with self._wake:
            if not self._stopping:
                self._commands.append((fn, future))
                self._wake.notify()
                return future
        future.cancel()
        return future

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Finish the step in progress and the calls made before, then end; false if the thread did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended:
            while self._commands:
                self._commands.popleft()[1].cancel()
        return ended

    def _run(self) -> None:
        progress = True
        while True:
            self._wait(progress)
            progress = self._run_commands()
            if progress:
                self.load = self._core.load()  # who added something may say so at once
            if self._stopping and not self._commands:
                return
            if self._core.has_work:
                progress = self._step() or progress
            else:
                while not self._commands and self._core.prepare():
                    pass
            self.load = self._core.load()

    def _wait(self, progress: bool) -> None:
        """Sleep until there is something to do."""
        with self._wake:
            if self._commands or self._stopping:
                return
            if not self._core.has_work:
                self.statistics = self._core.statistics()
                # A sequence that only waits to be loaded still has a deadline; commands wake us for all else.
                self._wake.wait()
            elif not progress:
                until = self._core.next_deadline - self._core.wall()
                self._wake.wait(max(0.001, min(STALLED_WAIT_S, until)))

    def _run_commands(self) -> bool:
        ran = False
        while self._commands:
            fn, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            ran = True
            try:
                future.set_result(fn(self._core))
            except BaseException as exc:  # the caller gets it, whatever it is
                future.set_exception(exc)
        return ran

    def _step(self) -> bool:
        """Run one step; whether it got anywhere."""
        try:
            result = self._core.step()
        except Exception as exc:  # the thread outlives any fault of a step
            result = self._core.fail_running(f"{type(exc).__name__}: {exc}")
        self.steps += 1
        self.last_step_at = self._core.now()
        if self.steps % 64 == 0:
            self.statistics = self._core.statistics()
        if result.crash is not None:
            self._crashes += 1
            self.last_error = result.crash
            if self._crashes == MAX_CRASHES:
                self._guard(self._on_crash, result.crash)
        elif result.num_tokens:
            self._crashes = 0
        if result.eventful or result.num_tokens:
            self._guard(self._deliver, result)
        if any(item.index == 0 for item in result.items):
            # Whoever sends them needs the interpreter, and the next step's plan may come after somebody's first token.
            threading.Event().wait(LET_GO_S)
        self._guard(lambda core: core.learn(), self._core)
        return bool(result.eventful or result.num_tokens or result.preempted)

    def _guard(self, fn: Callable[[Any], None], argument: Any) -> None:
        try:
            fn(argument)
        except Exception as exc:  # an observer cannot stop the engine
            self.last_error = f"{type(exc).__name__}: {exc}"
