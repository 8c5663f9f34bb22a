"""From rows of a step to draws: what a request asks for is what is drawn, and state comes from the ids alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.plan import Row
from engine.sampling import NOT_NUMBERS, NOTHING_LEFT, choose_ids, draw_of
from engine.sequence import Key
from kernels.sampling import Request, uniform
from kernels.sampling.reference import sample
from schemas.record import Sampling

VOCAB = 40
EOS = frozenset({2, 5})


def row(
    prompt: list[int], outputs: Sequence[int] = (), *, name: str = "a", choices: tuple[int, ...] = (0,), **s: Any
) -> Row:
    """A row that samples the id after `outputs`."""
    ids = [*prompt, *outputs]
    return Row(
        Key(name, choices[0]), ids[-1:], len(ids) - 1, len(prompt), [0], True, len(outputs), choices, Sampling(**s), ids
    )


def logits(rows: int, seed: int = 1) -> npt.NDArray[np.float32]:
    """Normal logits `[rows, VOCAB]`."""
    return np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32)


def test_every_parameter_reaches_the_draw() -> None:
    """With the ids of prompt and outputs as they were when the row was made."""
    r = row(
        [1, 2, 3], [4, 4], choices=(6,), temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=11, presence_penalty=0.5,
        frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={3: -1.0}, allowed_token_ids=[3, 4], min_tokens=3,
    )  # fmt: skip
    r.context.append(9)  # what the engine learns later is not this row's

    assert draw_of(r, 6, EOS) == Request(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, point=uniform(11, 6, 2), presence_penalty=0.5,
        frequency_penalty=-0.5, repetition_penalty=1.5, prompt_ids=[1, 2, 3], output_ids=[4, 4], logit_bias={3: -1.0},
        allowed_ids=[3, 4], forbidden_ids=[2, 5],
    )  # fmt: skip


def test_ids_are_looked_at_only_where_a_penalty_asks() -> None:
    """A long context costs a plain request nothing."""
    assert draw_of(row([1] * 9, [2]), 0, EOS) == Request(point=uniform(0, 0, 1))
    assert draw_of(row([1], temperature=0.0, seed=3), 0, EOS) == Request(temperature=0.0)


def test_a_text_does_not_end_before_min_tokens() -> None:
    """Ids that end it are not chosen before, and may be from then on; whatever `ignore_eos` says."""
    flat = np.zeros((1, VOCAB), np.float32)
    flat[0, 5] = 9.0
    for index in range(4):
        (got,) = choose_ids([row([1], [7] * index, temperature=0.0, min_tokens=3)], flat, EOS, sample)
        assert (got.id == 5) == (index >= 3)


def test_each_choice_of_a_row_draws_from_it_in_the_order_of_rows() -> None:
    """Rows with several choices, of which each has its own points."""
    x = logits(3)
    rows = [row([1], name="a"), row([1], [3], name="b", choices=(0, 1, 2), seed=4), row([2], name="c", choices=(7,))]

    got = choose_ids(rows, x, EOS, sample)

    assert [(s.key.request_id, s.choice, s.index) for s in got] == [
        ("a", 0, 0), ("b", 0, 1), ("b", 1, 1), ("b", 2, 1), ("c", 7, 0),
    ]  # fmt: skip
    for s, at, seed in zip(got, (0, 1, 1, 1, 2), (0, 4, 4, 4, 0), strict=True):
        (alone,) = sample(x[at : at + 1], [Request(point=uniform(seed, s.choice, s.index))])
        assert (s.id, s.logprob) == (alone.id, alone.logprob)


def test_a_row_that_goes_wrong_fails_alone() -> None:
    """Its error says what is wrong; its neighbours' ids and logprobs are those of a good step."""
    x = logits(4)
    bad = x.copy()
    bad[1, 30] = np.nan
    rows = [row([1], name=n, seed=i) for i, n in enumerate("abc")]
    masked = row([1], name="d", allowed_token_ids=[2], min_tokens=1)

    good = choose_ids(rows, x[:3], EOS, sample)
    got = choose_ids([*rows, masked], bad, EOS, sample)

    assert (got[1].id, got[1].error, got[1].logprob) == (-1, NOT_NUMBERS, None)
    assert (got[3].id, got[3].error) == (-1, NOTHING_LEFT)
    assert [got[0], got[2]] == [good[0], good[2]]


def test_a_replay_from_the_ids_draws_the_same() -> None:
    """A text with all penalties, drawn id by id, and each id again from the ids before it in a fresh row."""
    penalties: dict[str, Any] = {
        "temperature": 1.3, "seed": 9, "presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2,
        "logit_bias": {4: 2.0}, "min_tokens": 5,
    }  # fmt: skip
    prompt, outputs = [1, 4, 4], list[int]()
    for index in range(30):
        (got,) = choose_ids([row(prompt, outputs, **penalties)], logits(1, index), EOS, sample)
        outputs.append(got.id)

    for index in (0, 1, 7, 29):
        beside = row([8], name="b", frequency_penalty=2.0)
        x = np.concatenate([logits(1, 99), logits(1, index)])
        again = choose_ids([beside, row(prompt, outputs[:index], **penalties)], x, EOS, sample)
        assert again[1].id == outputs[index]
    assert len(set(outputs)) > 15  # penalties keep it from repeating itself
