"""The engine's own figures come from the steps that they name."""

from __future__ import annotations

import pytest

from bench import engine_child
from bench.inprocess import Engine, EngineFailed, Shape, greedy
from bench.load import GateFailed
from engine.plan import BatchPlan, Sampled
from engine.scripted_runner import Rules, ScriptedRunner


def runner(kind: type[ScriptedRunner] = ScriptedRunner) -> ScriptedRunner:
    """Return a runner that ends no text by itself."""
    return kind(Rules({"vocab_size": 1000}), vocab_size=1000, max_context=1024, eos_ids=frozenset())


class CountingRunner(ScriptedRunner):
    """Notes the shape of each step."""

    shapes: list[tuple[int, int]] = []

    def execute(self, plan: BatchPlan) -> list[Sampled]:
        self.shapes.append((len(plan.rows), plan.num_tokens))
        return super().execute(plan)


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_all_rows_decode_from_their_first_step_on(rows: int) -> None:
    """Each prompt is computed beforehand; then every step has all rows, one token each."""
    counting = runner(CountingRunner)
    CountingRunner.shapes.clear()

    rate = engine_child.decode(counting, rows, 8)

    assert rate > 0
    assert CountingRunner.shapes[-8:] == [(rows, rows)] * 8


def test_an_answer_of_one_token_has_no_decode_rate() -> None:
    """There is no step after the first: an error, not a number."""
    with pytest.raises(EngineFailed):
        engine_child.decode(runner(), 4, 1)


def test_a_runner_that_depends_on_its_batch_gets_no_speed() -> None:
    """The gate stands before all measurements."""

    class Odd(ScriptedRunner):
        def execute(self, plan: BatchPlan) -> list[Sampled]:
            found = super().execute(plan)
            return [Sampled(s.key, s.choice, s.index, s.id ^ (len(plan.rows) > 1)) for s in found]

    engine_child.gate(runner())
    with pytest.raises(GateFailed):
        engine_child.gate(runner(Odd))


def test_a_failed_sequence_ends_the_measurement() -> None:
    """Nothing is timed over errors."""

    class Broken(ScriptedRunner):
        def execute(self, plan: BatchPlan) -> list[Sampled]:
            return [Sampled(s.key, s.choice, s.index, -1, error="broken") for s in super().execute(plan)]

    with pytest.raises(EngineFailed, match="broken"), Engine(runner(Broken), Shape(max_running=1)) as engine:
        engine.run([greedy("a", range(40, 60), 4)])


def test_prompts_of_different_numbers_share_no_block() -> None:
    """So one run finds nothing of another in the cache."""
    beginnings = {engine_child.prompt(number, 128, 49_152)[:16] for number in range(0, 6000, 7)}

    assert len(beginnings) == len(range(0, 6000, 7))
