"""Restart policy: patience, and where it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.restart import RestartLimits, RestartPolicy


def test_delays_double_up_to_the_limit() -> None:
    """Exits far apart never make a crash loop, only longer waits."""
    policy = RestartPolicy(RestartLimits(healthy_after_s=1e9, crash_window_s=1.0))
    delays = [policy.exited(100.0 * i, 5.0, 1.0 - 1e-12).delay_s for i in range(10)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0])


def test_a_healthy_life_is_forgiven() -> None:
    """The count starts anew."""
    policy = RestartPolicy()
    for i in range(4):
        policy.exited(float(i), 0.5, 0.0)
    decision = policy.exited(30.0, 25.0, 0.0)
    assert decision.delay_s == pytest.approx(0.05)
    assert not decision.crash_loop and not policy.crash_loop


def test_five_exits_in_a_minute_are_a_crash_loop() -> None:
    """It is said, and tried only now and then; it ends with a healthy life."""
    policy = RestartPolicy()
    decisions = [policy.exited(2.0 * i, 1.0, 0.0) for i in range(6)]
    assert [d.crash_loop for d in decisions] == [False] * 4 + [True] * 2
    assert decisions[-1].delay_s == pytest.approx(15.0)
    assert not policy.exited(100.0, 60.0, 0.0).crash_loop


def test_a_child_that_was_asked_to_leave_comes_back_at_once() -> None:
    """Ten restarts by hand are no crash loop; one that ends with 0 as soon as it starts is a failure like any other."""
    policy = RestartPolicy()
    for i in range(10):
        decision = policy.exited(2.0 * i, 2.0, 0.0, code=0)
        assert decision.delay_s == pytest.approx(0.05) and not decision.crash_loop
    for i in range(5):
        decision = policy.exited(30.0 + i, 0.2, 0.0, code=0)
    assert decision.crash_loop


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50), st.floats(0, 1, exclude_max=True)), max_size=200))
def test_a_delay_is_always_within_its_bounds(history: list[tuple[float, float, float]]) -> None:
    """Whatever happens, a child is neither restarted without pause nor given up."""
    policy, now = RestartPolicy(), 0.0
    for step, lived, jitter in history:
        now += step
        decision = policy.exited(now, lived, jitter)
        assert 0.05 <= decision.delay_s <= 30.0
