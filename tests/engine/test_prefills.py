"""What prompts took: each is charged by its share of the steps that it took part in."""

from __future__ import annotations

from pathlib import Path

from engines import Time, make_core, plain

from engine.prefills import Prefill
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key, Sequence
from schemas.record import Sampling


def slow_runner(time: Time) -> ScriptedRunner:
    """Takes 10 ms per token of a prompt."""

    def pass_time(seconds: float) -> None:
        time.at += seconds

    return ScriptedRunner(plain, vocab_size=2000, max_context=1024, prefill_pace_s_per_token=0.01, sleep=pass_time)


def prompt(name: str, num_tokens: int, first: int = 0) -> Sequence:
    """A sequence with a prompt of so many tokens."""
    ids = [(first + i) % 1000 for i in range(num_tokens)]
    return Sequence(Key(name, 0), ids, Sampling(max_tokens=3, temperature=0.0))


def test_a_prompt_in_chunks_is_reported_once_with_all_its_time(tmp_path: Path) -> None:
    """Three steps of at most 48 tokens, 10 ms each token; the step that completes it says so."""
    time = Time()
    core = make_core(tmp_path, time=time, runner=slow_runner(time))
    core.add(prompt("a", 100))

    reports = [core.step().prefills for _ in range(4)]

    assert reports[:2] == [[], []] and reports[3] == []
    [one] = reports[2]
    assert (one.num_tokens, one.num_cached) == (100, 0) and abs(one.seconds - 1.0) < 1e-6


def test_prompts_of_one_step_share_its_time_and_stored_tokens_cost_nothing(tmp_path: Path) -> None:
    """By tokens; what the pool had is not computed."""
    time = Time()
    core = make_core(tmp_path, time=time, runner=slow_runner(time))
    core.add(prompt("first", 33))
    while core.has_work:
        core.step()

    core.add(prompt("again", 40))
    core.add(prompt("other", 24, first=500))
    done: list[Prefill] = []
    while core.has_work:
        done += core.step().prefills

    assert [(one.num_tokens, one.num_cached) for one in done] == [(8, 32), (24, 0)]
    assert [round(one.seconds, 6) for one in done] == [0.08, 0.24]


def test_a_prompt_that_goes_away_leaves_nothing(tmp_path: Path) -> None:
    """The sums are bounded by what runs."""
    time = Time()
    core = make_core(tmp_path, time=time, runner=slow_runner(time))
    core.add(prompt("a", 100))
    core.step()

    core.abort(Key("a", 0))

    assert not core._prefills._spent
