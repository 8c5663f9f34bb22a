"""What the runners of a real model share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from engine.plan import BatchPlan, Row, Sampled
from engine.sampling import Sampler, choose_ids
from engine.sequence import Key
from models.config import ModelConfig
from models.errors import ModelFileError
from schemas.record import Sampling


class ModelRunner(ABC):
    """One model, one pool, one step at a time.

    A row's ids and logprobs do not depend on the batch, on the cut of its prompt into chunks, or on whether a position
    was decoded, recomputed or found in a block.
    """

    config: ModelConfig
    block_nbytes: int
    layout: str
    fingerprint: str
    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]

    @abstractmethod
    def bind(self, buffer: memoryview, num_blocks: int) -> None:
        """Use `num_blocks × block_nbytes` bytes of writable memory as the pool.

        Raises:
            ValueError: the buffer is read-only or too small.
        """

    @abstractmethod
    def logits(self, rows: Sequence[Row]) -> Any:
        """Compute rows, write their KV, and return float32 logits `[sum of num_wanted, vocab]`."""

    @abstractmethod
    def execute(self, plan: BatchPlan) -> list[Sampled]:
        """Compute one step; returns what `Row` asks for, in the order of rows."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compute a short prompt and one decoded token on scratch blocks.

        Raises:
            ModelFileError: the model's output is not numbers.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the pool, so that its map can be closed."""

    def _check_buffer(self, buffer: memoryview, num_blocks: int) -> int:
        need = num_blocks * self.block_nbytes
        if buffer.readonly or buffer.nbytes < need:
            raise ValueError(f"the pool needs {need} writable bytes; the buffer has {buffer.nbytes}")
        return need

    def _choose(self, rows: Sequence[Row], logits: Any, sample: Sampler) -> list[Sampled]:
        return choose_ids([row for row in rows if row.sample], logits, self.eos_ids, sample)

    def _try_out(self) -> None:
        """Compute a short prompt and one decoded token on scratch blocks, which stay bound.

        Raises:
            ModelFileError: the model's output is not numbers.
        """
        self.bind(memoryview(bytearray(2 * self.block_nbytes)), 2)
        ids = [i % self.vocab_size for i in range(20)]
        greedy = Sampling(temperature=0.0)
        for start, end in ((0, 19), (19, 20)):
            row = Row(Key("warm-up", 0), ids[start:end], start, 19, [0, 1], True, start, (0,), greedy, ids[:end])
            done = self.execute(BatchPlan(0, [row]))[0]
            if done.error:
                raise ModelFileError(self.config.name, f"the first step failed: {done.error}")
