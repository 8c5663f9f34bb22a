"""What the scheduler asks of a runner, and what the runner answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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

    **Speculation.** With a `draft` of k guessed ids (only with `sample`, one choice, no hand-off) the last k of `ids`
    are the draft: `ids = [..., t, d1, ..., dk]`, where `t` is the sequence's last id; `blocks` have room for all, and
    `context` ends with `t`: it holds no guess. The runner computes KV and logits at all positions and takes k + 1
    samples: sample j, of 0 to k, from the logits at the position of dj (of `t` for j = 0), for output index
    `index + j`, with the random numbers of that index, and with `context + draft[:j]` where penalties look at ids. It
    returns, in order, sample 0, and each sample j of which all earlier ones were guessed right (sample i has the id
    `draft[i]` for all i < j): between 1 and k + 1 `Sampled` with consecutive indices; see `accept`. So every id
    returned is what a run without speculation gives at that index. KV at positions of wrong guesses is garbage that
    nobody reads; a later step writes it again.
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
    draft: list[int] = field(default_factory=list)  # the last of `ids`, if guessed

    @property
    def num_wanted(self) -> int:
        """Of how many of the last positions logits are wanted."""
        return 1 + len(self.draft) if self.sample else 0


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


def accept(row: Row, samples: Iterable[Sampled]) -> list[Sampled]:
    """Return the samples of a row that count: up to the first that is not as drafted, or has an error.

    Args:
        row: with or without a draft.
        samples: in order of index, one per wanted position; of a row without draft one per choice. Taken lazily.
    """
    if not row.draft:
        return list(samples)
    out: list[Sampled] = []
    for at, one in enumerate(samples):
        out.append(one)
        if one.error is not None or at >= len(row.draft) or one.id != row.draft[at]:
            break
    return out


class Note(Protocol):
    """Where an engine writes down what it is about to compute, so that it can be read when the process has died."""

    def begin(self, names: tuple[str, ...]) -> None:
        """A step of these requests begins."""
        ...

    def end(self) -> None:
        """It is over."""
        ...


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
