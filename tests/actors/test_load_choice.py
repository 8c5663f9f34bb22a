"""Loading what is stored of a prompt, or computing it: whichever gives the first token sooner; the text is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_fleet import Fleet, answer, fleet

from actors.load_choice import PROBE_S, Loading, Offer, may_pay_far, plan_load, tokens_to_load
from actors.ttft import Costs, LoadCost, PrefillCost
from engine.prefills import Prefill
from kvstore.block import BLOCK_TOKENS
from runtime.virtual_clock import VirtualClock, run_virtual

OFFER = Offer(1000, 160, 480, 960)
SLOW = PrefillCost(0.01, 1e-3)  # of a model on a processor
FAST = PrefillCost(0.01, 1e-6)  # of one on a GPU
NEAR = LoadCost(1.0, 50_000.0, 0.003)
FAR = LoadCost(1.0, 5_000.0)  # the disk, in addition


def test_where_computing_is_slow_all_that_is_stored_is_loaded() -> None:
    """From the disk too."""
    assert tokens_to_load(OFFER, Costs(SLOW, NEAR, disk=FAR)) == 960


def test_where_computing_is_faster_than_any_load_nothing_is_loaded() -> None:
    """Not even what lies in memory."""
    assert tokens_to_load(OFFER, Costs(FAST, NEAR, disk=FAR)) == 160


def test_a_disk_that_is_slower_than_computing_is_left_alone() -> None:
    """Memory is not."""
    middling = PrefillCost(0.01, 1e-4)

    assert tokens_to_load(OFFER, Costs(middling, NEAR, disk=FAR)) == 480


def test_a_load_that_is_hidden_by_what_waits_before_is_made() -> None:
    """It runs beside the steps of others, and spares one."""
    assert tokens_to_load(OFFER, Costs(FAST, NEAR, disk=FAR), queued_s=1.0) == 960


NEARLY = PrefillCost(0.01, 2e-5)  # a load of 320 tokens takes 9.4 ms, and spares 6.4


def test_now_and_then_a_load_is_made_to_see_what_it_takes() -> None:
    """Where it costs its prompt no more than it saves."""
    costs = Costs(NEARLY, NEAR)

    assert plan_load(OFFER, costs, since_load_s=PROBE_S) == Loading(480, probe=True)
    assert plan_load(OFFER, costs, since_load_s=PROBE_S - 0.1) == Loading(160)
    assert plan_load(Offer(1000, 160, 160, 160), costs, since_load_s=PROBE_S) == Loading(160)
    assert plan_load(OFFER, Costs(SLOW, NEAR), since_load_s=PROBE_S) == Loading(960)


def test_a_load_that_costs_much_more_than_it_saves_is_made_the_more_seldom() -> None:
    """Over time no more is spent on it: here 9 ms for a third of one."""
    costs, least_s = Costs(FAST, NEAR), PROBE_S * (0.0094 - 0.00032) / 0.00032

    assert plan_load(OFFER, costs, since_load_s=0.99 * least_s) == Loading(160)
    assert plan_load(OFFER, costs, since_load_s=1.01 * least_s) == Loading(480, probe=True)


def test_a_disk_that_was_found_too_slow_is_measured_without_a_prompt_that_waits() -> None:
    """Its owner reads ahead, and the prompt is computed or loaded as it would have been."""
    assert plan_load(OFFER, Costs(FAST, NEAR, disk=FAR), since_disk_s=PROBE_S) == Loading(160, read_to=960)
    middling = Costs(PrefillCost(0.01, 1e-4), NEAR, disk=FAR)
    assert plan_load(OFFER, middling, since_disk_s=PROBE_S) == Loading(480, read_to=960)
    assert plan_load(OFFER, middling, since_disk_s=PROBE_S - 0.1) == Loading(480)
    assert plan_load(OFFER, Costs(SLOW, NEAR, disk=FAR), since_disk_s=PROBE_S) == Loading(960)


def test_other_hosts_are_asked_where_what_they_may_have_could_pay() -> None:
    """At best they have all of it; a slow way, a fast engine, or little that others have at all rules it out."""
    here, way = Offer(1000, 0, 0, 0), LoadCost(1.0, 100_000.0, 0.005)

    assert may_pay_far(here, Costs(SLOW, NEAR), way, 5000)
    assert not may_pay_far(here, Costs(FAST, NEAR), way, 5000)
    assert not may_pay_far(here, Costs(SLOW, NEAR), LoadCost(1.0, 500.0, 0.005), 5000)
    assert not may_pay_far(here, Costs(SLOW, NEAR), LoadCost(1.0, 100_000.0, 0.1), 64)
    assert may_pay_far(here, Costs(FAST, NEAR), way, 5000, queued_s=1.0)
    assert not may_pay_far(Offer(1000, 0, 960, 999), Costs(SLOW, NEAR), way, 5000)


seconds = st.floats(0.0, 1e-2)


@given(seconds, seconds, st.floats(0.0, 1e-6), seconds, st.floats(1.0, 1e7), st.floats(0.0, 1.0))
def test_no_other_end_would_be_sooner(a: float, b: float, c: float, fixed: float, speed: float, queued: float) -> None:
    """Compared with each block's end, not only with those that the policy looks at."""
    prefill, load = PrefillCost(a, b, c), LoadCost(1.0, speed, fixed)

    def takes(end: int) -> float:
        return max(queued, load.seconds(end - OFFER.resident)) + prefill.seconds(OFFER.tokens - end, end)

    chosen = tokens_to_load(Offer(1000, 160, 960, 960), Costs(prefill, load), queued_s=queued)

    best = min(takes(end) for end in range(160, 961, BLOCK_TOKENS))
    if queued == 0.0:
        assert takes(chosen) <= best + 1e-9
    assert chosen in (160, 960)


# --- in a whole instance ------------------------------------------------------------------------------

PROMPT = "the water that turns the wheel comes down the headrace " * 5
BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
COUNT = 20
LAYOUT = {"prefill": 0, "decode": 1, "kv": 1, "transfer": 1}


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path) -> None:
    """Run `scenario(fleet)` on one engine and one store that has the prompt, and an engine that has nothing."""

    async def main(clock: VirtualClock) -> None:
        async with fleet(clock, directory, **LAYOUT) as f:
            await ask(f)
            await f.system.until(lambda: f.actor("kv-0").statistics().get("stored", 0) >= BLOCKS, limit_s=5.0)
            await anew(f)
            await scenario(f)

    run_virtual(main, seed=0)


async def anew(f: Fleet) -> None:
    """Replace the engine: its pool is empty, the store is as it was and its index known."""
    await f.kill("decode-0")
    engine, kv = f.actor("decode-0"), f.actor("kv-0")
    await f.system.until(lambda: engine.prefix.index.complete(kv.ref), limit_s=10.0)


async def ask(f: Fleet) -> int:
    """Send the prompt, check its text, and return how many of its tokens were loaded."""
    stream = await f.ask(PROMPT, max_tokens=COUNT)
    await f.end(stream)
    assert stream.error is None and stream.text == answer(PROMPT, COUNT)
    await f.rest(limit_s=5.0)
    assert stream.terminal is not None
    return int(stream.terminal["usage"]["cached_tokens"])


def computes_fast(f: Fleet) -> None:
    """Let the engine have measured prompts that take next to nothing, and a load that was made just now."""
    engine = f.actor("decode-0")
    for tokens in (32, 320, 3200) * 10:
        engine.report.computed([Prefill(tokens, 0, 1e-4 + 1e-6 * tokens)])
    engine.report.load()
    engine.prefix._loads_at = f.system.clock.now()


def test_a_stored_prompt_is_computed_where_that_is_sooner(tmp_path: Path) -> None:
    """Nothing is asked of the store; the text is that of a load."""

    async def scenario(f: Fleet) -> None:
        engine, kv = f.actor("decode-0"), f.actor("kv-0")
        computes_fast(f)
        hits = kv.statistics()["hits_total"]
        assert await ask(f) == 0
        assert kv.statistics()["hits_total"] == hits
        assert engine.prefix._dearer._value.get() == BLOCKS

    simulate(scenario, tmp_path)


def test_a_stored_prompt_is_loaded_where_that_is_sooner(tmp_path: Path) -> None:
    """The same instance, before it has measured anything."""

    async def scenario(f: Fleet) -> None:
        f.actor("decode-0").prefix._loads_at = f.system.clock.now()
        assert await ask(f) == BLOCKS * BLOCK_TOKENS

    simulate(scenario, tmp_path)


def test_an_engine_that_computes_all_tries_a_load_after_a_while(tmp_path: Path) -> None:
    """And the next prompt is computed again."""

    async def scenario(f: Fleet) -> None:
        computes_fast(f)
        f.actor("decode-0").prefix._loads_at -= 100 * PROBE_S  # it costs much more than it saves
        assert await ask(f) == BLOCKS * BLOCK_TOKENS
        assert f.system.clock.now() - f.actor("decode-0").prefix._loads_at < PROBE_S

    simulate(scenario, tmp_path)


def test_an_engine_that_is_told_to_loads_in_any_case(tmp_path: Path) -> None:
    """As engines without a model do, whose prompts take no time."""

    async def scenario(f: Fleet) -> None:
        computes_fast(f)
        f.actor("decode-0").always_load = True
        assert await ask(f) == BLOCKS * BLOCK_TOKENS

    simulate(scenario, tmp_path)


def test_what_a_store_has_that_nobody_knew_of_is_thought_over_when_it_answers(tmp_path: Path) -> None:
    """It is not worth a copy: the lease is given back."""

    async def scenario(f: Fleet) -> None:
        engine, kv = f.actor("decode-0"), f.actor("kv-0")
        computes_fast(f)
        engine.prefix.index.complete = lambda store: False
        hits = kv.statistics()["hits_total"]
        assert await ask(f) == 0
        assert kv.statistics()["hits_total"] == hits + BLOCKS and kv.statistics()["reads"] == 0
        assert engine.prefix._dearer._value.get() == BLOCKS

    simulate(scenario, tmp_path)
