"""The core on time that moves with its steps: pace beside prompts, classes, and preemption by the cheaper way."""

from __future__ import annotations

from pathlib import Path

from engines import Time, expected, make_core, plain, prompt, run, sequence

from engine.core import EngineCore
from engine.scheduler import Scheduler
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key


def paced(directory: Path, *, step_s: float = 0.01, token_s: float = 0.001, **options: object) -> EngineCore:
    """A core whose steps take 10 ms and 1 ms for each prompt token."""
    time = Time()

    def sleep(seconds: float) -> None:
        time.at += seconds

    runner = ScriptedRunner(
        plain, vocab_size=2000, max_context=1024, pace_s=step_s, prefill_pace_s_per_token=token_s, sleep=sleep
    )
    options.setdefault("scheduler", Scheduler(16, 256, 16, 256))
    return make_core(directory, runner=runner, time=time, num_blocks=options.pop("num_blocks", 200), **options)  # type: ignore[arg-type]  # passed on as they are


def test_running_streams_keep_their_pace_while_a_long_prompt_is_admitted(tmp_path: Path) -> None:
    """The longest step with a part of the prompt takes at most three times a step without; alone it took far more."""
    core = paced(tmp_path)
    alone: list[float] = []
    core.add(sequence("warm", prompt(500, 9), max_tokens=3))
    run(core, each=lambda result: alone.append(result.duration_s))
    for number in range(8):
        core.add(sequence(f"s{number}", prompt(20, number), max_tokens=300))
    while core.load()["queued_tokens"] or core.load()["waiting"]:
        core.step()
    steady = sorted(core.step().duration_s for _ in range(20))[10]
    core.add(sequence("long", prompt(900, 20), max_tokens=5))
    beside: list[tuple[float, int]] = []

    ids = run(core, each=lambda result: beside.append((result.duration_s, result.num_tokens)))

    assert max(alone) > 10 * steady
    assert max(seconds for seconds, _ in beside) <= 3 * steady
    assert max(tokens for _, tokens in beside) >= 16 + 8
    assert ids[Key("long", 0)] == expected(prompt(900, 20), 5)


def test_a_higher_class_starts_first_and_a_lower_one_gives_way(tmp_path: Path) -> None:
    """With one place, interactive work passes batch work that came just before it, but not what waited long."""
    core, first = paced(tmp_path, scheduler=Scheduler(16, 128, 1, 48, aging_s=10.0)), []
    arrivals = (("batch", 2, 1000.0), ("agent", 1, 1000.0), ("now", 0, 1000.5), ("late", 0, 1021.0))
    for name, priority, arrival in arrivals:
        core.add(sequence(name, prompt(20), max_tokens=2, priority=priority, arrival=arrival))

    run(core, each=lambda result: first.extend(key.request_id for key, _ in result.ended))

    assert first == ["now", "agent", "batch", "late"]


def test_a_pace_that_no_step_can_keep_does_not_make_them_run_one_by_one(tmp_path: Path) -> None:
    """Served one after another they would be late all the same, and the last one the more."""
    core = paced(tmp_path, pace_s={0: 0.002})
    core.add(sequence("warm", prompt(500, 9), max_tokens=30))
    run(core)
    for number in range(8):
        core.add(sequence(f"s{number}", prompt(20, number), max_tokens=200))
        core.step()
    for _ in range(60):
        core.step()

    assert core.load()["running"] == 8
