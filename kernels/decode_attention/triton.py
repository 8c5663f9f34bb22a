"""Paged attention of single rows: one program per row, KV head and split of the keys, then one that merges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.attention.triton import SPLIT_KEYS, attend_split, finish, layer_arguments, merge, tile_rows_of
from kernels.launch import OPTIONS, check


@triton.jit
def _attend(
    q, pool, tables, lengths, tops, totals, mixes, max_splits,
    q_stride, q_head_stride, table_stride,
    block_stride, kv_stride, token_stride, head_stride, head_dim, scale,
    GROUP: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    PRODUCT: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(lengths + row)
    if split * SPLIT < end:
        start = end - 1
        position, token, head = tile_rows_of(start // POSITIONS, row, start, end, kv_head, GROUP, POSITIONS, ROWS)
        column = tl.arange(0, DIM)
        live = position >= 0
        rows = tl.load(
            q + (token * q_stride + head * q_head_stride)[:, None] + column[None, :],
            mask=live[:, None] & (column < head_dim)[None, :],
            other=0.0,
        ).to(PRODUCT)
        top, total, mixed = attend_split(
            rows, position, pool, tables + row.to(tl.int64) * table_stride, kv_head, split * SPLIT, end,
            block_stride, kv_stride, token_stride, head_stride, head_dim, scale, PRODUCT, BLOCK, KEYS, SPLIT,
        )  # fmt: skip
        at = ((token * tl.num_programs(1) * GROUP + head) * max_splits) + split
        tl.store(tops + at, top, mask=live)
        tl.store(totals + at, total, mask=live)
        tl.store(mixes + at[:, None] * DIM + column[None, :], mixed, mask=live[:, None])


@triton.jit
def _merge(
    tops, totals, mixes, lengths, out, max_splits, heads, out_stride, out_head_stride, head_dim,
    SPLIT: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_splits = tl.cdiv(tl.load(lengths + row), SPLIT)
    column = tl.arange(0, DIM)
    one = tl.arange(0, 1)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, DIM], tl.float32)
    for split in range(num_splits):
        at = (row * heads + head) * max_splits + split + one
        next_top, next_total = tl.load(tops + at), tl.load(totals + at)
        next_mixed = tl.load(mixes + at[:, None] * DIM + column[None, :])
        top, total, mixed = merge(top, total, mixed, next_top, next_total, next_mixed)
    result = finish(total, mixed).to(out.dtype.element_ty)
    where = row * out_stride + head * out_head_stride + one[:, None] + column[None, :]
    tl.store(out + where, result, mask=(column < head_dim)[None, :])


@lru_cache(maxsize=4)  # all layers of a step ask for the same
def _lengths(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def decode_attention(q: torch.Tensor, pool: torch.Tensor, tables: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Attend as `kernels.decode_attention` says.

    Raises:
        ValueError: shapes or types that the kernel does not read, or a length below 1.
    """
    check(len(lengths) == len(q) == len(tables), "q, tables and lengths have one entry per row")
    check(min(lengths, default=1) >= 1, "a row sees at least its own key")
    arguments = layer_arguments(q, pool, tables)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not len(q):
        return out
    rows, heads, dim = q.shape
    splits = triton.cdiv(max(lengths), SPLIT_KEYS)
    width = arguments["DIM"]
    ends = _lengths(tuple(lengths), q.device)
    tops, totals = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=q.device)
    mixes = torch.empty(rows, heads, splits, width, dtype=torch.float32, device=q.device)
    _attend[(rows, pool.shape[3], splits)](q, pool, tables, ends, tops, totals, mixes, splits, **arguments, **OPTIONS)
    _merge[(rows, heads)](
        tops, totals, mixes, ends, out, splits, heads, out.stride(0), out.stride(1), dim, SPLIT_KEYS, width, **OPTIONS
    )
    return out
