"""Goodput and attainment at the edge: medians learnt from requests that were alone, and what became of the others."""

from __future__ import annotations

from edge.goodput import LEAST_ALONE, WINDOW_S, Goodput
from runtime.clock import SystemClock
from runtime.telemetry import Telemetry


def make(ttft_s: float = 0.0, itl_s: float = 0.0) -> tuple[Goodput, Telemetry]:
    """A fresh one, and where it counts."""
    telemetry = Telemetry("edge", clock=SystemClock(), level="error", otlp_endpoint="", spans_file="")
    return Goodput(telemetry, ttft_s, itl_s), telemetry


def count(telemetry: Telemetry, outcome: str, request_class: str = "interactive") -> float:
    """The value on the page."""
    wanted = f'headrace_slo_requests_total{{class="{request_class}",outcome="{outcome}"}} '
    return next(float(line[len(wanted) :]) for line in telemetry.render().splitlines() if line.startswith(wanted))


def test_requests_are_judged_by_medians_that_are_set() -> None:
    """Five times the first one and three times the other are quick enough, more is not."""
    goodput, telemetry = make(0.1, 0.01)
    goodput.ended("interactive", 0.5, 0.03, 10.0)
    goodput.ended("interactive", 0.51, 0.01, 10.0)
    goodput.ended("interactive", 0.1, 0.031, 10.0)
    goodput.ended("batch", 0.1, None, 10.0)
    goodput.refused("interactive", 11.0)
    goodput.failed("interactive", 11.0)

    found = {
        outcome: count(telemetry, outcome) for outcome in ("met", "late_first", "late_tokens", "refused", "failed")
    }

    assert found == {"met": 1, "late_first": 1, "late_tokens": 1, "refused": 1, "failed": 1}
    assert count(telemetry, "met", "batch") == 1
    assert goodput.statistics(12.0)["slo_attainment"] == 2 / 6
    assert goodput.statistics(12.0)["goodput_requests_per_second"] == 1.0


def test_medians_are_learnt_from_requests_that_were_alone() -> None:
    """Before there are enough of them nothing is judged; crowded ones teach nothing."""
    goodput, telemetry = make()
    for _ in range(LEAST_ALONE):
        goodput.ended("interactive", 0.1, 0.01, 1.0, alone=True)
        goodput.ended("interactive", 9.0, 0.9, 1.0)

    assert goodput.unloaded_ttft_s == 0.1 and goodput.unloaded_itl_s == 0.01
    assert count(telemetry, "unjudged") >= LEAST_ALONE - 1
    before = count(telemetry, "met")
    goodput.ended("interactive", 0.4, 0.02, 2.0)
    assert count(telemetry, "met") == before + 1


def test_the_figures_are_of_the_last_minute() -> None:
    """What is older counts no more, and a table of seconds is all that is kept."""
    goodput, _ = make(0.1, 0.01)
    for second in range(5 * WINDOW_S):
        goodput.ended("interactive", 0.1, 0.01, float(second))

    assert goodput.statistics(5.0 * WINDOW_S)["goodput_requests_per_second"] <= 1.0
    assert goodput.statistics(7.0 * WINDOW_S)["goodput_requests_per_second"] == 0.0
    assert len(goodput._seconds) <= WINDOW_S + 1
