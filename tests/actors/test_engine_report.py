"""What engines tell of their costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from virtual_fleet import fleet

from engine.prefills import Prefill
from runtime.virtual_clock import VirtualClock, run_virtual


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def test_an_engine_says_that_it_guesses_until_it_has_computed_a_prompt(tmp_path: Path) -> None:
    """Heartbeats carry it for no longer."""

    async def main(clock: VirtualClock) -> None:
        async with fleet(clock, tmp_path, prefill=0, decode=1) as f:
            await f.system.clock.sleep(1.0)
            (engine,) = f.engines()
            assert engine.load()["unmeasured"] is True
            engine.report.computed([Prefill(num_tokens=16, num_cached=0, seconds=0.002)])  # steps take no time here
            assert "unmeasured" not in engine.load() and engine.load()["prefill_tokens"] == 16.0

    run_virtual(main)
