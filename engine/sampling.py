"""The draws of a step: rows and what their requests ask for, in the form that the sampling op takes.

All state of a draw is in the row: its ids so far, its index, its seed. So a replay after a failover draws the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.plan import Row, Sampled, accept
from kernels.sampling import GREEDY_BELOW, NOT_NUMBERS, NOTHING_LEFT, Choice, Request, uniform

__all__ = ["NOTHING_LEFT", "NOT_NUMBERS", "Sampler", "choose_ids", "draw_of"]

Floats = npt.NDArray[np.float32]


class Sampler(Protocol):
    """An implementation of the op, such as `kernels.sampling.native.sample`."""

    def __call__(self, logits: Floats, requests: Sequence[Request], rows: Sequence[int]) -> list[Choice]: ...


def choose_ids(rows: Sequence[Row], logits: Floats, eos_ids: Collection[int], sample: Sampler) -> list[Sampled]:
    """Choose the next id for every choice of every row.

    Args:
        rows: those of a step that sample.
        logits: `[sum of num_wanted, vocab]` float32: of rows with a draft one for each of their last positions.
        eos_ids: ids that end a text; not chosen while it is shorter than `min_tokens`.
        sample: the op.

    Returns:
        One per choice of each row, in order, and of a row with a draft those that `accept` keeps; with `error` where
        that row's logits are not numbers, or its masks leave no token.
    """
    places: list[tuple[int, Row, int, int]] = []  # row of logits, row, choice, guesses before
    first = 0
    for row in rows:
        places += [(first, row, choice, 0) for choice in row.choices]
        places += [(first + ahead, row, row.choices[0], ahead) for ahead in range(1, row.num_wanted)]
        first += row.num_wanted
    requests = [draw_of(row, choice, eos_ids, ahead) for _, row, choice, ahead in places]
    chosen = sample(logits, requests, [at for at, _, _, _ in places])
    samples = [
        Sampled(row.key, choice, row.index + ahead, picked.id, None if picked.error else picked.logprob, picked.error)
        for (_, row, choice, ahead), picked in zip(places, chosen, strict=True)
    ]
    out, first = [], 0
    for row in rows:
        count = max(len(row.choices), row.num_wanted)
        out += accept(row, samples[first : first + count])
        first += count
    return out


def draw_of(row: Row, choice: int, eos_ids: Collection[int], ahead: int = 0) -> Request:
    """Return the draw of one choice at the row's index, or `ahead` of it where so many guesses come before."""
    s, index = row.sampling, row.index + ahead
    greedy = s.temperature < GREEDY_BELOW or s.top_k == 1
    penalizes = s.presence_penalty != 0.0 or s.frequency_penalty != 0.0 or s.repetition_penalty != 1.0
    outputs = row.prompt_len + row.index  # the context may have grown since the row was made
    output_ids = row.context[row.prompt_len : outputs] + row.draft[:ahead] if penalizes else ()
    return Request(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        point=0.0 if greedy else uniform(s.seed, choice, index),
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        prompt_ids=row.context[: row.prompt_len] if penalizes else (),
        output_ids=output_ids,
        logit_bias=s.logit_bias or None,
        allowed_ids=s.allowed_token_ids or (),
        forbidden_ids=sorted(eos_ids) if index < s.min_tokens else (),
    )
