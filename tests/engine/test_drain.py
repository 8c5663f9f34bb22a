"""The rate at which a queue drains is measured while there is one."""

from __future__ import annotations

import pytest

from engine.drain import FRESH_S, DrainRate


def test_a_rate_is_prompt_tokens_over_the_time_with_a_queue() -> None:
    """Steps that compute no prompt count while one waits; time without a queue does not."""
    drain = DrainRate()
    drain.step(50, 0.0, 0.1, True)
    drain.step(0, 0.1, 0.2, True)
    drain.step(50, 0.2, 0.3, False)
    drain.step(0, 5.0, 5.1, False)
    drain.step(50, 6.0, 6.1, False)

    assert drain.rate(6.1) == pytest.approx(150 / 0.4, rel=0.1)


def test_what_was_not_measured_or_not_of_late_is_not_told() -> None:
    """Zero means not known."""
    drain = DrainRate()
    assert drain.rate(0.0) == 0.0
    drain.step(50, 0.0, 0.1, False)

    assert drain.rate(0.2) > 0.0
    assert drain.rate(0.2 + FRESH_S) == 0.0


def test_new_steps_outweigh_old_ones() -> None:
    """A queue that was fast and is slow is told as slow."""
    drain = DrainRate()
    for turn in range(100):
        drain.step(100, turn * 0.1, turn * 0.1 + 0.1, True)
    for turn in range(100, 200):
        drain.step(10, turn * 0.1, turn * 0.1 + 0.1, True)

    assert drain.rate(20.0) == pytest.approx(100, rel=0.4)
