"""The pace that a class was promised: a mean over a sequence's tokens, whatever the single steps take."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Time, make_core, plain, prompt, sequence

from engine.core import EngineCore
from engine.costs import StepCosts, Work
from engine.live import Live
from engine.pace import SHARE, Pace
from engine.scheduler import Scheduler
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key

PROMISED_S = 0.03


def paced(
    directory: Path, time: Time, promised_s: float = PROMISED_S, token_s: float = 0.001, tokens: int = 400
) -> EngineCore:
    """A core whose steps take 10 ms and `token_s` for each prompt token, and that knows it; one sequence decodes."""

    def sleep(seconds: float) -> None:
        time.at += seconds

    directory.mkdir(exist_ok=True)
    runner = ScriptedRunner(
        plain, vocab_size=2000, max_context=1024, pace_s=0.01, prefill_pace_s_per_token=token_s, sleep=sleep
    )
    core = make_core(
        directory, runner=runner, time=time, num_blocks=200, scheduler=Scheduler(16, 256, 16, 256),
        pace_s={0: promised_s},
    )  # fmt: skip
    for length in (300, 120, 60, 40, 20, 10):
        core.add(sequence(f"warm{length}", prompt(length, length), max_tokens=100))
        while core.has_work:
            core.step()
    core.add(sequence("stream", prompt(20, 7), max_tokens=tokens))
    core.step()
    return core


def first_chunk(core: EngineCore, start: int = 30) -> int:
    """Tokens of a long prompt that the next step computes beside the stream."""
    core.add(sequence("long", prompt(600, start), max_tokens=2))
    return core.step().num_tokens - 1


def test_a_stream_whose_steps_were_short_waits_for_a_longer_one(tmp_path: Path) -> None:
    """And still has its mean pace when it has waited; one that has just begun waits for less."""
    time, promised_s = Time(), 0.014
    at_once = first_chunk(paced(tmp_path / "a", Time(), promised_s, 0.0006, 20))
    core = paced(tmp_path / "b", time, promised_s, 0.0006, 20)
    for _ in range(12):
        core.step()
    saved = first_chunk(core)

    assert saved >= 1.3 * at_once > 0
    assert 0.01 + 0.0006 * saved > 3 * promised_s, "a single step is longer than the promise"


def test_the_mean_between_tokens_is_as_promised_while_prompts_come_all_the_time(tmp_path: Path) -> None:
    """A prompt always waits; the stream's tokens come at the promised pace on the whole."""
    time = Time()
    core = paced(tmp_path, time)
    began, number, tokens = time.at, 0, 0
    while tokens < 150:
        if not core.load()["queued_tokens"]:
            number += 1
            core.add(sequence(f"next{number}", prompt(100, 50 + number), max_tokens=4))
        tokens += sum(item.key == Key("stream", 0) for item in core.step().items)

    assert number >= 5
    assert (time.at - began) / tokens <= PROMISED_S


def test_a_stream_that_has_waited_gets_short_steps_until_it_has_caught_up(tmp_path: Path) -> None:
    """Something stopped the process for a while: what is left of the pace is not spent on prompts."""
    time = Time()
    core = paced(tmp_path, time)
    time.at += 8 * PROMISED_S
    behind = first_chunk(core)
    while core.get(Key("long", 0)) is not None:
        core.step()
    for _ in range(30):
        core.step()

    assert behind == 8
    assert first_chunk(core, 31) > 4 * behind


def test_a_stream_that_is_beyond_repair_does_not_hold_the_others_up(tmp_path: Path) -> None:
    """After a standstill of seconds its pace is lost, and prompts are computed as without a promise."""
    time = Time()
    core = paced(tmp_path, time)
    time.at += 10.0

    assert first_chunk(core) > 8


def known_costs() -> StepCosts:
    """A step of 10 ms, 1 ms for each token."""
    costs = StepCosts()
    for count in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(8):
            costs.observe(Work(count, 0.0), 0.01 + 0.001 * count)
    return costs


def test_so_many_run_as_keep_the_pace_with_the_prompts_of_those_who_follow() -> None:
    """Sequences of few tokens leave soon, and each that comes in their place brings a prompt."""
    running = [Live(sequence("r", prompt(20), max_tokens=20), b"root", (0.0, 0))]
    alone = Pace(known_costs(), {0: 0.03}).most_running(running, 16)
    busy = Pace(known_costs(), {0: 0.03})
    for _ in range(40):
        busy.computed(0.1)
        running[0].seq.outputs = [5] * 20
        busy.ended(running[0])

    most = busy.most_running(running, 16)

    assert alone == 15  # 0.01 + 0.001 m <= SHARE * 0.03
    assert most < alone and 0.01 + 0.001 * most + (most - 1) * 0.1 / 20 <= 0.03 + 1e-6
    assert busy.most_running([], 16) == 16 and Pace(known_costs()).most_running(running, 16) == 16


def test_what_passes_to_a_first_token_is_learnt_from_prompts_that_were_computed_here() -> None:
    """As so many times what their tokens cost alone. What came with ids, or was computed elsewhere, says nothing."""
    pace = Pace(known_costs(), {0: 0.03})
    fresh = Live(sequence("a", prompt(50)), b"root", (0.0, 0))
    fresh.started = 10.0
    resumed = Live(sequence("b", prompt(50), outputs=[4]), b"root", (0.0, 1))
    resumed.started = 10.0
    pace.began(resumed, 20.0)
    assert pace.first_token_s(100) == 0.0
    pace.began(fresh, 10.2)
    usual_s = 0.2 / 0.06 * 0.11
    assert usual_s < pace.first_token_s(100) <= 2 * usual_s, "one is not many"
    for _ in range(100):
        pace.began(fresh, 10.2)
    same = pace.first_token_s(100)
    for number in range(100):
        pace.began(fresh, 10.1 + 0.2 * (number % 2))

    assert same == pytest.approx(usual_s, rel=0.02), "what is always the same needs no room"
    assert pace.first_token_s(100) == pytest.approx(2 * usual_s, rel=0.1), "what takes 0.1 s or 0.3 may take 0.4"


def test_a_prompt_that_was_stored_but_for_its_end_makes_no_other_look_slow() -> None:
    """A step costs something however few tokens it has."""
    pace = Pace(known_costs(), {0: 0.03})
    cached = Live(sequence("a", prompt(500)), b"root", (0.0, 0))
    cached.started, cached.seq.num_cached = 10.0, 496
    for _ in range(50):
        pace.began(cached, 10.014)

    assert pace.first_token_s(100) == pytest.approx(0.11, rel=0.05)


def test_without_a_promise_steps_are_as_long_as_one_likes(tmp_path: Path) -> None:
    """And where not even one alone could keep it, it is none."""
    live = Live(sequence("a", prompt(50)), b"root", (0.0, 0))
    promised = Pace(known_costs(), {0: 0.03})
    assert promised.step_s([live], 1.0) is None, "it has no token yet"
    promised.began(live, 1.0)
    first = promised.step_s([live], 1.0)

    assert first is not None and first >= SHARE * 0.03
    assert Pace(known_costs()).step_s([live], 1.0) is None
    assert Pace(known_costs(), {0: 0.005}).step_s([live], 1.0) is None
