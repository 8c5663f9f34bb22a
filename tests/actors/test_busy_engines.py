"""Engines whose steps take their time: what they are told waits for the end of a step, as in a thread of their own.

So a step's result can reach the actor when the request that it was for has been closed and dispatched anew.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, SteppedEngine, answer, fleet

import chaos.virtual.engine
from engine.core import EngineCore
from runtime.virtual_clock import VirtualClock, run_virtual

COUNT = 12
DEADLINE_S = 60.0


class BusyEngine(SteppedEngine):
    """Runs commands between steps; the result of a step that was under way comes before theirs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._commands: list[tuple[Callable[[EngineCore], Any], Future[Any]]] = []

    def call(self, fn: Callable[[EngineCore], Any]) -> Future[Any]:
        if self._timer is None or self.stopped:
            return super().call(fn)
        self._commands.append((fn, Future()))
        return self._commands[-1][1]

    def _step(self) -> None:
        self._timer = None
        if self.stopped or self.frozen:
            return
        commands, self._commands = self._commands, []
        if self.core.has_work:
            result = self.core.step()
            self.steps += 1
            if result.eventful or result.num_tokens:
                self._deliver(result)
        for fn, future in commands:
            try:
                future.set_result(fn(self.core))
            except Exception as exc:
                future.set_exception(exc)
        self.load, self.statistics = self.core.load(), self.core.statistics()
        self.wake()

    def wake(self) -> None:
        if self._timer is None and self._commands and not self.core.has_work and not self.frozen and not self.stopped:
            self._timer = self._loop.call_later(0.0, self._step)
        super().wake()


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


@pytest.fixture(autouse=True)
def busy_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines of a fleet are such."""
    monkeypatch.setattr(chaos.virtual.engine, "SteppedEngine", BusyEngine)


def simulate(scenario: Any, directory: Path, *, seed: int = 0) -> Any:
    """Run `scenario(fleet)` on a fresh instance."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory) as f:
            return await scenario(f)

    return run_virtual(main, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("victims", [("decode-0", "decode-1"), ("kv-0", "transfer-0", "decode-0", "prefill-0")])
@pytest.mark.parametrize("seed", range(2))
def test_the_result_of_a_step_is_not_taken_for_that_of_a_later_try(
    seed: int, victims: tuple[str, ...], tmp_path: Path
) -> None:
    """Scenario: a decode engine dies while the prompt of its hand-off is in a step; the next try has the same keys.

    Blocks of the first try must not be handed over for the second one, nor the second one be let go for the first.
    """
    draw = random.Random(seed)
    stems = [
        f"teller {number:02} speaks of the wheel and the water, at length and in order, " * 7 for number in range(24)
    ]
    prompts = [f"{stem}and of year {year}" for stem in stems for year in range(8)]
    ended = 0

    async def scenario(f: Fleet) -> None:
        over = False

        async def work() -> None:
            nonlocal ended
            while not over:
                prompt = draw.choice(prompts)
                stream = await f.ask(prompt, max_tokens=COUNT, deadline_s=DEADLINE_S)
                await f.end(stream, limit_s=DEADLINE_S + 5.0)
                assert stream.error is None and stream.text == answer(prompt, COUNT), stream.terminal
                ended += 1

        workers = [asyncio.ensure_future(work()) for _ in range(8)]
        for _ in range(25):
            await f.system.clock.sleep(0.3 + draw.random() * 0.4)
            await f.kill(draw.choice(victims), again_after_s=0.1 + draw.random())
        over = True
        await asyncio.gather(*workers)
        await f.rest(limit_s=10.0)

    simulate(scenario, tmp_path, seed=seed)
    assert ended > 50
