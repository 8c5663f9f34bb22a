"""What the scheduler asks of a runner, and what the runner answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.sequence import Key
from schemas.record import Sampling


@dataclass(frozen=True, slots=True)
class Row:
    """A run of consecutive tokens of one sequence in a step.

    Computes KV for positions `[start, start + len(ids))` and writes it into `blocks` (16 tokens each, covering
    positions from 0). With `sample` the last position's logits choose the next id for output index `index`, once per
    choice in `choices` (more than one only for a hand-off prompt shared by several choices).
    `start` of the first output token of a sequence is `prompt_len`; positions at or past it that a recovery computes
    again must give the same bits as when they were decoded one by one.
    """

    key: Key
    ids: list[int]
    start: int
    prompt_len: int
    blocks: list[int]
    sample: bool
    index: int
    choices: tuple[int, ...]
    sampling: Sampling
    context: list[int]  # all ids so far (for penalties, scripts)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step: rows in a fixed order."""

    step: int
    rows: list[Row]

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(len(r.ids) for r in self.rows)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The id chosen for one choice of one row; `error` instead when this row alone went wrong (NaN logits)."""

    key: Key
    choice: int
    index: int
    id: int
    logprob: float | None = None
    error: str | None = None


class Runner(Protocol):
    """Executes a step. `TorchRunner` is the real one, `NullRunner` only paces, `ScriptedRunner` emits chosen ids."""

    block_nbytes: int
    layout: str  # a text that two pools must share for blocks to be copied between them
    fingerprint: str  # model, numerics and dtype: part of every block hash
    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]

    def bind(self, buffer: memoryview, num_blocks: int) -> None:
        """Use this memory (a writable map of `num_blocks × block_nbytes` bytes) as the KV pool."""
        ...

    def execute(self, plan: BatchPlan) -> list[Sampled]: ...

    def warm_up(self) -> None:
        """Run one real step on scratch blocks; raises if the model cannot."""
        ...

    def close(self) -> None: ...
