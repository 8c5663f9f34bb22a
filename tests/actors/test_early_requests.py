"""Requests that come before an admission actor has heard of an engine: kept for a moment, then refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, answer, fleet

from runtime.virtual_clock import VirtualClock, run_virtual

PROMPT = "the water that turns the wheel"


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path) -> Any:
    """Run `scenario(fleet)` on an instance with one admission actor."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, whole_below=1000, prefill=0, admission=1) as f:
            return await scenario(f)

    return run_virtual(main, seed=0)


def test_an_engine_that_is_heard_of_a_moment_later_serves_the_request(tmp_path: Path) -> None:
    """The edge, or the client, knew of it before this node did."""

    async def scenario(f: Fleet) -> None:
        admission, clock = f.actor("admission-0"), f.system.clock
        known, heard_at = admission.context_limit, clock.now() + 0.18
        admission.context_limit = lambda: known() if clock.now() >= heard_at else 0
        streams = [await f.ask(PROMPT, max_tokens=20) for _ in range(3)]
        for stream in streams:
            await f.end(stream)
            assert (stream.text, stream.error) == (answer(PROMPT, 20), None)
        await f.rest()

    simulate(scenario, tmp_path)


def test_without_an_engine_a_request_is_refused_after_a_heartbeats_time(tmp_path: Path) -> None:
    """No client waits for an engine that nobody has heard of."""

    async def scenario(f: Fleet) -> None:
        for name in ("decode-0", "decode-1"):
            await f.kill(name, again_after_s=None)
        admission, clock = f.actor("admission-0"), f.system.clock
        await f.system.until(lambda: admission.context_limit() == 0, limit_s=5.0)
        asked_at = clock.now()
        stream = await f.ask(PROMPT, max_tokens=20)
        await f.system.until(lambda: stream.error is not None, limit_s=2.0)
        assert stream.error == "not_ready"
        assert 0.2 < clock.now() - asked_at < 0.5
        assert not admission._early

    simulate(scenario, tmp_path)
