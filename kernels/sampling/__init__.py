"""Choosing the next id of each row of logits.

`sample(logits, requests, rows) -> list[Choice]`: logits `[rows, vocab]` float32 (never altered), a `Request` per draw;
`rows[i]` is the row of logits that request `i` draws from (absent: row `i`), so that several choices may share one.
`reference` is the plain version in numpy, float64; `native` is the fast one. Order of operations, fixed:

1. A row with NaN or +inf, or of nothing but -inf, is an error of its requests (`NOT_NUMBERS`); others go on.
2. Penalties, for each id `i` of prompt and outputs: `l = l / r` if `l > 0`, else `l · r`, with `r` the repetition
   penalty; then, if `i` occurs `c > 0` times in the outputs, `l = l - c · frequency - presence`.
3. Bias: `l = l + bias[i]`.
4. Masks: with `allowed_ids` all others, and always `forbidden_ids`, become -inf. Nothing left: `NOTHING_LEFT`.
5. Below a temperature of 1e-5, or with `top_k` 1: the greatest `l`, of equals the lowest id.
6. Else weights `exp((l - max) / temperature)`; top-k; top-p over what top-k left (the heaviest ids whose heavier ones
   hold less than `top_p` of the weight); min-p relative to the heaviest. Of equal logits the lower id is kept. The
   id is where the sum of the weights left, taken in order of ids, first exceeds `point` times their total.

Steps 2 and 3 compute in float64 and round to float32 after each, within ±1e30. `logprob` is that of the model: from the
row as it came, before penalties, bias, masks, temperature and filters. A draw depends on its request and its row alone.
Penalties and masks are computed anew from the ids each time: there is no state, and a replay draws the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GREEDY_BELOW = 1e-5  # temperature
LARGEST = 1e30  # bound of a logit after penalties and bias

NOT_NUMBERS = "the model produced logits that are not numbers"
NOTHING_LEFT = "penalties and masks leave no token to choose from"
BAD_IDS = "an id of a penalty, a bias or a mask is outside the vocabulary"


@dataclass(frozen=True, slots=True)
class Request:
    """One draw.

    Attributes:
        point: where to draw, in [0, 1); see `uniform`. Not used if greedy.
        prompt_ids: for the repetition penalty; may be empty without one.
        output_ids: for all three penalties; may be empty without them.
        logit_bias: id to what is added.
        allowed_ids: the only ids that may be chosen; empty: all.
        forbidden_ids: ids that may not be chosen (those that end a text that is too short to end).
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    point: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_ids: Sequence[int] = ()
    forbidden_ids: Sequence[int] = ()

    @property
    def penalizes(self) -> bool:
        """Whether ids that have occurred matter."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def edits(self) -> bool:
        """Whether logits change before the draw."""
        return bool(self.penalizes or self.logit_bias or len(self.allowed_ids) or len(self.forbidden_ids))

    @property
    def greedy(self) -> bool:
        """Whether the most likely id is taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The id chosen and its log-probability under the model; with `error` the id is -1."""

    id: int
    logprob: float
    error: str | None = None


def uniform(seed: int, choice: int, index: int, purpose: str = "token") -> float:
    """Return a number in [0, 1) with 53 random bits, a function of its arguments alone."""
    name = struct.pack("<QQQ", seed & (1 << 64) - 1, choice, index) + purpose.encode()
    bits = int.from_bytes(hashlib.blake2b(name, digest_size=8, person=b"headrace draw").digest(), "little")
    return (bits >> 11) * 2.0**-53
