"""Comparisons say what their figures say: ratios, medians, targets, slopes, intervals, schedules."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from bench import targets
from bench.client import LoadFailed, Timing
from bench.engine import configurations, ratios
from bench.peers import Schedule, requests_of
from bench.questions import OWN, NoQuestions, default_path, long_text, read
from bench.servers import PeerMissing, ServerSpec, llama, vllm
from bench.slope import least_squares
from bench.speculation import Pair, interval, summary
from bench.targets import Target, medians, ratio
from bench.whole import pause


def test_a_rate_is_held_against_the_fastest_peer_and_a_time_against_the_shortest() -> None:
    """The better one is the larger of rates and the smaller of times."""
    peers = {"a": 50.0, "b": 100.0}

    rate, delay = ratio("tokens_per_s", 200.0, peers), ratio("ttft_p50_ms", 25.0, peers)

    assert rate is not None and (rate.peer, rate.value) == ("b", 2.0)
    assert delay is not None and (delay.peer, delay.value) == ("a", 0.5)


def test_a_named_peer_is_the_one_compared_with() -> None:
    """And without it there is no ratio, as without any peer or with one that has no figure."""
    named = ratio("tokens_per_s", 200.0, {"a": 50.0, "b": 100.0}, "a")

    assert named is not None and named.value == 4.0
    assert ratio("tokens_per_s", 200.0, {"b": 100.0}, "a") is None
    assert ratio("tokens_per_s", 200.0, {"b": math.nan}) is None


def test_a_figure_that_is_missing_meets_no_target() -> None:
    """NaN is neither at least nor at most."""
    assert Target(2.0, True).met(2.0) and not Target(2.0, True).met(1.99)
    assert Target(0.5, False).met(0.5) and not Target(0.5, False).met(0.51)
    assert not Target(2.0, True).met(math.nan) and not Target(0.5, False).met(math.nan)


def test_medians_are_of_those_repetitions_that_have_the_figure() -> None:
    """Nested tables and missing numbers are left out."""
    assert medians([{"a": 1, "x": {}}, {"a": 9, "b": math.nan}, {"a": 2, "b": 4.0}]) == {"a": 2.0, "b": 4.0}


def test_engines_are_compared_figure_by_figure() -> None:
    """Prefill of the long prompt has a target for each peer."""
    mine = {"decode": {"1": 130.0, "2": 9.0}, "prefill": {"1024": 900.0}}
    peers = {
        "llama": {"decode": {"1": 100.0}, "prefill": {"1024": 300.0}},
        "vllm": {"decode": {"1": 40.0}, "prefill": {"1024": 450.0}},
    }

    found = [(r["what"], r["number"], r["over"], r["ratio"], r.get("met")) for r in ratios(mine, peers)]

    assert found == [
        ("decode", 1, "llama", 1.3, True),
        ("prefill", 1024, "llama", 3.0, False),
        ("prefill", 1024, "vllm", 2.0, True),
    ]


def test_the_runner_that_counts_is_measured_in_full_and_the_others_shortly() -> None:
    """References at one thread and 64 rows would take minutes and settle nothing."""
    args = argparse.Namespace(runners=("native", "torch:float32"), threads=(1, 2), rows=(1, 16, 64))

    assert configurations(args) == [
        ("native", 1, (1, 16, 64), 2), ("native", 2, (1, 16, 64), 2), ("torch:float32", 2, (1, 16), 1),
    ]  # fmt: skip


def schedule(**fields: object) -> Schedule:
    """Return a schedule of three repetitions."""
    args = {"prompts": (110, 1024), "streams": (1, 64), "repetitions": 3, "limit_min": 24.0}
    return Schedule(argparse.Namespace(**(args | fields)))


def test_the_heaviest_levels_run_once_and_all_others_each_time() -> None:
    """Long prompts at many streams take minutes on the slowest peer."""
    plan = schedule(streams=(1, 16, 64))
    always = {(110, 1), (110, 16), (110, 64), (1024, 1)}

    levels = [set(plan.levels(repetition, {})) for repetition in range(3)]

    assert levels == [always | {(1024, 16)}, always, always | {(1024, 64)}]
    assert plan.skipped == []


def test_a_single_repetition_has_all_levels() -> None:
    """It is the first and the last."""
    assert len(schedule(repetitions=1).levels(0, {})) == 4


def test_a_level_that_would_break_the_limit_is_left_out_and_named() -> None:
    """Its cost is known from before, or scaled from that of fewer streams."""
    plan = schedule(limit_min=1.0)

    levels = plan.levels(2, {(110, 1): 5.0, (110, 64): 20.0, (1024, 1): 10.0})

    assert levels == [(110, 1), (110, 64), (1024, 1)]
    assert plan.skipped == ["1024 tokens × 64 streams in repetition 3"]


def test_every_stream_has_a_request() -> None:
    """At least one."""
    assert all(requests_of(n, tokens) >= n for n in (1, 4, 16, 64) for tokens in (110, 1024))


def test_a_straight_line_has_its_slope_and_noise_widens_the_bounds() -> None:
    """The true slope lies within them; alike neighbours widen them more than the same noise in another order."""
    xs = [float(x) for x in range(80)]
    noise = [math.sin(x * x) for x in range(80)]
    waves = sorted(noise[:40]) + sorted(noise[40:], reverse=True)

    exact = least_squares(xs, [3 + 2 * x for x in xs])
    noisy = least_squares(xs, [2 * x + n for x, n in zip(xs, noise, strict=True)])
    alike = least_squares(xs, [2 * x + n for x, n in zip(xs, waves, strict=True)])

    assert (exact.value, exact.low, exact.high) == pytest.approx((2.0, 2.0, 2.0))
    assert noisy.low < 2.0 < noisy.high
    assert alike.low < 2.0 < alike.high
    assert alike.high - alike.low > 2 * (noisy.high - noisy.low)


@pytest.mark.parametrize("xs", [[1.0, 2.0, 3.0], [5.0] * 9])
def test_too_few_points_are_no_line(xs: list[float]) -> None:
    """An error, not a slope of zero."""
    with pytest.raises(ValueError):
        least_squares(xs, xs)


def pairs(*ratios_: float) -> list[Pair]:
    """Return pairs in which guessing is that many times as fast."""
    return [Pair(100, r, 1.0, 10, 5, 0) for r in ratios_]


def test_the_interval_holds_the_ratio_and_is_the_same_each_time() -> None:
    """Equal pairs leave no doubt; different ones do."""
    assert interval(pairs(1.5, 1.5, 1.5)) == (1.5, 1.5, 1.5)
    value, low, high = interval(pairs(1.0, 1.2, 1.4, 1.6))
    assert value == pytest.approx(1.3)
    assert 1.0 <= low < value < high <= 1.6
    assert interval(pairs(1.0, 1.2, 1.4, 1.6)) == (value, low, high)


def test_few_pairs_meet_no_target() -> None:
    """However good they look."""
    assert not summary("x", 16, pairs(2.0, 2.0))["met"]
    assert summary("x", 16, pairs(2.0, 2.0, 2.0))["met"]
    assert not summary("x", 16, pairs(0.9, 0.9, 0.9))["met"]


def test_a_pause_is_the_longest_gap_while_a_long_prompt_comes_in() -> None:
    """Gaps before it give the median; those after its first text do not count."""
    timing = Timing(0.0, [1.0, 1.1, 1.2, 1.3, 1.8, 1.9, 4.0], 4.0)

    longest, median = pause([timing], 1.35, 1.85)

    assert (longest, median) == (pytest.approx(0.5), pytest.approx(0.1))


def test_streams_that_had_ended_show_no_pause() -> None:
    """The measurement fails."""
    with pytest.raises(LoadFailed):
        pause([Timing(0.0, [1.0, 1.1, 1.2], 1.2)], 2.0, 3.0)


def test_our_own_prompts_cover_many_tasks() -> None:
    """At least 50 over eight kinds, and 20 texts to summarize; no two alike."""
    questions, texts = read(OWN / "questions.jsonl"), read(OWN / "texts.jsonl")

    assert len({q.text for q in questions}) >= 50
    assert len({q.category for q in questions}) >= 8
    assert len({q.text for q in texts if q.category == "summarization"}) >= 20
    assert read(default_path("mt_bench")) and read(default_path("spec_bench"))


def test_long_texts_share_no_beginning_and_have_the_wished_length() -> None:
    """So no server finds one in another's blocks."""
    texts = [long_text(number, tokens) for tokens in (110, 1024) for number in range(200)]

    assert len({text[:24] for text in texts[:200]}) == 200
    assert len({text[60:120] for text in texts[:200]}) > 100
    assert all(300 < len(t) < 450 for t in texts[:200]) and all(4400 < len(t) < 4900 for t in texts[200:])


@pytest.mark.parametrize("content", ["", "{}\n", '{"question_id": 1, "category": "x", "turns": []}\n', "no json\n"])
def test_a_file_without_questions_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    """Also one that is not there."""
    path = tmp_path / "q.jsonl"
    path.write_text(content)

    with pytest.raises(NoQuestions, match=r"q\.jsonl"):
        read(path)
    with pytest.raises(NoQuestions, match=r"other\.jsonl"):
        read(tmp_path / "other.jsonl")


def test_a_peer_that_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    """Nothing is measured against nobody."""
    with pytest.raises(PeerMissing, match=r"scripts/peers\.sh"):
        llama(tmp_path, tmp_path / "model.gguf", 1, 2, 4096)
    with pytest.raises(PeerMissing, match=r"scripts/peers\.sh"):
        vllm(tmp_path, 1)


def test_the_printed_command_can_be_pasted() -> None:
    """Environment first, blanks quoted."""
    spec = ServerSpec("x", ("serve", "a b"), 1, {"K": "v w"})

    assert spec.command == "K='v w' serve 'a b'"
    assert targets.START.peer == "vllm"
