"""What every model file offers, whatever its format."""

from __future__ import annotations

from typing import NamedTuple

FLOAT_KINDS = frozenset({"F32", "F16", "BF16"})


class TensorData(NamedTuple):
    """A tensor as it lies in its file."""

    kind: str  # F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K or Q6_K
    raw: memoryview  # read-only, a view of the file
    shape: tuple[int, ...]  # rows first
