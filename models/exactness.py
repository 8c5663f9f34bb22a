"""Finds, on the machine at hand, the smallest shapes whose rows have the bits of large ones.

Matrix libraries choose kernels by shape, and the choice differs between CPUs. Each candidate is compared bit for bit
with the canonical shape; the largest candidate is the canonical shape itself, so one always passes. The figures behind
the candidates are in docs/decisions/002-exact-rows.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kernels.attention import reference as attention
from kernels.linear.reference import linear, linear_op

ROW_CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
PROBE_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 47, 64, 128)
FEW_INPUTS = 256
DRAWS = 24  # sets of rows for weights with few inputs
# On CPUs with a matrix unit long products are cut in another way than short ones; where these agree, none is.
LONG_ROWS = (160, 192, 256, 288, 320, 352, 384, 448, 512, 768, 1024, 2048)


class NotExact(RuntimeError):
    """Raised when no number of rows gives a matrix product the same bits in every batch on this machine."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """How calls must be shaped so that a row's bits do not depend on its batch."""

    min_rows: Mapping[tuple[int, ...], int]  # by shape of the weight: products with fewer rows are padded to it
    repeat: int  # how often a single query row stands in its attention call
    max_rows: Mapping[tuple[int, ...], int] = field(default_factory=dict)  # longer products are cut; absent: none is


_probed: dict[tuple[object, ...], Exactness] = {}


def probe(weights: list[torch.Tensor], heads: int, group: int, head_dim: int) -> Exactness:
    """Measure these numbers with the model's own shapes and type (about 0.2 s), once in a process.

    Kernels are chosen by shape, type and threads, not by what stands in a weight.

    Args:
        weights: one weight `[out, in]` of each shape in use.
        heads: kv_heads.
        group: query heads per KV head.

    Raises:
        NotExact: products of equal rows differ even between large batches.
    """
    shapes = tuple((tuple(w.shape), w.dtype) for w in weights)
    case = (*shapes, heads, group, head_dim, torch.get_num_threads())
    if case not in _probed:
        _probed[case] = _probe(weights, heads, group, head_dim)
    return _probed[case]


def _probe(weights: list[torch.Tensor], heads: int, group: int, head_dim: int) -> Exactness:
    min_rows: dict[tuple[int, ...], int] = {}
    max_rows: dict[tuple[int, ...], int] = {}
    for weight in weights:
        found = next((n for n in ROW_CANDIDATES if _rows_agree(weight, n)), None)
        if found is None:
            raise NotExact(
                "matrix products give a row other bits in other batches on this machine, whatever the padding"
            )
        min_rows[tuple(weight.shape)] = max(found, min_rows.get(tuple(weight.shape), 1))
        if not _long_rows_agree(weight):
            max_rows[tuple(weight.shape)] = max(PROBE_ROWS)
    dtype = weights[0].dtype
    tile = attention.tile_rows(group)
    repeats = [n for n in (1, 2, 4, 8, 16) if n < tile] + [tile]
    repeat = next(n for n in repeats if n == tile or _attention_agrees(n, heads, group, head_dim, tile, dtype))
    return Exactness(min_rows, repeat, max_rows)


def _noise(*shape: int, dtype: torch.dtype, draw: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20 + draw)
    return torch.randn(*shape, generator=generator).to(dtype)


def _activations(rows: int, weight: torch.Tensor, draw: int = 0) -> torch.Tensor:
    # Activations have a wide range. Even values drawn from a plain normal distribution hide a difference in the order
    # of summation that shows in one of 10 real rows; these, in nearly all.
    x = _noise(rows, weight.shape[1], dtype=torch.float32, draw=draw)
    return (x * (2 * x.roll(1)).exp()).to(weight.dtype)


def _long_rows_agree(weight: torch.Tensor) -> bool:
    weight = weight[:4096]
    x = _activations(max(LONG_ROWS), weight)
    short = max(PROBE_ROWS)
    want = torch.cat([linear_op(x[at : at + short], weight) for at in range(0, len(x), short)])
    return all(torch.equal(linear_op(x[:n], weight), want[:n]) for n in LONG_ROWS)


def _rows_agree(weight: torch.Tensor, min_rows: int) -> bool:
    # The first 4,096 outputs of a vocabulary-sized weight are enough to choose its kernel, and 10 times quicker.
    weight = weight[:4096]
    x = _activations(max(PROBE_ROWS), weight)
    want = linear_op(x, weight)
    for n in PROBE_ROWS:
        places = range(0, len(x) - n + 1, 4 if n <= 4 else 32)
        if not all(torch.equal(linear(x[at : at + n], weight, min_rows), want[at : at + n]) for at in places):
            return False
    if weight.shape[1] >= FEW_INPUTS:
        return True
    # Short sums differ in one row of a hundred: what one set of rows does not show, many do.
    for draw in range(1, DRAWS):
        x = _activations(max(PROBE_ROWS), weight, draw)
        want = linear_op(x, weight)
        for n in (1, 2, 4, 8):
            places = range(0, len(x), n)
            if not all(torch.equal(linear(x[at : at + n], weight, min_rows), want[at : at + n]) for at in places):
                return False
    return True


def _attention_agrees(repeat: int, heads: int, group: int, head_dim: int, tile: int, dtype: torch.dtype) -> bool:
    num_tiles = 20  # 640 positions: past the 512 keys after which torch's kernel begins a second pass
    length = num_tiles * tile
    q = _noise(num_tiles, tile, heads, group, head_dim, dtype=dtype) * 1.5
    k, v = _noise(2, 1, length, heads, head_dim, dtype=dtype)
    mask = attention.causal_mask(length, tile, dtype)
    want = attention.tile_attention(q, k, v, mask.repeat_interleave(group, 0), 0)
    for position in range(0, length, 7):
        j, row = divmod(position, tile)
        end = (j + 1) * tile
        got = attention.row_attention(
            q[j, row].unsqueeze(0), k[:, :end], v[:, :end], mask[row, length - end :].view(1, 1, 1, -1), repeat
        )
        if not torch.equal(got[0], want[j, row]):
            return False
    return True
