"""The engine's thread: order of commands, waking, faults and the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import expected, make_core, plain, prompt, sequence

from engine.core import EngineCore
from engine.costs import Work
from engine.live import StepResult
from engine.loop import MAX_CRASHES, EngineThread
from engine.plan import BatchPlan, Sampled
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key

BOUND_S = 10.0


class Listener:
    """Collects results and tells when something is over."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.crashes: list[str] = []
        self._changed = threading.Condition()

    def deliver(self, result: StepResult) -> None:
        with self._changed:
            self.results.append(result)
            self._changed.notify_all()

    def crash(self, message: str) -> None:
        with self._changed:
            self.crashes.append(message)
            self._changed.notify_all()

    def wait_gone(self, *names: str) -> None:
        """Wait until all these sequences have ended or failed."""
        with self._changed:
            assert self._changed.wait_for(lambda: set(names) <= self.gone, BOUND_S)

    def wait_crash(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.crashes), BOUND_S)

    @property
    def gone(self) -> set[str]:
        return {key.request_id for r in self.results for key, _ in [*r.ended, *r.failed]}

    def ids(self, name: str) -> list[int]:
        return [item.id for r in self.results for item in r.items if item.key.request_id == name]


class Fragile(ScriptedRunner):
    """Raises as often as told."""

    faults = 0

    def execute(self, plan: BatchPlan) -> list[Sampled]:
        if self.faults:
            self.faults -= 1
            raise RuntimeError("broken step")
        return super().execute(plan)


@pytest.fixture
def listener() -> Listener:
    """A fresh listener."""
    return Listener()


@pytest.fixture
def runner() -> Fragile:
    """A runner that can be told to fail."""
    return Fragile(plain, vocab_size=2000, max_context=1024)


@pytest.fixture
def engine(tmp_path: Path, listener: Listener, runner: Fragile) -> Iterator[EngineThread]:
    """A running engine; it has ended when the test is over."""
    thread = EngineThread(make_core(tmp_path, runner=runner), listener.deliver, listener.crash)
    thread.start()
    yield thread
    assert thread.stop(BOUND_S) and not thread.alive


def test_added_work_is_computed_and_delivered(engine: EngineThread, listener: Listener) -> None:
    """An idle engine wakes for a call, steps until the sequence ends, and counts its steps."""
    engine.call(lambda core: core.add(sequence("a", prompt(30)))).result(BOUND_S)

    listener.wait_gone("a")

    assert listener.ids("a") == expected(prompt(30), 20)
    assert engine.steps >= 20
    assert engine.call(lambda core: core.pool.in_use).result(BOUND_S) == 0


def test_calls_run_in_order_on_the_engines_thread(engine: EngineThread) -> None:
    """Calls never overlap, keep their order, and return or raise to their caller."""
    seen: list[int] = []
    threads: set[int] = set()

    def note(number: int) -> int:
        threads.add(threading.get_ident())
        seen.append(number)
        return number

    futures = [engine.call(lambda core, n=n: note(n)) for n in range(200)]
    wrong = engine.call(lambda core: core.add(sequence("bad", [])))

    assert [f.result(BOUND_S) for f in futures] == seen == list(range(200))
    assert len(threads) == 1 and threading.get_ident() not in threads
    with pytest.raises(Exception, match="at least one token"):
        wrong.result(BOUND_S)


def test_an_idle_engine_takes_no_steps(engine: EngineThread, listener: Listener) -> None:
    """Without work nothing spins: the step count stands still between two calls."""
    engine.call(lambda core: core.add(sequence("a", prompt(3)))).result(BOUND_S)
    listener.wait_gone("a")
    before = engine.steps

    for _ in range(50):
        engine.call(lambda core: None).result(BOUND_S)

    assert engine.steps == before
    assert engine.load["running"] == 0


def test_a_failed_step_is_reported_and_the_engine_goes_on(
    engine: EngineThread, listener: Listener, runner: Fragile
) -> None:
    """One bad step fails its sequences; the next sequence runs; nobody is told of a crash."""
    runner.faults = 1
    engine.call(lambda core: core.add(sequence("unlucky", prompt(5)))).result(BOUND_S)
    listener.wait_gone("unlucky")

    engine.call(lambda core: core.add(sequence("next", prompt(5)))).result(BOUND_S)
    listener.wait_gone("next")

    assert listener.ids("next") == expected(prompt(5), 20)
    assert listener.crashes == [] and "broken step" in engine.last_error


def test_steps_that_fail_one_after_the_other_are_a_crash(
    engine: EngineThread, listener: Listener, runner: Fragile
) -> None:
    """After a few failed steps in a row the owner is told, once; the thread still answers."""
    runner.faults = MAX_CRASHES + 1
    for number in range(MAX_CRASHES + 1):
        engine.call(lambda core, n=number: core.add(sequence(f"s{n}", prompt(5)))).result(BOUND_S)
        listener.wait_gone(f"s{number}")

    listener.wait_crash()

    assert listener.crashes == ["RuntimeError: broken step"]
    assert engine.call(lambda core: core.pool.in_use).result(BOUND_S) == 0


def test_failed_steps_with_good_ones_between_are_no_crash(
    engine: EngineThread, listener: Listener, runner: Fragile
) -> None:
    """Only failures in a row count."""
    for number in range(2 * MAX_CRASHES):
        runner.faults = 1
        for name in (f"bad{number}", f"good{number}"):
            engine.call(lambda core, n=name: core.add(sequence(n, prompt(5)))).result(BOUND_S)
            listener.wait_gone(name)

    assert engine.call(lambda core: core.pool.in_use).result(BOUND_S) == 0
    assert listener.crashes == []


def test_a_fault_of_the_core_itself_fails_its_sequences_and_no_more(
    engine: EngineThread, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If even scheduling raises, everything that took part is reported as failed and the blocks come back."""

    def broken(core: EngineCore) -> None:
        core.add(sequence("a", prompt(5)))
        monkeypatch.setattr(core.scheduler, "plan", lambda *a, **k: 1 / 0)

    engine.call(broken).result(BOUND_S)

    listener.wait_gone("a")
    assert engine.call(lambda core: core.pool.in_use).result(BOUND_S) == 0


def test_work_that_cannot_go_on_neither_spins_nor_misses_its_deadline(
    tmp_path: Path, listener: Listener
) -> None:
    """A sequence without blocks waits for others to give theirs back; when they do it runs."""
    core = make_core(tmp_path, num_blocks=4)
    thread = EngineThread(core, listener.deliver, listener.crash)
    thread.start()
    try:
        thread.call(lambda c: c.reserve(Key("held", 0), 60)).result(BOUND_S)
        thread.call(lambda c: c.add(sequence("a", prompt(20), max_tokens=5))).result(BOUND_S)
        waiting = thread.call(lambda c: c.load()["waiting"]).result(BOUND_S)
        thread.call(lambda c: c.abort(Key("held", 0))).result(BOUND_S)

        listener.wait_gone("a")

        assert waiting == 1 and listener.ids("a") == expected(prompt(20), 5)
    finally:
        assert thread.stop(BOUND_S)


def test_a_listener_that_raises_does_not_stop_the_engine(tmp_path: Path, listener: Listener) -> None:
    """Whoever is told of results cannot break the loop; the error is kept for the owner."""

    def deliver(result: StepResult) -> None:
        listener.deliver(result)
        raise LookupError("listener")

    thread = EngineThread(make_core(tmp_path), deliver, listener.crash)
    thread.start()
    thread.call(lambda core: core.add(sequence("a", prompt(5)))).result(BOUND_S)

    listener.wait_gone("a")

    assert listener.ids("a") == expected(prompt(5), 20)
    assert thread.stop(BOUND_S) and thread.last_error == "LookupError: listener"


def test_after_the_end_calls_are_cancelled(tmp_path: Path, listener: Listener) -> None:
    """Calls made before `stop` are served; later ones are cancelled; stopping twice is harmless."""
    thread = EngineThread(make_core(tmp_path), listener.deliver, listener.crash)
    thread.start()
    before = thread.call(lambda core: 1)

    assert thread.stop(BOUND_S) and thread.stop(BOUND_S)

    assert before.result(BOUND_S) == 1
    assert thread.call(lambda core: 2).cancelled()


def test_ids_are_delivered_before_their_step_is_learnt_from(
    tmp_path: Path, listener: Listener, runner: Fragile
) -> None:
    """Fitting costs to a step takes longer than making its ids known; it is done all the same, once per step."""
    core = make_core(tmp_path, runner=runner)
    order: list[str] = []
    observe = core.costs.observe

    def noted(work: Work, seconds: float) -> None:
        order.append("learnt")
        observe(work, seconds)

    core.costs.observe = noted  # type: ignore[method-assign]

    def deliver(result: StepResult) -> None:
        order.append("delivered")
        listener.deliver(result)

    thread = EngineThread(core, deliver, listener.crash)
    thread.start()
    thread.call(lambda c: c.add(sequence("a", prompt(20), max_tokens=5))).result(BOUND_S)
    listener.wait_gone("a")
    assert thread.stop(BOUND_S)
    assert order == ["delivered", "learnt"] * 5
