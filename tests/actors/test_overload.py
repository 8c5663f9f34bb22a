"""Overload on whole instances in virtual time: early refusal, what was computed in vain, tenants side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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


def simulate(scenario: Any, directory: Path) -> Any:
    """Run `scenario(fleet)` on one engine."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, whole_below=10_000, prefill=0, decode=1, admission=1) as f:
            return await scenario(f)

    return run_virtual(main, seed=3)


def wasted(f: Fleet, phase: str, cause: str) -> float:
    """Tokens that the engine counts as computed in vain."""
    name = f'headrace_wasted_tokens_total{{cause="{cause}",phase="{phase}"}} '
    page = f.nodes["decode-0"].telemetry.render()
    return sum(float(line[len(name) :]) for line in page.splitlines() if line.startswith(name))


def test_what_is_computed_for_a_client_that_leaves_is_counted(tmp_path: Path) -> None:
    """Prompt and answer so far were in vain; an answer that is read to its end is not."""

    async def scenario(f: Fleet) -> tuple[float, float]:
        await f.end(await f.ask(PROMPT, max_tokens=5))
        assert wasted(f, "prefill", "cancelled") == wasted(f, "decode", "cancelled") == 0
        stream = await f.ask(f"other {PROMPT}", max_tokens=200)
        await f.items(stream, 10)
        f.cancel(stream)
        await f.rest()
        return wasted(f, "prefill", "cancelled"), wasted(f, "decode", "cancelled")

    prefill, decode = simulate(scenario, tmp_path)

    assert prefill == len(f"other {PROMPT}")
    assert 10 <= decode < 30


def test_what_cannot_begin_before_its_deadline_is_refused_at_once(tmp_path: Path) -> None:
    """It gets a typed error with a time to come back long before its deadline; those before it are not disturbed."""

    async def scenario(f: Fleet) -> dict[str, Any]:
        owner = f.actor("admission-0")
        owner.config = replace(owner.config, slo_ttft_s={"interactive": 60.0})
        early = [await f.ask(f"{number} {PROMPT * 8}", max_tokens=150) for number in range(24)]
        await f.system.clock.sleep(0.7)
        asked_at = f.system.clock.now()
        late = await f.ask(f"late {PROMPT * 8}", max_tokens=5, deadline_s=0.6)
        await f.end(late)
        assert f.system.clock.now() - asked_at < 0.5
        for stream in early:
            await f.end(stream, limit_s=200.0)
            assert stream.error is None
        return dict(late.terminal or {})

    terminal = simulate(scenario, tmp_path)

    assert terminal["error"]["code"] == "overloaded"
    assert terminal["error"]["retry_after_s"] > 0


def test_a_client_that_takes_nothing_fails_alone(tmp_path: Path) -> None:
    """Its request ends with a typed error after the stated time; its neighbour's answer is whole."""

    async def scenario(f: Fleet) -> None:
        slow = await f.ask(PROMPT, max_tokens=180)
        other = await f.ask(f"other {PROMPT}", max_tokens=180)
        await f.items(slow, 3)
        acknowledge, f._ack = f._ack, lambda stream, *, done: None if stream is slow else acknowledge(stream, done=done)
        await f.end(other)
        assert other.error is None and other.num_items == 180
        assert slow.terminal is None or slow.error is None
        await f.system.until(lambda: slow.error == "slow_reader", limit_s=60.0)

    simulate(scenario, tmp_path)
