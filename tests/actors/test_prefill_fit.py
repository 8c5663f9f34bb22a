"""The prefill cost, fitted to what prefills took."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.prefill_fit import PrefillFit
from actors.ttft import PrefillCost

TRUTH = PrefillCost(0.02, 1.1e-4, 1e-9)


def fitted(truth: PrefillCost, *, noise: float = 0.0, count: int = 300, guess: PrefillCost | None = None) -> PrefillFit:
    """A fit after prefills of many lengths, with and without prefixes."""
    draw = random.Random(1)
    fit = PrefillFit(guess or PrefillCost(truth.fixed_s / 5, truth.per_token_s * 4, 0.0))
    for _ in range(count):
        new, prefix = int(draw.lognormvariate(7.5, 1.2)) + 1, draw.choice([0, 512, 8192])
        fit.observe(new, prefix, truth.seconds(new, prefix) * math.exp(draw.gauss(0.0, noise)))
    return fit


@pytest.mark.parametrize(("new", "prefix"), [(1, 0), (100, 0), (1000, 8192), (8000, 0), (100_000, 0)])
def test_a_wrong_guess_is_corrected(new: int, prefix: int) -> None:
    """Estimates come within a few percent of the truth at all lengths, under noise of a tenth."""
    cost = fitted(TRUTH, noise=0.1).cost

    assert cost.seconds(new, prefix) == pytest.approx(TRUTH.seconds(new, prefix), rel=0.08)


def test_the_guess_stands_until_something_was_measured() -> None:
    """Nothing observed, nothing changed; what cannot be is not observed."""
    fit = PrefillFit(TRUTH)
    for new, prefix, seconds in ((0, 0, 1.0), (10, -1, 1.0), (10, 0, 0.0), (10, 0, math.nan), (10, 0, math.inf)):
        fit.observe(new, prefix, seconds)

    assert fit.cost == TRUTH and fit.statistics()["observations_total"] == 0


def test_one_length_alone_does_not_upset_the_others() -> None:
    """What was measured is met; elsewhere the guess keeps its shape, and no time is negative."""
    fit = PrefillFit(TRUTH)
    for _ in range(50):
        fit.observe(1000, 0, 2 * TRUTH.seconds(1000))

    assert fit.cost.seconds(1000) == pytest.approx(2 * TRUTH.seconds(1000), rel=0.02)
    assert TRUTH.seconds(4000) * 0.5 < fit.cost.seconds(4000) < TRUTH.seconds(4000) * 3


def test_a_replica_that_becomes_slower_is_believed_again() -> None:
    """Old observations fade."""
    slow = PrefillCost(TRUTH.fixed_s * 3, TRUTH.per_token_s * 3, TRUTH.per_square_s * 3)
    fit, draw = fitted(TRUTH), random.Random(2)

    for _ in range(1500):
        new = draw.randint(1, 8000)
        fit.observe(new, 0, slow.seconds(new))

    assert fit.cost.seconds(2000) == pytest.approx(slow.seconds(2000), rel=0.15)


def test_a_machine_that_was_away_does_not_spoil_the_fit() -> None:
    """One prefill in twenty takes fifty times as long."""
    draw, fit = random.Random(3), PrefillFit(TRUTH)
    for n in range(400):
        new = draw.randint(1, 8000)
        fit.observe(new, 0, TRUTH.seconds(new) * (50.0 if n % 20 == 0 else 1.0))

    assert fit.cost.seconds(2000) == pytest.approx(TRUTH.seconds(2000), rel=0.15)


@given(
    st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 100_000), st.floats(1e-4, 1e3)), min_size=1, max_size=20)
)
@settings(max_examples=50, deadline=None)
def test_no_term_is_ever_negative(observations: list[tuple[int, int, float]]) -> None:
    """Whatever was measured, more tokens never take less time."""
    fit = PrefillFit(TRUTH)
    for new, prefix, seconds in observations:
        fit.observe(new, prefix, seconds)

    cost = fit.cost

    assert min(cost.fixed_s, cost.per_token_s, cost.per_square_s) >= 0.0
    assert 0.0 < cost.seconds(1000) < math.inf


def test_the_length_of_most_prompts_is_known_and_what_they_take_whatever_term_it_is() -> None:
    """Prompts of about one length leave open which term takes the time, not how long they take."""
    taken, terms = [], []
    for seed in range(20):
        draw, fit = random.Random(seed), PrefillFit(PrefillCost(0.005, 1e-3))
        assert fit.typical == 0.0
        for _ in range(60):
            fit.observe(draw.randint(104, 124), 0, 0.05 * math.exp(draw.gauss(0.0, 0.3)))
        assert 108 < fit.typical < 120
        taken.append(fit.cost.average_s(fit.typical) * fit.typical)
        terms.append(fit.cost.per_token_s)

    assert max(taken) < 1.4 * min(taken)
    assert max(terms) > 10 * min(terms)


def test_a_memory_is_positive() -> None:
    """No memory, no fit."""
    with pytest.raises(ValueError, match="0 observations"):
        PrefillFit(TRUTH, memory=0)
