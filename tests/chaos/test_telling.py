"""The test that says whether times tell something."""

from __future__ import annotations

import random

import pytest

from chaos.telling import SUSPICIOUS, compare


def drawn(seed: int, count: int, shift: float = 0.0) -> list[float]:
    """Times around a tenth of a second with a long tail."""
    draw = random.Random(seed)
    return [0.1 + shift + draw.expovariate(100.0) for _ in range(count)]


def test_equal_samples_tell_nothing_and_rarely_seem_to() -> None:
    """The chance that it names is one: below a tenth in a tenth of all cases."""
    found = [compare(drawn(seed, 60), drawn(1000 + seed, 60)) for seed in range(300)]

    assert 15 <= sum(each.chance < 0.1 for each in found) <= 45
    assert not any(each.tells for each in found)


def test_a_difference_is_found_in_either_direction() -> None:
    """Of less than the spread of each sample."""
    near, far = drawn(1, 200), drawn(2, 200, shift=0.005)

    assert compare(near, far).tells and compare(near, far).sooner > 0.6
    assert compare(far, near).tells and compare(far, near).sooner < 0.4
    assert compare(far, near).chance == pytest.approx(compare(near, far).chance)


def test_samples_that_do_not_overlap_are_told_apart_always() -> None:
    """By every pair."""
    found = compare(drawn(1, 20), drawn(2, 20, shift=10.0))

    assert found.sooner == 1.0 and found.chance < 1e-6 < SUSPICIOUS


def test_equal_values_count_by_half() -> None:
    """Times on a coarse clock."""
    assert compare([1.0] * 10, [1.0] * 10).sooner == 0.5
    assert not compare([1.0] * 10, [1.0] * 10).tells
    assert compare([1.0] * 8 + [2.0] * 2, [1.0] * 2 + [2.0] * 8).sooner == pytest.approx(0.8)  # 64 pairs, 32 halves


def test_a_few_values_are_refused() -> None:
    """They could not tell anything if there was something."""
    with pytest.raises(ValueError, match="at least 8"):
        compare([1.0] * 7, [1.0] * 100)
