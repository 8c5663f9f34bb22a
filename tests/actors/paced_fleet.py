"""Instances in virtual time whose engines' steps take what a null engine of a given pace takes.

A step begins, its result comes when its time has passed, and what the engine was told meanwhile waits for that, as
with a thread of its own. So waiting times are those of the policies, to the millisecond, and the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
from virtual_fleet import SteppedEngine

import chaos.virtual.engine
import chaos.virtual.nodes
from engine.core import EngineCore
from engine.null_runner import NullRunner


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a step takes: in any case, for each row that decodes, for each token of a prompt."""

    decode_s: float = 0.008
    decode_s_per_row: float = 0.002
    prefill_s_per_token: float = 0.0008


class PacedRunner(NullRunner):
    """Adds up the time that its steps take instead of letting it pass."""

    def __init__(self, pace: Pace) -> None:
        self.spent_s = 0.0
        super().__init__(
            decode_s=pace.decode_s, decode_s_per_row=pace.decode_s_per_row,
            prefill_s_per_token=pace.prefill_s_per_token, vocab_size=256, sleep=self._spend,
        )  # fmt: skip

    def _spend(self, seconds: float) -> None:
        self.spent_s += seconds


class PacedEngine(SteppedEngine):
    """A step takes as long as its runner says; commands run between steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._commands: list[tuple[Callable[[EngineCore], Any], Future[Any]]] = []
        runner, now = self.core.runner, self.core.now
        assert isinstance(runner, PacedRunner)
        self._paced = runner
        self.core.now = lambda: now() + runner.spent_s

    def call(self, fn: Callable[[EngineCore], Any]) -> Future[Any]:
        if self._timer is None or self.stopped:
            return super().call(fn)
        self._commands.append((fn, Future()))
        return self._commands[-1][1]

    def wake(self) -> None:
        if self._timer is None and self.core.has_work and not self.frozen and not self.stopped:
            self._timer = self._loop.call_later(0.0, self._begin)

    def _begin(self) -> None:
        """Run the commands that came, then decide and compute a step; its result comes later."""
        self._timer = None
        commands, self._commands = self._commands, []
        for fn, future in commands:
            try:
                future.set_result(fn(self.core))
            except Exception as exc:
                future.set_exception(exc)
        if self.stopped or self.frozen or not self.core.has_work:
            self.load = self.core.load()
            return
        result = self.core.step()
        took, self._paced.spent_s = self._paced.spent_s, 0.0

        def end() -> None:
            self.steps += 1
            if result.eventful or result.num_tokens:
                self._deliver(result)
            self.core.learn()
            self.load, self.statistics = self.core.load(), self.core.statistics()
            self._begin()

        self._timer = self._loop.call_later(took, end)


@pytest.fixture
def paced_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines of a fleet keep their runners' pace, and may take as much as those of real instances."""
    monkeypatch.setattr(chaos.virtual.engine, "SteppedEngine", PacedEngine)
    monkeypatch.setattr(chaos.virtual.nodes, "TOKEN_BUDGET", 256)
    monkeypatch.setattr(chaos.virtual.nodes, "NUM_BLOCKS", 2048)
