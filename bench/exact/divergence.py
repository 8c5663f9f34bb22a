"""How far a runner's distributions are from those of fp32 arithmetic on the same dequantized weights.

Teacher-forced: both runners get the same ids, one position of every sequence per step. Prompts come first, then the
reference's own greedy continuation; the two spans are reported apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.plan import Row
from engine.sequence import Key
from kvstore.block import num_blocks_for
from schemas.record import Sampling

GREEDY = Sampling(temperature=0.0)


@dataclass(slots=True)
class Span:
    """Sums over positions; logarithms are natural, divergences in nats."""

    positions: int = 0
    divergence: float = 0.0
    largest: float = 0.0
    agreeing: int = 0
    loss_reference: float = 0.0
    loss_fast: float = 0.0

    def add(self, reference: torch.Tensor, fast: torch.Tensor, following: torch.Tensor) -> None:
        """Add positions.

        Args:
            reference: float32 logits `[positions, vocab]`.
            fast: likewise.
            following: int64 ids `[positions]` that come next in the text.
        """
        p, q = torch.log_softmax(reference.double(), -1), torch.log_softmax(fast.double(), -1)
        each = (p.exp() * (p - q)).sum(-1)  # [positions]
        if not bool(torch.isfinite(each).all()):
            raise FloatingPointError("logits that are not numbers")
        self.positions += len(following)
        self.divergence += float(each.sum())
        self.largest = max(self.largest, float(each.max()))
        self.agreeing += int((reference.argmax(-1) == fast.argmax(-1)).sum())
        self.loss_reference -= float(p.gather(1, following[:, None]).sum())
        self.loss_fast -= float(q.gather(1, following[:, None]).sum())

    def figures(self) -> dict[str, float]:
        """Return means: KL(reference ‖ fast), share of equal first choices, both perplexities and their ratio."""
        count = max(1, self.positions)
        reference, fast = math.exp(self.loss_reference / count), math.exp(self.loss_fast / count)
        return {
            "positions": self.positions, "kl": self.divergence / count, "kl_max": self.largest,
            "top1": self.agreeing / count, "perplexity_reference": reference, "perplexity_fast": fast,
            "perplexity_ratio": fast / reference,
        }  # fmt: skip


@dataclass(slots=True)
class Spans:
    """The two parts of every text."""

    prompt: Span = field(default_factory=Span)
    continuation: Span = field(default_factory=Span)


class _Forced:
    """A runner with a pool of its own, fed one position of each sequence at a time."""

    def __init__(self, runner: Any, lengths: Listing[int], prompt_lengths: Listing[int]) -> None:
        self._runner = runner
        self._prompt_lengths = prompt_lengths
        self._blocks: list[list[int]] = []
        count = 0
        for length in lengths:
            self._blocks.append(list(range(count, count + num_blocks_for(length))))
            count += num_blocks_for(length)
        self._pool = bytearray(count * runner.block_nbytes)
        runner.bind(memoryview(self._pool), count)

    def logits(self, alive: Listing[int], texts: Listing[list[int]], position: int) -> torch.Tensor:
        """Compute one position of the sequences `alive`; returns float32 logits `[alive, vocab]`."""
        rows = [
            Row(
                Key(f"s{i}", 0), [texts[i][position]], position, self._prompt_lengths[i], self._blocks[i], True,
                max(0, position + 1 - self._prompt_lengths[i]), (0,), GREEDY, texts[i][: position + 1],
            )
            for i in alive
        ]  # fmt: skip
        found = self._runner.logits(rows)
        tensor = found if isinstance(found, torch.Tensor) else torch.from_numpy(np.asarray(found))
        return tensor.float().clone()

    def close(self) -> None:
        """Let go of the pool."""
        self._runner.bind(memoryview(bytearray(self._runner.block_nbytes)), 1)


def compare(reference: Any, fast: Any, prompts: Listing[Listing[int]], tokens: int) -> Spans:
    """Feed both runners the prompts and the reference's greedy continuations.

    Args:
        reference: runner whose continuation is taken, with `logits(rows)`.
        fast: runner to judge, likewise.
        prompts: ids of each prompt.
        tokens: length of the continuations; as many positions of each are compared (each predicts the next id).
    """
    texts, starts = [list(p) for p in prompts], [len(p) for p in prompts]
    ends = [start + tokens for start in starts]
    pair = [_Forced(runner, ends, starts) for runner in (reference, fast)]
    spans = Spans()
    try:
        for position in range(max(ends) - 1):
            alive = [i for i, end in enumerate(ends) if position < end - 1]
            wanted, got = (forced.logits(alive, texts, position) for forced in pair)
            for row, i in enumerate(alive):
                if position + 1 >= starts[i]:
                    texts[i].append(int(wanted[row].argmax()))
            following = torch.tensor([texts[i][position + 1] for i in alive])
            answering = torch.tensor([position + 1 >= starts[i] for i in alive])
            for span, mask in ((spans.prompt, ~answering), (spans.continuation, answering)):
                if bool(mask.any()):
                    span.add(wanted[mask], got[mask], following[mask])
    finally:
        for forced in pair:
            forced.close()
    return spans
