"""Sequences whose steps are their own: who is in a step with whom (R12)."""

from __future__ import annotations

from pathlib import Path

from engines import expected, make_core, prompt, run, sequence

from engine.plan import BatchPlan, Sampled
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key

FOR_GOOD = 1 << 62


class Recording:
    """A note that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, ...]] = []
        self.busy = False

    def begin(self, names: tuple[str, ...]) -> None:
        assert not self.busy
        self.steps.append(names)
        self.busy = True

    def end(self) -> None:
        assert self.busy
        self.busy = False


def test_a_suspect_shares_no_step_until_it_is_past_the_place(tmp_path: Path) -> None:
    """R12. Scenario: a suspect kills again, and nobody can tell which sequence of the step it was."""
    note = Recording()
    core = make_core(tmp_path, note=note)
    prompts = {name: prompt(40, start) for start, name in enumerate("abcd", 10)}
    for name in "ab":
        core.add(sequence(name, prompts[name], max_tokens=30))
    for name in "cd":
        core.add(sequence(name, prompts[name], max_tokens=30, alone_until=8))

    ids = run(core)

    assert ids == {Key(name, 0): expected(ids_, 30) for name, ids_ in prompts.items()}
    for name in "cd":
        first = next(at for at, step in enumerate(note.steps) if name in step and len(step) > 1)
        alone = [step for step in note.steps[:first] if name in step]
        assert alone == [(name,)] * 8  # the prompt with the first id, and seven more
    assert ("a", "b", "c", "d") in note.steps


def test_every_other_step_is_everybody_elses(tmp_path: Path) -> None:
    """R12. Scenario: sixteen suspects hold up a stream that has never been near a crash."""
    note = Recording()
    core = make_core(tmp_path, note=note)
    core.add(sequence("calm", prompt(10), max_tokens=15))
    for number in range(8):
        core.add(sequence(f"s{number}", prompt(20, 50 + number), max_tokens=30, alone_until=FOR_GOOD))

    run(core)

    last = max(at for at, step in enumerate(note.steps) if step == ("calm",))
    assert last < 2 * 15 + 1
    turns = [step for step in note.steps if step != ("calm",)]
    assert all(len(step) == 1 for step in turns)
    assert len(set(turns[:8])) == len(set(turns[8:16])) == 8  # none waits for another one's end


def test_all_choices_of_a_request_share_its_steps(tmp_path: Path) -> None:
    """R12. Scenario: a request with many choices is alone, and its choices wait for each other."""
    note = Recording()
    core = make_core(tmp_path, note=note)
    for choice in range(3):
        core.add(sequence("many", prompt(20), choice=choice, max_tokens=10, alone_until=FOR_GOOD))
    core.add(sequence("calm", prompt(20, 77), max_tokens=10))

    run(core)

    assert set(note.steps) == {("many",), ("calm",)}
    assert len(note.steps) < 26


def test_suspects_that_need_each_others_blocks_do_not_stand_still(tmp_path: Path) -> None:
    """R12, promise 1. Scenario: two of them fill the pool, and neither may take the other's blocks in its own step."""
    core = make_core(tmp_path, num_blocks=8)
    prompts = {name: prompt(40, start) for start, name in enumerate("ab", 10)}
    for name, ids in prompts.items():
        core.add(sequence(name, ids, max_tokens=70, alone_until=FOR_GOOD))

    ids = run(core)

    assert ids == {Key(name, 0): expected(p, 70) for name, p in prompts.items()}
    assert core.pool.in_use == 0


def test_the_note_of_a_step_is_taken_back_when_a_runner_raises(tmp_path: Path) -> None:
    """R12. Scenario: a step fails in order, and its requests are blamed for a crash of later on."""

    class Raising(ScriptedRunner):
        def execute(self, plan: BatchPlan) -> list[Sampled]:
            raise RuntimeError("no")

    note = Recording()
    core = make_core(tmp_path, runner=Raising(lambda *_: 5, vocab_size=2000), note=note)
    core.add(sequence("a", prompt(5)))

    assert core.step().crash == "RuntimeError: no"
    assert note.steps == [("a",)] and not note.busy
