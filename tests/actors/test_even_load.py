"""Bursts on equal engines are shared evenly, whatever heartbeats come in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, fleet

from runtime.virtual_clock import VirtualClock, run_virtual

PROMPT = "the water that turns the wheel comes down the headrace " * 2


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int) -> Any:
    """Run `scenario(fleet)` on two engines that decode, one admission actor and no prefill engine."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, whole_below=10_000, prefill=0, admission=1) as f:
            return await scenario(f)

    return run_virtual(main, seed=seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("apart_s", [0.0, 0.04, 0.07])
def test_requests_that_a_heartbeat_counts_do_not_count_twice(apart_s: float, seed: int, tmp_path: Path) -> None:
    """Twelve requests come within a few heartbeats, which tell of some of them; each engine gets half."""

    async def scenario(f: Fleet) -> Counter[str]:
        served: Counter[str] = Counter()
        streams = []
        for number in range(12):
            streams.append(await f.ask(f"{number} {PROMPT}", max_tokens=200))
            if apart_s:
                await f.system.clock.sleep(apart_s)
        await f.system.until(lambda: all(s.num_items > 0 for s in streams), limit_s=5.0)
        for stream in streams:
            served[f.serving("decode", stream)] += 1
        for stream in streams:
            await f.end(stream)
        return served

    served = simulate(scenario, tmp_path, seed=seed)

    assert sorted(served.values()) == [6, 6], served


def test_an_engine_whose_load_falls_says_so_before_its_next_heartbeat(tmp_path: Path) -> None:
    """The next burst finds engines as they are, not as they were a quarter of a second ago."""

    async def scenario(f: Fleet) -> None:
        view = f.nodes["admission-0"].membership
        for number in range(5):
            stream = await f.ask(f"{number} {PROMPT}", max_tokens=60)
            await f.system.until(lambda: any(m.load.get("running") for m in view.members("decode")), limit_s=5.0)
            await f.end(stream)
            await f.system.until(lambda: not any(a.works for a in f.engines()), limit_s=5.0)
            await f.system.clock.sleep(0.12)
            assert not any(m.load.get("running") for m in view.members("decode"))

    simulate(scenario, tmp_path, seed=1)
