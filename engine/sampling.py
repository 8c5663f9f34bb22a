"""The draws of a step: rows and what their requests ask for, in the form that the sampling op takes.

All state of a draw is in the row: its ids so far, its index, its seed. So a replay after a failover draws the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.plan import Row, Sampled
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
        logits: `[len(rows), vocab]` float32.
        eos_ids: ids that end a text; not chosen while it is shorter than `min_tokens`.
        sample: the op.

    Returns:
        One per choice of each row, in order; with `error` where that row's logits are not numbers, or its masks leave
        no token.
    """
    places = [(at, row, choice) for at, row in enumerate(rows) for choice in row.choices]
    requests = [draw_of(row, choice, eos_ids) for _, row, choice in places]
    chosen = sample(logits, requests, [at for at, _, _ in places])
    return [
        Sampled(row.key, choice, row.index, picked.id, None if picked.error else picked.logprob, picked.error)
        for (_, row, choice), picked in zip(places, chosen, strict=True)
    ]


def draw_of(row: Row, choice: int, eos_ids: Collection[int]) -> Request:
    """Return the draw of one choice at the row's index."""
    s = row.sampling
    greedy = s.temperature < GREEDY_BELOW or s.top_k == 1
    penalizes = s.presence_penalty != 0.0 or s.frequency_penalty != 0.0 or s.repetition_penalty != 1.0
    outputs = row.prompt_len + row.index  # the context may have grown since the row was made
    return Request(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        point=0.0 if greedy else uniform(s.seed, choice, row.index),
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        prompt_ids=row.context[: row.prompt_len] if penalizes else (),
        output_ids=row.context[row.prompt_len : outputs] if penalizes else (),
        logit_bias=s.logit_bias or None,
        allowed_ids=s.allowed_token_ids or (),
        forbidden_ids=sorted(eos_ids) if row.index < s.min_tokens else (),
    )
