"""Rounding of keys and values to 8 bits, and blocks of rounded values packed into half their bytes.

A *group* is 32 neighbouring elements of one token's key or value in one head (16 where the head's size is no multiple
of 32). It has a scale 2^e and holds multiples of it: of whole numbers up to 127 (`int8`), or of the numbers of
float8 e4m3fn up to 448 (`fp8`). e follows from the group's largest magnitude alone: floor(log2) - 6 or - 8, at least
-100. What is rounded once is such a multiple in bfloat16 too, exactly, and rounding it again changes no bit. So the
error is made where a key or value is computed (`round_groups`, before it is first read), and packing makes none.

- `round_groups(x)`: x float32, the last dimension whole heads; each group of it rounded, ties to even, large ones cut
  off at the limit, -0 made +0 for int8. A group with an infinity or a NaN stays as it is, and cannot be packed.
- `pack(blocks)` and `unpack(packed)`: a packed block is the scales of all its groups (one byte each: e + 127), then
  one byte per element in the order of the pool's block.
- `first_unequal(blocks, packed)`: which block is the first that does not unpack to exactly these bytes.

Two orders of elements in a pool's block: `native-1` (kernels/kv_write/native.hpp), `block` (kernels/kv_write).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RAW: Final = "raw"
FORMATS: Final = (RAW, "int8", "fp8")
NUMBER: Final = {"raw": 0, "int8": 1, "fp8": 2}  # `KvFormat` in native.hpp
ORDERS: Final = ("native-1", "block")
BLOCK_TOKENS: Final = 16
GROUP: Final = 32
SMALLEST: Final = -100  # least exponent of a scale


def suffix(form: str) -> str:
    """Return what marks the layout and the numerics of an engine that rounds; empty where it does not."""
    return "" if form == RAW else f",{form}"


def group_of(head_dim: int) -> int:
    """Return how many elements share a scale.

    Raises:
        ValueError: if heads of this size cannot be cut into groups.
    """
    for group in (GROUP, GROUP // 2):
        if head_dim % group == 0:
            return group
    raise ValueError(f"heads of {head_dim} elements cannot be rounded: no multiple of {GROUP // 2}")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pool's block of bfloat16 holds, and how its rounded values are packed."""

    order: str
    layers: int
    kv_heads: int
    head_dim: int
    format: str

    def __post_init__(self) -> None:
        """Refuse what cannot be packed.

        Raises:
            ValueError: if order, format or a size is none.
        """
        if self.order not in ORDERS or self.format not in FORMATS[1:]:
            raise ValueError(f"blocks of {self.order!r} cannot be packed as {self.format!r}")
        if min(self.layers, self.kv_heads, self.head_dim) <= 0:
            raise ValueError("a block of nothing")
        group_of(self.head_dim)

    @property
    def elements(self) -> int:
        """Keys and values of 16 tokens in all layers."""
        return self.layers * 2 * BLOCK_TOKENS * self.kv_heads * self.head_dim

    @property
    def groups(self) -> int:
        """Scales of one block."""
        return self.elements // group_of(self.head_dim)

    @property
    def block_nbytes(self) -> int:
        """Bytes of a pool's block."""
        return self.elements * 2

    @property
    def packed_nbytes(self) -> int:
        """Bytes of a packed one."""
        return self.groups + self.elements
