"""The bench of moves: its figures are those of what was measured."""

from __future__ import annotations

from bench.migration import Way, body_of, counters, grown, share_loaded, verdict


def test_a_way_reports_median_and_maximum_of_its_gaps() -> None:
    """In milliseconds and in steps."""
    way = Way(gaps_s=[0.02, 0.05, 0.03], steps=[2.0, 5.0, 3.0], moved=3, shares=[0.9, 1.0, 0.95])
    assert way.row() == {
        "rounds": 3, "moved": 3, "loaded_share_min": 0.9, "loaded_share_p50": 0.95,
        "gap_ms_p50": 30.0, "gap_ms_max": 50.0, "gap_steps_p50": 3.0, "gap_steps_max": 5.0,
    }  # fmt: skip


def test_requests_differ_from_their_first_word_on() -> None:
    """Nothing of one is in a cache when the next one comes."""
    first, second = (body_of("m", at, 100, 8, warm=False)["messages"][0]["content"] for at in (0, 1))
    assert first[:12] != second[:12]
    assert body_of("m", 0, 100, 8, warm=True)["warm_failover"] is True


PAGE = """
# TYPE headrace_moves_total counter
headrace_moves_total{{node="a",outcome="moved",reason="drain"}} {moved}
headrace_moves_total{{node="a",outcome="refused",reason="drain"}} 7
# TYPE headrace_kv_blocks_loaded_total counter
headrace_kv_blocks_loaded_total{{node="decode-0"}} {first}
headrace_kv_blocks_loaded_total{{node="decode-1"}} {second}
"""


def test_what_the_survivor_loaded_is_counted_past_the_victims_new_counters() -> None:
    """The process that was killed begins at zero again, or is not on the page; that is no loss of the other one's."""
    before = counters(PAGE.format(moved=2, first=90, second=10))

    after = counters(PAGE.format(moved=3, first=0, second=72))
    page = PAGE.format(moved=2, first=0, second=72)
    gone = counters("\n".join(line for line in page.splitlines() if "decode-0" not in line))

    assert grown(before, after, "kv_blocks_loaded_total") == grown(before, gone, "kv_blocks_loaded_total") == 62
    assert grown(before, after, "moves_total", outcome="moved") == 1
    assert grown(before, gone, "moves_total", outcome="moved") == 0
    assert share_loaded(62, 1000) == 1.0


def test_a_warm_round_that_computed_its_prompt_fails() -> None:
    """Its text is right and its gap looks like any other."""
    warm = Way(gaps_s=[0.1, 0.1], steps=[10.0, 10.0], shares=[1.0, 0.98])
    cold = Way(gaps_s=[0.5], steps=[50.0], shares=[0.0])
    drain = Way(gaps_s=[0.02], steps=[2.0], shares=[0.0], moved=1)
    assert verdict({"drain": drain, "cold": cold, "warm": warm}) == []

    warm.shares[1] = 0.02
    assert verdict({"warm": warm}) == ["warm: in 1 of 2 rounds the prompt was computed instead of loaded"]
    drain.moved = 0
    cold.differing = 1
    assert verdict({"drain": drain, "cold": cold}) == ["cold: 1 texts differ", "drain: 0 of 1 streams moved"]
