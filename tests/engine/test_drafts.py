"""Rows with a draft: what each runner returns of them is what it returns without."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import plain, prompt

from engine.null_runner import NullRunner
from engine.plan import BatchPlan, Row, Runner, Sampled, accept
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key
from engine.torch_runner import TorchRunner
from schemas.record import Sampling
from tests.models.files import tiny_model

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.2, seed=11, top_k=50),
    Sampling(temperature=0.7, seed=5, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3),
    Sampling(temperature=0.9, seed=6, min_tokens=6),
]


def make(kind: str, directory: Path) -> Runner:
    """A runner over 32 blocks of garbage."""
    runner: Runner
    if kind == "torch":
        runner = TorchRunner(tiny_model(directory / "tiny.gguf"))
    elif kind == "null":
        runner = NullRunner(vocab_size=264)
    else:
        runner = ScriptedRunner(lambda p, c, i, s: plain(p, c, i, s) % 264, vocab_size=264)
    runner.bind(memoryview(bytearray(b"\xff" * 32 * runner.block_nbytes)), 32)
    return runner


def row(context: list[int], start: int, num_prompt: int, sampling: Sampling, draft: list[int], name: str) -> Row:
    """The row that computes the rest of `context`, and guesses behind it, in blocks of its own."""
    first = 0 if name == "a" else 8
    ids = context[start:] + draft
    return Row(
        Key(name, 0), ids, start, num_prompt, list(range(first, first + 8)), True, len(context) - num_prompt, (3,),
        sampling, context, draft,
    )  # fmt: skip


def step(runner: Runner, *rows: Row) -> list[Sampled]:
    """Execute one step."""
    out = runner.execute(BatchPlan(0, list(rows)))
    assert all(one.error is None for one in out), out
    return out


@pytest.mark.parametrize("kind", ["scripted", "null", "torch"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "drawn", "penalties", "min-tokens"])
@pytest.mark.parametrize("num_right", [0, 1, 3, 5])
def test_what_is_returned_is_what_comes_without_a_draft(
    kind: str, sampling: Sampling, num_right: int, tmp_path: Path
) -> None:
    """Ids, indices and logprobs of right guesses and of the first wrong one, then the same again from there on."""
    runner, ids = make(kind, tmp_path), [t % 264 for t in prompt(29)]
    plainly: list[Sampled] = []
    context, start = list(ids), 0
    for _ in range(12):
        plainly += step(runner, row(context, start, 29, sampling, [], "a"))
        start = len(context)
        context.append(plainly[-1].id)

    context, drafted = list(ids), step(runner, row(list(ids), 0, 29, sampling, [], "b"))
    context.append(drafted[-1].id)
    while len(drafted) < 12:
        known = len(drafted)
        draft = [one.id for one in plainly[known : known + num_right]]
        if known + num_right < 12 and num_right < 5:
            draft += [(plainly[known + num_right].id + 1) % 264, 7]
        got = step(runner, row(context, len(context) - 1, 29, sampling, draft, "b"))
        assert len(got) == min(num_right, 12 - known) + 1
        drafted += got
        context += [one.id for one in got]

    for want, one in zip(plainly, drafted, strict=False):
        assert (one.index, one.choice, one.id, one.logprob) == (want.index, want.choice, want.id, want.logprob)


@pytest.mark.parametrize("kind", ["scripted", "torch"])
def test_rows_beside_a_draft_are_not_touched_by_it(kind: str, tmp_path: Path) -> None:
    """A neighbour's sample is the same beside a right, a wrong and no draft, and keeps its place in the order."""
    runner = make(kind, tmp_path)
    greedy, ids, other = Sampling(temperature=0.0), [t % 264 for t in prompt(20)], [t % 264 for t in prompt(9, 3)]
    first = step(runner, row(ids, 0, 20, greedy, [], "a"))[0].id
    context = [*ids, first]
    alone = step(runner, row(other, 0, 9, greedy, [], "b"))

    for draft in ([], [1, 2, 3], [0]):
        got = step(runner, row(context, 20, 20, greedy, draft, "a"), row(other, 0, 9, greedy, [], "b"))
        assert got[-1:] == alone and {one.key.request_id for one in got[:-1]} == {"a"}


def test_a_guess_after_an_error_or_a_wrong_one_does_not_count() -> None:
    """Only what follows right ids is looked at, and no further sample is taken."""
    taken = []

    def samples(*ids: int) -> list[Sampled]:
        return [Sampled(Key("a", 0), 0, at, one, error="bad" if one < 0 else None) for at, one in enumerate(ids)]

    drafted = row([1, 2], 1, 2, Sampling(), [5, 6, 7], "a")

    assert [one.id for one in accept(drafted, samples(5, 6, 7, 9))] == [5, 6, 7, 9]
    assert [one.id for one in accept(drafted, samples(5, 8, 7, 9))] == [5, 8]
    assert [one.id for one in accept(drafted, samples(5, -1, 7, 9))] == [5, -1]
    assert [one.id for one in accept(drafted, (taken.append(one) or one for one in samples(4, 6, 7, 9)))] == [4]  # type: ignore[func-returns-value]  # notes what was asked for
    assert len(taken) == 1


def test_the_checking_runner_refuses_a_draft_in_the_wrong_place(tmp_path: Path) -> None:
    """Guesses stand behind the last known id, or the row is an error."""
    runner, context = make("scripted", tmp_path), [5, 6, 7]
    wrong = Row(Key("a", 0), [5, 6, 9], 0, 3, [0], True, 0, (0,), Sampling(), context, [9])

    [one] = runner.execute(BatchPlan(0, [wrong]))

    assert one.error is not None
