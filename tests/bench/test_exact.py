"""The exactness check compares what it says, and a fault shows in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.exact.conditions import Checker, NotProvoked, alone, requests, several_choices
from bench.exact.divergence import Span
from bench.exact.variant import VariantRunner
from bench.inprocess import Engine, Request, Shape
from engine.plan import BatchPlan, Row, Sampled
from engine.scripted_runner import Rules, ScriptedRunner
from engine.sequence import Key
from schemas.record import Sampling

PROMPTS = [[(start * 31 + i * 7) % 900 + 40 for i in range(37 + 5 * start)] for start in range(6)]


def runner() -> ScriptedRunner:
    """Return a runner whose ids depend on prompt, choice, index and seed, and that checks every block."""
    return ScriptedRunner(Rules({"vocab_size": 1000}), vocab_size=1000, max_context=1024, eos_ids=frozenset())


class OneRowOff(ScriptedRunner):
    """Another id for a row at output 5 when somebody is beside it."""

    def execute(self, plan: BatchPlan) -> list[Sampled]:
        found = super().execute(plan)
        if len(plan.rows) < 2:
            return found
        return [Sampled(s.key, s.choice, s.index, s.id ^ (s.index == 5), s.logprob, s.error) for s in found]


def checker(make: Callable[[], ScriptedRunner]) -> Checker:
    """Return a checker for requests that ran alone on the same kind of runner."""
    greedy, seeded = requests(PROMPTS, 30)
    return Checker(make(), [*greedy, *(r for r in seeded if r.choice == 0)], alone(make(), [*greedy, *seeded]))


NAMES = sorted(Checker(runner(), [], {}).conditions())


@pytest.mark.parametrize("name", NAMES)
def test_a_runner_that_ignores_its_batch_passes_every_condition(name: str) -> None:
    """All requests ran, none differs."""
    found = checker(runner).conditions()[name]()

    assert (found.requests, found.mismatches) == (12, 0)


@pytest.mark.parametrize("name", ["beside_1", "beside_7", "admitted_mid_run", "chunked", "preempted"])
def test_a_runner_that_depends_on_its_batch_is_found(name: str) -> None:
    """One id in the middle is enough, and the report says where."""
    odd = OneRowOff(Rules({"vocab_size": 1000}), vocab_size=1000, max_context=1024, eos_ids=frozenset())

    found = checker(lambda: odd).conditions()[name]()

    assert found.mismatches > 0
    assert found.first.endswith("at output 5")


def test_choices_of_a_request_share_its_prompt_and_differ() -> None:
    """Each gives what it gives alone; the prompt is computed once."""
    _, seeded = requests(PROMPTS, 10)

    found = several_choices(runner(), seeded, alone(runner(), seeded))

    assert (found.requests, found.mismatches) == (12, 0)
    assert found.facts["cached_tokens"] > 0
    assert found.facts["choices_that_differ"] == 6


def test_a_condition_that_did_not_come_about_is_an_error() -> None:
    """A single short request cannot be preempted: equal texts would show nothing."""
    greedy, _ = requests(PROMPTS[:1], 5)

    with pytest.raises(NotProvoked):
        Checker(runner(), greedy, alone(runner(), greedy)).preempted()


def test_divergence_is_that_of_the_definition() -> None:
    """Two positions by hand: equal distributions, and one shifted."""
    span = Span()
    reference = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    fast = torch.tensor([[1.0, 1.0 + math.log(3.0)], [math.log(3.0), 0.0]])

    span.add(reference, fast, torch.tensor([1, 0]))
    found = span.figures()

    assert found["kl"] == pytest.approx((0.25 - 0.75) * math.log(1 / 3) / 2, abs=1e-6)
    assert found["top1"] == 0.5
    assert found["perplexity_reference"] == pytest.approx(math.sqrt(4 / 3 * 4), rel=1e-6)
    assert found["perplexity_fast"] == pytest.approx(math.sqrt(4 / 3 * 4 / 3), rel=1e-6)


def test_logits_that_are_not_numbers_are_no_figures() -> None:
    """NaN would compare as anything."""
    with pytest.raises(FloatingPointError):
        Span().add(torch.zeros(1, 2), torch.full((1, 2), math.nan), torch.tensor([0]))


class FixedLogits:
    """A runner whose logits are given."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, logits: torch.Tensor) -> None:
        self.given = logits

    def logits(self, rows: list[Row]) -> torch.Tensor:
        return self.given[: len(rows)]


def test_the_faulty_runner_differs_only_beside_others() -> None:
    """Two logits closer than a quarter become equal in a batch, and the lower id wins."""
    odd = VariantRunner(FixedLogits(torch.tensor([[1.0, 1.1], [1.0, 1.1]])))
    rows = [
        Row(Key(f"r{i}", 0), [1], 0, 1, [i], True, 0, (0,), Sampling(temperature=0.0), [1]) for i in range(2)
    ]  # fmt: skip

    assert [s.id for s in odd.execute(BatchPlan(0, rows[:1]))] == [1]
    assert [s.id for s in odd.execute(BatchPlan(0, rows))] == [0, 0]


def test_an_engine_lets_its_runner_go() -> None:
    """One runner serves engine after engine; each leaves no file."""
    one = runner()
    request = Request("a", tuple(PROMPTS[0]), Sampling(temperature=0.0, max_tokens=3, ignore_eos=True))
    found, paths = [], []
    for _ in range(2):
        with Engine(one, Shape(max_running=2)) as engine:
            found.append(engine.run([request]))
            paths.append(Path(engine.pool.handle().path))

    assert found[0] == found[1]
    assert not any(path.exists() for path in paths)
