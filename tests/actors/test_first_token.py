"""What shortens the way to the first token, in whole instances: it costs none of the promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, SteppedEngineActor, answer, fleet

from runtime.virtual_clock import VirtualClock, run_virtual

PROMPT = "the water that turns the wheel comes down the headrace " * 4
COUNT = 40


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0, **options: Any) -> Any:
    """Run `scenario(fleet)` on a fresh instance."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, **options) as f:
            return await scenario(f)

    return run_virtual(main, seed=seed)


def steps(f: Fleet, kind: str) -> int:
    """Forward passes of all engines of a kind."""
    return sum(a.steps for a in f.engines() if a.ref.kind == kind)


def test_a_short_prompt_on_an_idle_instance_takes_no_hand_off(tmp_path: Path) -> None:
    """Decode computes it, and text, totals and what is left behind are those of a request with a hand-off."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.end(stream)
        assert (stream.text, stream.error) == (answer(PROMPT, COUNT), None)
        assert stream.terminal is not None
        assert stream.terminal["usage"]["prompt_tokens"] == len(PROMPT)
        assert steps(f, "prefill") == 0
        await f.rest()

    simulate(scenario, tmp_path, whole_below=1000)


def test_prompts_are_handed_over_to_engines_that_have_streams(tmp_path: Path) -> None:
    """More requests than decode engines: a running stream is not held up by the next one's prompt."""

    async def scenario(f: Fleet) -> None:
        streams = [await f.ask(PROMPT + str(i), max_tokens=COUNT) for i in range(12)]
        for i, stream in enumerate(streams):
            await f.end(stream)
            assert stream.text == answer(PROMPT + str(i), COUNT)
        assert steps(f, "prefill") > 0
        await f.rest()

    simulate(scenario, tmp_path, whole_below=1000)


@pytest.mark.parametrize("after", [0, 1, 20])
def test_the_text_survives_an_engine_that_ran_the_request_whole(after: int, tmp_path: Path) -> None:
    """SIGKILL before the first item, just after it, and in mid-stream."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.items(stream, after)
        if not after:
            await f.system.until(lambda: any(a.works for a in f.engines()), limit_s=1.0)
        [serving] = [a for a in f.engines() if a.works]
        assert isinstance(serving, SteppedEngineActor)
        await f.kill(f"{serving.ref.kind}-{serving.ref.id}")
        await f.end(stream)
        assert stream.text == answer(PROMPT, COUNT)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path, whole_below=1000)


@pytest.mark.parametrize("lost_s", [0.15, 0.35])
def test_items_that_come_before_their_session_is_open_are_kept(lost_s: float, tmp_path: Path) -> None:
    """Scenario: the dispatch arrives and the `Open` is lost: once it comes, the stream runs without a second try."""

    async def scenario(f: Fleet) -> None:
        for a in range(2):
            for b in range(2):
                f.system.broker.partition(f"admission-{a}-control", f"detokenize-{b}-control")
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.system.clock.sleep(lost_s)
        f.system.broker.heal()
        await f.end(stream)
        assert (stream.text, stream.error) == (answer(PROMPT, COUNT), None)
        assert sum(a.steps for a in f.engines()) < COUNT + 5, "the work was done once"
        await f.rest()

    simulate(scenario, tmp_path, whole_below=1000)


def test_engines_are_told_to_stop_what_no_session_was_opened_for(tmp_path: Path) -> None:
    """Scenario: the owner dies with its `Open` unheard; what its dispatch began does not run to the end."""

    async def scenario(f: Fleet) -> None:
        for a in range(2):
            for b in range(2):
                f.system.broker.partition(f"admission-{a}-control", f"detokenize-{b}-control")
        await f.ask(PROMPT, max_tokens=2000)
        await f.system.until(lambda: sum(a.steps for a in f.engines()) > 3, limit_s=1.0)
        for a in range(2):
            await f.kill(f"admission-{a}")
        await f.system.until(lambda: not any(a.works for a in f.engines()), limit_s=1.0)
        assert sum(a.steps for a in f.engines()) < 500

    simulate(scenario, tmp_path, whole_below=1000)
