"""A runner without a model: it keeps the pace of one and makes up ids. For benchmarks of everything around it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from engine.plan import BatchPlan, Row, Sampled, accept


def num_prompt_tokens(row: Row) -> int:
    """Return how many tokens of a row count as a prompt's for its pace: all, if they are more than one and no guesses.

    A guess costs nothing here: what it costs on a real engine depends on the batch.
    """
    return len(row.ids) if len(row.ids) - len(row.draft) > 1 else 0


LEAST_S = 1e-6


def idle(seconds: float) -> None:
    """Let a thread wait; an event that nobody sets is a sleep."""
    threading.Event().wait(seconds)


class NullRunner:
    """Takes a fixed time per step and per prompt token; ids depend on prompt length, choice and index alone."""

    layout = "null"
    fingerprint = "null-1"

    def __init__(
        self,
        *,
        decode_s: float = 0.0,
        prefill_s_per_token: float = 0.0,
        decode_s_per_row: float = 0.0,
        block_nbytes: int = 256,
        vocab_size: int = 49152,
        max_context: int = 8192,
        eos_ids: frozenset[int] = frozenset(),
        id_range: tuple[int, int] = (33, 126),
        sleep: Callable[[float], Any] = idle,
    ) -> None:
        """Set the pace.

        Args:
            decode_s: duration of a step in seconds, whatever its size.
            prefill_s_per_token: added for each token of rows with more than one.
            decode_s_per_row: added for each other row.
            block_nbytes: size of a block; its content is never touched.
            vocab_size: ids are below it.
            max_context: tokens per sequence.
            eos_ids: ids that end a sequence; none is ever emitted.
            id_range: lowest and highest id emitted.
            sleep: how to let time pass.
        """
        self.block_nbytes = block_nbytes
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.eos_ids = eos_ids
        self.decode_s = decode_s
        self.prefill_s_per_token = prefill_s_per_token
        self.decode_s_per_row = decode_s_per_row
        self._ids = [i for i in range(id_range[0], min(id_range[1], vocab_size - 1) + 1) if i not in eos_ids]
        if not self._ids:
            raise ValueError("the range of ids is empty")
        self._sleep = sleep

    def bind(self, buffer: memoryview, num_blocks: int) -> None:
        """Take the pool and leave it alone."""

    def execute(self, plan: BatchPlan) -> list[Sampled]:
        """Let the step's time pass, then return made-up ids."""
        out: list[Sampled] = []
        for row in plan.rows:
            if row.draft:
                out += accept(row, (self._one(row, row.choices[0], row.index + at) for at in range(row.num_wanted)))
            elif row.sample:
                out += [self._one(row, choice, row.index) for choice in row.choices]
        pause = self.decode_s
        if self.prefill_s_per_token:
            pause += self.prefill_s_per_token * sum(num_prompt_tokens(row) for row in plan.rows)
        if self.decode_s_per_row:
            pause += self.decode_s_per_row * sum(not num_prompt_tokens(row) for row in plan.rows)
        if pause > 0:
            self._sleep(pause)
        elif self._sleep is idle:
            # A step of a real engine lets go of the interpreter; one that never does would hold up its own first token.
            idle(LEAST_S)
        return out

    def _one(self, row: Row, choice: int, index: int) -> Sampled:
        at = (index * 7 + choice * 31 + row.prompt_len) % len(self._ids)
        return Sampled(row.key, choice, index, self._ids[at])

    def warm_up(self) -> None:
        """Nothing is cold."""

    def close(self) -> None:
        """Nothing is held."""
