"""The cost model: what it learns from steps, what it forgets, and the chunk that it allows."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs import CROWD, STRETCH, StepCosts, Work, run_work


def true_cost(work: Work) -> float:
    """An engine with 8 ms per step, 0.5 ms per token and a little for context."""
    return 0.008 + 0.0005 * work.tokens + 2e-8 * work.attended


def decodes(rows: int, context: int = 200) -> Work:
    """A step of `rows` decoding sequences."""
    return Work(rows, rows * context)


def trained(steps: int = 300, *, noise: float = 0.0) -> StepCosts:
    """A model that has seen prompts and decodes of many sizes."""
    costs, rng = StepCosts(), random.Random(7)
    for _ in range(steps):
        work = decodes(rng.randint(1, 32), rng.randint(20, 900))
        if rng.random() < 0.3:
            work = work.plus(run_work(rng.randint(0, 900), rng.randint(16, 256)))
        costs.observe(work, true_cost(work) * (1 + noise * rng.uniform(-1, 1)))
    return costs


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_linear_engine_is_predicted(noise: float) -> None:
    """Sizes that were never measured are predicted from those that were."""
    costs = trained(noise=noise)

    for work in (decodes(1), decodes(5), decodes(40), run_work(0, 256), run_work(700, 100)):
        assert costs.predict(work) == pytest.approx(true_cost(work), rel=0.05 + noise)


def test_nothing_is_claimed_before_two_sizes_were_measured() -> None:
    """A single size says nothing of others; durations of zero say nothing at all."""
    costs = StepCosts()
    costs.observe(decodes(4), 0.0)
    for _ in range(50):
        costs.observe(decodes(4), 0.01)

    assert costs.predict(decodes(4)) is None and not costs.known
    costs.observe(run_work(0, 64), 0.05)
    assert costs.predict(decodes(4)) == pytest.approx(0.01, rel=0.1)


def test_an_hour_of_decoding_does_not_make_it_forget_prompts() -> None:
    """Steps of one size push out those of that size alone."""
    costs = trained()
    for _ in range(20_000):
        costs.observe(decodes(16), true_cost(decodes(16)))

    assert costs.predict(run_work(0, 256)) == pytest.approx(true_cost(run_work(0, 256)), rel=0.1)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    """Within a few dozen steps of each size the new pace is known."""
    costs, rng = trained(), random.Random(3)
    for _ in range(400):
        work = decodes(rng.randint(1, 8)) if rng.random() < 0.7 else run_work(0, rng.randint(200, 256))
        costs.observe(work, 3 * true_cost(work))

    assert costs.predict(decodes(4)) == pytest.approx(3 * true_cost(decodes(4)), rel=0.15)


def test_a_size_with_a_cost_of_its_own_is_learnt() -> None:
    """Kernels change with the batch: what the line misses at one size is corrected at that size."""
    costs = trained()
    for _ in range(100):
        costs.observe(decodes(6), 2 * true_cost(decodes(6)))

    assert costs.predict(decodes(6)) == pytest.approx(2 * true_cost(decodes(6)), rel=0.25)
    assert costs.predict(decodes(24)) == pytest.approx(true_cost(decodes(24)), rel=0.25)


def test_a_chunk_beside_decodes_keeps_their_pace_and_is_not_wasteful() -> None:
    """The largest multiple of 4 whose step stays within the stretch."""
    costs, running = trained(), decodes(16)

    count = costs.prompt_tokens(running, 1, 0, 256)

    pace = true_cost(Work(17, running.attended * 17 / 16))
    assert count % 4 == 0 and count > 8
    assert true_cost(running.plus(run_work(0, count))) <= STRETCH * (1 + CROWD / 17**2) * pace * 1.05
    assert true_cost(running.plus(run_work(0, count + 32))) > STRETCH * pace * 0.95


def test_without_decodes_a_prompt_gets_everything() -> None:
    """Nobody's pace is disturbed."""
    assert trained().prompt_tokens(Work(0, 0), 3, 0, 256) == 256
    assert StepCosts().prompt_tokens(Work(0, 0), 3, 0, 256) == 256


def test_what_was_never_measured_is_approached_by_doubling() -> None:
    """An engine that has only decoded starts with one block and never more than doubles what it has seen."""
    costs = StepCosts()
    for rows in (3, 4):
        for _ in range(20):
            costs.observe(decodes(rows), 0.02)

    assert costs.prompt_tokens(decodes(4), 1, 0, 256) == 16
    costs.observe(decodes(4).plus(run_work(0, 16)), 0.0201)
    assert costs.prompt_tokens(decodes(4), 1, 0, 256) <= 40


def test_a_crowd_that_waits_may_be_let_in_faster() -> None:
    """The pace to hold is the one that the running will have beside those who join."""
    costs = trained()

    assert costs.prompt_tokens(decodes(1), 20, 0, 256) > costs.prompt_tokens(decodes(1), 1, 0, 256)


def test_in_a_crowd_a_step_may_take_about_twice_as_long() -> None:
    """One prompt among many streams hardly widens their steps; many prompts beside one stream do."""
    costs = trained()

    def stretch(rows: int, joining: int) -> float:
        running = decodes(rows)
        count = costs.prompt_tokens(running, joining, 0, 512)
        pace = true_cost(Work(rows + joining, running.attended * (rows + joining) / rows))
        return true_cost(running.plus(run_work(0, count))) / pace

    assert stretch(16, 1) < STRETCH * 1.1
    assert STRETCH * 1.5 < stretch(2, 14) < 2 * STRETCH * 1.05


def test_prefill_of_a_long_context_costs_more_than_its_share() -> None:
    """Chunks are summed, and later ones look at more."""
    costs = trained()

    short, long = costs.prefill_s(256, 256), costs.prefill_s(1024, 256)

    assert short is not None and long is not None and long > 4 * short
    assert StepCosts().prefill_s(100, 50) is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2000), st.floats(1e-5, 2.0)), max_size=40),
    st.integers(0, 64),
    st.integers(0, 64),
    st.integers(0, 2000),
    st.integers(1, 512),
)
def test_any_history_gives_a_usable_chunk(
    history: list[tuple[int, int, float]], rows: int, joining: int, start: int, limit: int
) -> None:
    """Whatever was measured, predictions are not negative and prompts progress within the limit."""
    costs = StepCosts()
    for tokens, context, seconds in history:
        costs.observe(Work(tokens, tokens * context), seconds)

    predicted = costs.predict(decodes(max(1, rows)))
    count = costs.prompt_tokens(Work(rows, rows * 100), joining, start, limit)

    assert predicted is None or predicted >= 0.0
    assert min(8, limit) <= count <= limit


def test_the_longest_step_is_unknown_until_one_of_half_its_size_was_measured() -> None:
    """A line through small steps says nothing of a step that is a hundred times as large."""
    costs = StepCosts()
    for tokens, context in itertools.product((1, 2, 3, 4) * 5, (20, 500)):
        costs.observe(Work(tokens, tokens * context), 0.01 + 0.001 * tokens)
    assert costs.longest_s(512, 4096) is None

    for start in (0, 256, 512):
        costs.observe(run_work(start, 256), 0.266)

    longest = costs.longest_s(512, 4096)
    assert longest is not None and 0.4 <= longest <= 0.7
