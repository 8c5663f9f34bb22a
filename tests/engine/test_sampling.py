"""Choosing a token is a pure function of the row, the parameters, and (seed, choice, index)."""

from __future__ import annotations

import collections
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import choose, uniform
from schemas.record import Sampling


def _logits(vocab: int = 5000, seed: int = 1) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _draws(logits: torch.Tensor, sampling: Sampling, count: int) -> collections.Counter[int]:
    return collections.Counter(choose(logits, sampling, 0, i).id for i in range(count))


def test_greedy_takes_the_most_likely_and_the_lowest_of_equals() -> None:
    """Temperatures below 1e-5 are greedy, whatever the seed."""
    logits = torch.zeros(100)
    logits[[40, 7, 99]] = 5.0

    for seed in range(5):
        assert choose(logits, Sampling(temperature=1e-6, seed=seed), 0, 0).id == 7


def test_the_logprob_is_the_models_own() -> None:
    """Before temperature and filters."""
    logits = _logits()

    for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.5, top_k=3, seed=4)):
        picked = choose(logits, sampling, 0, 0)
        assert picked.logprob == pytest.approx(float(logits.double().log_softmax(0)[picked.id]), abs=1e-9)


@pytest.mark.slow
def test_draws_follow_the_distribution() -> None:
    """8,000 draws from four tokens at temperature 2 lie within 5 standard deviations."""
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0])
    want = (logits / 2).softmax(0).tolist()

    counts = _draws(logits, Sampling(temperature=2.0, seed=11), 8000)

    for token, p in enumerate(want):
        assert abs(counts[token] - 8000 * p) < 5 * math.sqrt(8000 * p * (1 - p))


@pytest.mark.slow
def test_top_k_top_p_and_min_p_keep_what_they_say() -> None:
    """Each filter's support, from the sorted distribution written out."""
    logits = _logits()
    order = logits.argsort(descending=True).tolist()
    probabilities = logits.double().softmax(0)
    nucleus, mass = [], 0.0
    for token in order:
        nucleus.append(token)
        mass += float(probabilities[token])
        if mass >= 0.7:
            break
    likely = set((probabilities >= 0.1 * probabilities.max()).nonzero().flatten().tolist())

    assert set(_draws(logits, Sampling(top_k=3, seed=1), 400)) == set(order[:3])
    assert set(_draws(logits, Sampling(top_p=0.7, seed=1), 1000)) <= set(nucleus)
    assert len(set(_draws(logits, Sampling(top_p=0.7, seed=1), 1000))) > min(len(nucleus), 300) // 2
    assert set(_draws(logits, Sampling(min_p=0.1, seed=1), 1000)) <= likely
    assert set(_draws(logits, Sampling(top_p=1e-9, seed=1), 20)) == {order[0]}
    assert set(_draws(logits, Sampling(top_k=1, seed=1), 20)) == {order[0]}


@pytest.mark.slow
def test_a_flat_distribution_is_sorted_as_a_whole() -> None:
    """Where the likely tokens hold too little mass the nucleus is still right: half of equal tokens, the lower ids."""
    logits = torch.zeros(4000)

    drawn = _draws(logits, Sampling(top_p=0.5, seed=3), 500)

    assert max(drawn) < 2000 and len(drawn) > 300
    assert max(_draws(logits, Sampling(top_k=10, seed=3), 200)) == 9


def test_a_draw_depends_on_seed_choice_and_index_and_on_nothing_else() -> None:
    """Equal arguments give the equal id; each other argument changes the sequence."""
    logits = _logits()

    def ids(seed: int, choice: int, first: int = 0) -> list[int]:
        return [choose(logits, Sampling(seed=seed), choice, i).id for i in range(first, first + 20)]

    assert ids(1, 0) == ids(1, 0)
    assert len({tuple(x) for x in (ids(1, 0), ids(2, 0), ids(1, 1), ids(1, 0, 1), ids(-1, 0), ids(2**63, 0))}) == 6


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 1000), st.integers(0, 100000))
def test_uniform_numbers_lie_in_the_unit_interval(seed: int, choice: int, index: int) -> None:
    """Zero may occur, one may not; the purpose gives another number."""
    assert 0.0 <= uniform(seed, choice, index) < 1.0
    assert uniform(seed, choice, index) != uniform(seed, choice, index, "draft")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_of_the_row(bad: float) -> None:
    """The id is invalid, and nothing is raised."""
    logits = _logits()
    logits[17] = bad

    for sampling in (Sampling(temperature=0.0), Sampling(seed=1)):
        picked = choose(logits, sampling, 0, 0)
        assert picked.error is not None and picked.id == -1


def test_forbidden_tokens_are_never_drawn() -> None:
    """A logit of minus infinity has no weight, at any temperature."""
    logits = torch.full((50,), float("-inf"))
    logits[[3, 9]] = torch.tensor([0.0, -200.0])

    assert set(_draws(logits, Sampling(temperature=2.0, seed=1), 200)) == {3}
