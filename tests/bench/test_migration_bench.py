"""The bench of moves: its figures are those of what was measured."""

from __future__ import annotations

from bench.migration import Way, body_of


def test_a_way_reports_median_and_maximum_of_its_gaps() -> None:
    """In milliseconds and in steps."""
    way = Way(gaps_s=[0.02, 0.05, 0.03], steps=[2.0, 5.0, 3.0], moved=3)
    assert way.row() == {
        "rounds": 3, "moved": 3, "gap_ms_p50": 30.0, "gap_ms_max": 50.0, "gap_steps_p50": 3.0, "gap_steps_max": 5.0,
    }  # fmt: skip


def test_requests_differ_from_their_first_word_on() -> None:
    """Nothing of one is in a cache when the next one comes."""
    first, second = (body_of("m", at, 100, 8, warm=False)["messages"][0]["content"] for at in (0, 1))
    assert first[:12] != second[:12]
    assert body_of("m", 0, 100, 8, warm=True)["warm_failover"] is True
