"""The scripted runner: chosen ids, and a check of every block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import make_core, prompt, run, sequence

from engine.null_runner import NullRunner
from engine.plan import BatchPlan, Row
from engine.scripted_runner import Rules, ScriptedRunner, from_spec
from engine.sequence import Key
from schemas.record import Sampling


def row(context: list[int], start: int, blocks: list[int], *, sample: bool = True, **fields: Any) -> Row:
    """A row that computes the rest of `context` from `start`."""
    return Row(
        key=Key("a", 0),
        ids=context[start:],
        start=start,
        prompt_len=fields.get("prompt_len", len(context)),
        blocks=blocks,
        sample=sample,
        index=0,
        choices=fields.get("choices", (0,)),
        sampling=Sampling(),
        context=context,
    )


def bound(**options: Any) -> ScriptedRunner:
    """A runner over 8 blocks."""
    runner = ScriptedRunner(lambda p, c, i, s: 7, **options)
    runner.bind(memoryview(bytearray(8 * runner.block_nbytes)), 8)
    return runner


def test_earlier_positions_must_hold_what_was_written() -> None:
    """Right blocks pass; swapped, foreign, stale or missing ones are an error of the row."""
    context = list(range(100, 140))
    runner = bound()
    runner.execute(BatchPlan(0, [row(context, 0, [3, 1, 5], sample=False)]))
    longer = [*context, 9]

    good = runner.execute(BatchPlan(1, [row(longer, 40, [3, 1, 5])]))
    swapped = runner.execute(BatchPlan(2, [row(longer, 40, [1, 3, 5])]))
    other = runner.execute(BatchPlan(3, [row([1, *longer[1:]], 40, [3, 1, 5])]))
    missing = runner.execute(BatchPlan(4, [row(longer, 40, [3, 1])]))

    assert [one.id for one in good] == [7] and good[0].error is None
    assert all(one[0].error is not None for one in (swapped, other, missing))


def test_equal_ids_after_another_beginning_are_not_equal() -> None:
    """Like real keys and values, what a position holds depends on all ids before it."""
    runner = bound()
    runner.execute(BatchPlan(0, [row([1] * 16 + [5] * 16, 0, [0, 1], sample=False)]))
    runner.execute(BatchPlan(1, [row([2] * 16 + [5] * 16, 0, [2, 3], sample=False)]))

    crossed = runner.execute(BatchPlan(2, [row([1] * 16 + [5] * 16 + [6], 32, [0, 3, 4])]))

    assert crossed[0].error is not None


def test_each_choice_of_a_prompt_gets_its_first_id() -> None:
    """A hand-off row for several choices is sampled once per choice."""
    runner = ScriptedRunner(lambda p, c, i, s: 10 + c)
    runner.bind(memoryview(bytearray(8 * runner.block_nbytes)), 8)

    out = runner.execute(BatchPlan(0, [row([1, 2, 3], 0, [0], choices=(4, 5))]))

    assert [(one.choice, one.id) for one in out] == [(4, 14), (5, 15)]


def test_pace_counts_steps_and_prompt_tokens() -> None:
    """A step takes its time, and more for each prompt token."""
    slept: list[float] = []
    for runner in (
        bound(pace_s=0.5, prefill_pace_s_per_token=0.25, sleep=slept.append),
        NullRunner(decode_s=0.5, prefill_s_per_token=0.25, sleep=slept.append),
    ):
        runner.execute(BatchPlan(0, [row([1, 2, 3], 0, [0])]))

    assert slept == [1.25, 1.25]


def test_rules_emit_their_ids_then_end(tmp_path: Path) -> None:
    """The first rule found in the prompt wins; choices may differ; EOS follows; `stop` is reported."""
    path = tmp_path / "script.json"
    path.write_text(
        json.dumps(
            {
                "vocab_size": 2000,
                "eos": [2],
                "rules": [
                    {"contains": [5, 6], "per_choice": [[40, 41], [50]]},
                    {"contains": [6], "emit": [60]},
                ],
            }
        )
    )
    core, ends = make_core(tmp_path, runner=from_spec(f"scripted:{path}")), []
    core.add(sequence("both", [1, 5, 6], choice=0))
    core.add(sequence("both", [1, 5, 6], choice=1))
    core.add(sequence("second", [6, 5]))

    ids = run(core, each=lambda result: ends.extend(reason for _, reason in result.ended))

    assert ids == {Key("both", 0): [40, 41, 2], Key("both", 1): [50, 2], Key("second", 0): [60, 2]}
    assert ends == ["stop"] * 3


def test_the_default_answer_is_a_function_of_prompt_seed_choice_and_index() -> None:
    """Two runners agree; the seed matters only with a temperature; ids stay in their range."""
    one, two = Rules({"default_range": [40, 60], "eos": [50]}), Rules({"default_range": [40, 60], "eos": [50]})
    hot, cold = Sampling(temperature=1.0, seed=3), Sampling(temperature=0.0, seed=3)

    def answer(rules: Rules, ids: list[int], choice: int, sampling: Sampling) -> list[int]:
        return [rules(ids, choice, index, sampling) for index in range(200)]

    first = answer(one, prompt(9), 0, hot)
    assert first == answer(two, list(prompt(9)), 0, hot)
    assert set(first) == set(range(40, 61)) - {50}
    assert first != answer(one, prompt(9), 1, hot) and first != answer(one, prompt(8), 0, hot)
    assert first != answer(one, prompt(9), 0, Sampling(temperature=1.0, seed=4))
    assert answer(one, prompt(9), 0, cold) == answer(one, prompt(9), 0, Sampling(temperature=0.0, seed=4))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("null", "null"),
        ("scripted:/nowhere.json", "/nowhere.json"),
        ('{"rulez": []}', "rulez"),
        ('{"rules": [{"emit": [99999]}]}', "vocabulary"),
        ('{"rules": [{"emits": [1]}]}', "emits"),
        ("[1]", "object"),
        ("{", "Expecting"),
    ],
)
def test_a_wrong_specification_is_named(tmp_path: Path, text: str, word: str) -> None:
    """Unknown kinds, unreadable files, unknown fields and ids out of range each raise with the culprit's name."""
    if text.startswith(("{", "[")):
        (tmp_path / "bad.json").write_text(text)
        text = f"scripted:{tmp_path / 'bad.json'}"

    with pytest.raises(ValueError, match=word):
        from_spec(text)


def test_the_null_runner_is_deterministic_and_never_ends() -> None:
    """Ids repeat from run to run and avoid the end token."""
    runner = NullRunner(eos_ids=frozenset({40}), id_range=(39, 41))
    rows = [row([1, 2, 3], 0, [0])]

    ids = {runner.execute(BatchPlan(step, rows))[0].id for step in range(5)}

    assert len(ids) == 1 and 40 not in ids
