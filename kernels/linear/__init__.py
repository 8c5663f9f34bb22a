"""Matrix products with a weight, dense or quantized in groups.

`linear(x, weight, min_rows, max_rows)`: x `[rows, in]`, weight `[out, in]`, one type → `x · weightᵀ` `[rows, out]` in
that type, summed in float32.
Contract: a row's result has the same bits whatever rows stand beside it and however many there are. Libraries keep that
only above some number of rows (below it they pick another kernel), so fewer rows are padded with zeros to `min_rows`;
on some machines also only up to some number, so more than `max_rows` are multiplied in pieces;
`models/exactness.py` finds the number for the machine at hand. Kernels with one shape for all batches ignore it.

`linear_grouped(x, weight)`: the same with a `GroupedWeight`; → `[rows, out]` in the type of x. Every group of 32 inputs
adds `scale · Σ q·x + offset · Σ x`, in float32, so the weight is used unrounded.

`linear_grouped_int(x, weight, bits)`: the same with x rounded, group by group, to integers of 8 or 16 bits first
(`quantize_rows`). The products of integers are then exact, whatever their order, and only the sum over groups rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GROUP = 32  # inputs that share a scale and an offset
# The largest integer that x is rounded to. 16 bits are taken as 256 · high + low, both signed bytes.
LIMITS = {8: 127, 16: 127 * 256}


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight `[out, in]` whose values are `scale · q + offset`, in groups of 32 inputs.

    `q` is int8 `[out, in]`, or uint8 `[out, in / 2]` that holds integers from 0 to 15: byte i of a group's 16 has
    element i in its low and element i + 16 in its high half, which is how GGUF's Q4_0 and Q4_1 lie in a file.
    """

    q: torch.Tensor
    scale: torch.Tensor  # [out, in / 32] float32 or float16
    offset: torch.Tensor | None  # like scale

    @property
    def packed(self) -> bool:
        """Tell whether two integers share a byte."""
        return not self.q.dtype.is_signed

    @property
    def shape(self) -> tuple[int, int]:
        """Return (out, in)."""
        return self.scale.shape[0], self.scale.shape[1] * GROUP
