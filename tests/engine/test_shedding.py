"""What waits in an engine until it could not keep its promise any more is refused before it costs a step."""

from __future__ import annotations

from pathlib import Path

from engines import Time, make_core, prompt, sequence

from engine.core import EngineCore
from engine.costs import Work
from engine.scheduler import Scheduler
from engine.sequence import Key


def full(directory: Path, time: Time) -> EngineCore:
    """An engine with one place, which is taken."""
    core = make_core(directory, time=time, scheduler=Scheduler(16, 128, 1, 48))
    core.add(sequence("runs", prompt(20, 1), max_tokens=100))
    core.step()
    return core


def test_what_is_too_late_for_its_promise_is_refused_without_a_step(tmp_path: Path) -> None:
    """It leaves with a time to come back; what may still come in time, or was promised nothing, waits."""
    time = Time()
    core = full(tmp_path, time)
    core.add(sequence("soon", prompt(20, 2), late_at=time.at + 1.0))
    core.add(sequence("later", prompt(20, 3), late_at=time.at + 9.0))
    core.add(sequence("never", prompt(20, 4)))
    assert core.step().late == []
    time.at += 2.0
    result = core.step()
    core.check_integrity()

    assert [key for key, _ in result.late] == [Key("soon", 0)] and result.eventful
    assert all(seconds > 0.0 for _, seconds in result.late)
    assert core.get(Key("soon", 0)) is None and core.load()["waiting"] == 2


def test_an_engine_that_has_time_begins_what_is_late(tmp_path: Path) -> None:
    """Refusing it would leave the engine idle."""
    time = Time()
    core = make_core(tmp_path, time=time)
    core.add(sequence("late", prompt(20, 2), late_at=time.at - 1.0, max_tokens=3))

    result = core.step()

    assert result.late == [] and [item.key for item in result.items] == [Key("late", 0)]


def test_what_was_begun_is_not_refused(tmp_path: Path) -> None:
    """One that was preempted has had its first token, or part of its prompt."""
    time = Time()
    core = full(tmp_path, time)
    seq = sequence("again", prompt(20, 2), late_at=time.at + 1.0)
    seq.num_preempted = 1
    core.add(seq)
    time.at += 2.0

    assert core.step().late == []


def test_what_its_prompt_takes_is_counted(tmp_path: Path) -> None:
    """A prompt that took a second, once, may take half as long again: it is too late that long before the promise."""
    time = Time()
    core = full(tmp_path, time)
    learnt = core.get(Key("runs", 0))
    assert learnt is not None
    live = core._roster.live[learnt.key]
    assert live.started is not None
    for count in (1, 2, 4, 8, 16, 32):
        core.costs.observe(Work(count, 0.0), 0.05 * count)
    core._pace.began(live, live.started + 20 * 0.05)  # of 20 tokens
    core.add(sequence("slow", prompt(20, 2), late_at=time.at + 2.0))
    assert core.step().late == []
    time.at += 0.6

    assert [key for key, _ in core.step().late] == [Key("slow", 0)]
