"""Paged causal attention: one program per tile of positions and KV head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.attention.triton import attend_split, finish, layer_arguments, merge, tile_positions, tile_rows_of
from kernels.launch import OPTIONS, check


@triton.jit
def _prefill(
    q, out, pool, tables, tiles,
    q_stride, q_head_stride, out_stride, out_head_stride, table_stride,
    block_stride, kv_stride, token_stride, head_stride, head_dim, scale,
    GROUP: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    PRODUCT: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # tiles [num_tiles, 5]: run, number of the tile, first row of the run, its position, the position after its last.
    tiles += tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    run, tile = tl.load(tiles).to(tl.int64), tl.load(tiles + 1)
    begin, start, end = tl.load(tiles + 2), tl.load(tiles + 3), tl.load(tiles + 4)
    position, token, head = tile_rows_of(tile, begin, start, end, kv_head, GROUP, POSITIONS, ROWS)
    column = tl.arange(0, DIM)
    used = (position >= 0)[:, None] & (column < head_dim)[None, :]
    where = (token * q_stride + head * q_head_stride)[:, None] + column[None, :]
    rows = tl.load(q + where, mask=used, other=0.0).to(PRODUCT)
    stop = tl.minimum(end, (tile + 1) * POSITIONS)  # no row of the tile sees a key from here on
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(0, stop, SPLIT):
        next_top, next_total, next_mixed = attend_split(
            rows, position, pool, tables + run * table_stride, kv_head, first, stop,
            block_stride, kv_stride, token_stride, head_stride, head_dim, scale, PRODUCT, BLOCK, KEYS, SPLIT,
        )  # fmt: skip
        top, total, mixed = merge(top, total, mixed, next_top, next_total, next_mixed)
    result = finish(total, mixed).to(out.dtype.element_ty)
    tl.store(out + (token * out_stride + head * out_head_stride)[:, None] + column[None, :], result, mask=used)


@lru_cache(maxsize=4)  # all layers of a step ask for the same
def _tiles(begins: tuple[int, ...], starts: tuple[int, ...], positions: int, device: torch.device) -> torch.Tensor:
    """Cut the runs into tiles: int32 `[num_tiles, 5]`."""
    tiles = []
    for run, start in enumerate(starts):
        end = start + begins[run + 1] - begins[run]
        if end > start:
            tiles += [
                (run, tile, begins[run], start, end) for tile in range(start // positions, (end - 1) // positions + 1)
            ]
    return torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 5)


def prefill_attention(
    q: torch.Tensor, pool: torch.Tensor, tables: torch.Tensor, begins: Sequence[int], starts: Sequence[int]
) -> torch.Tensor:
    """Attend as `kernels.prefill_attention` says.

    Raises:
        ValueError: shapes or types that the kernel does not read.
    """
    check(len(begins) == len(starts) + 1 == len(tables) + 1, "begins has one entry more than starts and tables")
    arguments = layer_arguments(q, pool, tables)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tiles = _tiles(tuple(begins), tuple(starts), tile_positions(arguments["GROUP"]), q.device)
    if len(tiles):
        _prefill[(len(tiles), pool.shape[3])](
            q, out, pool, tables, tiles, out_stride=out.stride(0), out_head_stride=out.stride(1), **arguments, **OPTIONS
        )
    return out
