"""The bench of overload: its verdict is over everything that was measured, and over what should have been."""

from __future__ import annotations

from typing import Any

import pytest

from bench.overload import judge, verdict


def curve(with_control: dict[str, float], without: dict[str, float], ttft_ms: float = 80.0) -> dict[str, Any]:
    """Return what `bench.overload.curve` would, of goodputs and medians without load alone."""
    ways = {"with": with_control, "without": without}
    points = {way: {key: {"goodput_per_s": value} for key, value in found.items()} for way, found in ways.items()}
    return {"unloaded": {"ttft_ms": ttft_ms, "itl_ms": 10.0}, **points}


GOOD_NULL = curve({"0.5": 5.0, "1.0": 9.8, "2.0": 10.0, "4.0": 9.6}, {"0.5": 5.0, "1.0": 9.0, "2.0": 1.0, "4.0": 0.0})
GOOD_REAL = curve({"1.0": 9.8, "2.0": 9.6}, {"2.0": 1.0})


def test_both_engines_are_judged() -> None:
    """A real engine that falls short at twice its capacity fails the bench, whatever the other one's curve is."""
    assert verdict({"null": GOOD_NULL, "real": GOOD_REAL}, ())["ok"] is True

    said = verdict({"null": GOOD_NULL, "real": curve({"1.0": 9.8, "2.0": 8.0}, {"2.0": 1.0})}, ())

    assert said["ok"] is False and len(said["why"]) == 1 and said["why"][0].startswith("real: goodput at 2 times")
    assert said["judged"]["null"]["ok"] is True and said["judged"]["real"]["over_peak"] == {"1.0": 1.0, "2.0": 0.816}


def test_refusing_too_much_does_not_lower_the_peak_that_it_is_held_against() -> None:
    """A flat curve below what the same engine served without refusing anybody is no success."""
    timid = curve({"0.5": 4.0, "1.0": 4.0, "2.0": 4.0, "4.0": 4.0}, {"1.0": 9.0, "2.0": 1.0})

    said = judge("null", timid)

    assert said["peak_per_s"] == 9.0 and said["over_peak"]["2.0"] == 0.444 and said["ok"] is False


@pytest.mark.parametrize("missing", ["2.0", "4.0"])
def test_a_load_that_was_not_measured_is_not_met(missing: str) -> None:
    """Fewer loads by an option cannot make the verdict better."""
    found = {**GOOD_NULL, "with": {k: v for k, v in GOOD_NULL["with"].items() if k != missing}}

    said = verdict({"null": found}, ("real",))

    assert said["ok"] is False and f"nothing was measured at {missing[0]} times" in said["why"][0]


def test_parts_left_out_are_named_and_parts_that_are_missing_fail() -> None:
    """Without the real engine the verdict says so; without anything there is none."""
    said = verdict({"null": GOOD_NULL}, ("real",))
    assert said["ok"] is True and said["left_out"] == ["real"]

    assert verdict({"null": GOOD_NULL}, ())["ok"] is False
    assert verdict({}, ("null", "real"))["ok"] is False


def test_nothing_served_is_a_collapse() -> None:
    """A peak of zero is no ratio of one."""
    nothing = curve({"0.5": 0.0, "1.0": 0.0, "2.0": 0.0, "4.0": 0.0}, {"2.0": 0.0})
    assert judge("null", nothing)["ok"] is False


def test_an_engine_of_another_pace_does_not_stand_for_the_real_one() -> None:
    """Its curve would say nothing of the real one's."""
    slow = {**GOOD_NULL, "unloaded": {"ttft_ms": 200.0, "itl_ms": 10.0}}

    said = verdict({"null": slow, "real": GOOD_REAL}, ())

    assert said["null_over_real"] == {"ttft_ms": 2.5, "itl_ms": 1.0}
    assert said["ok"] is False and said["why"] == [
        "the engine without a model takes 2.5 times the real one's ttft_ms without load"
    ]


def test_it_is_held_against_the_real_one_of_just_before() -> None:
    """Minutes later the machine may be another; what was measured then counts where nothing was calibrated."""
    now = {"null": GOOD_NULL, "real": curve({"1.0": 9.8, "2.0": 9.6}, {"2.0": 1.0}, ttft_ms=40.0)}
    before = {"ttft_ms": 80.0, "itl_ms": 12.5}

    assert verdict(now, (), before)["null_over_real"] == {"ttft_ms": 1.0, "itl_ms": 0.8}
    assert verdict(now, (), before)["ok"] is True
    assert verdict(now, ())["null_over_real"]["ttft_ms"] == 2.0 and verdict(now, ())["ok"] is False
    assert verdict({"null": GOOD_NULL}, ("real",), before)["null_over_real"]["ttft_ms"] == 1.0
