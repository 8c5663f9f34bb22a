"""The parts that prefill and decode attention share in Triton.

One shape for both, so that a row gets the same bits from either: `TILE_ROWS` query rows (the query heads of one KV head
at consecutive positions, tiles cut at multiples of `tile_positions` of the absolute position) against `TILE_KEYS` keys
at a time. Keys are taken in splits of `SPLIT_KEYS`, cut by absolute position; each split has a softmax state of its own
(maximum, sum, weighted values) and the states are merged in order, by one program (prefill) or by another kernel
(decode). A key tile or split that a row does not see changes nothing in its state.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention.reference import BLOCK_TOKENS
from kernels.launch import check, has_rows, product_type

TILE_ROWS = 64
TILE_KEYS = 64
SPLIT_KEYS = 256


@triton.jit
def tile_rows_of(tile, begin, start, end, kv_head, GROUP: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr):
    """Return what each row of a tile is: its position (-1: none), its row of q and its query head, `[ROWS]` each."""
    r = tl.arange(0, ROWS)
    position = tile * POSITIONS + r // GROUP
    live = (r < POSITIONS * GROUP) & (position >= start) & (position < end)
    token = tl.where(live, begin + position - start, 0).to(tl.int64)
    return tl.where(live, position, -1), token, kv_head * GROUP + r % GROUP


@triton.jit
def attend_split(
    q, position, pool, table, kv_head, first, end,
    block_stride, kv_stride, token_stride, head_stride, head_dim, scale,
    PRODUCT: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return the state over keys `[first, min(first + SPLIT, end))`: maxima, sums `[ROWS]`, mixes `[ROWS, DIM]`.

    Args:
        q: `[ROWS, DIM]` in PRODUCT.
        position: `[ROWS]`; a row sees keys up to its own position, -1 sees none.
        table: pointer to the sequence's blocks.
        end: how many keys the sequence has stored.
    """
    ROWS: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = q.shape[1]
    column = tl.arange(0, DIM)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    pool += kv_head.to(tl.int64) * head_stride
    for at in range(first, tl.minimum(first + SPLIT, end), KEYS):
        key = at + tl.arange(0, KEYS)
        stored = key < end
        block = tl.load(table + key // BLOCK, mask=stored, other=0).to(tl.int64)
        line = block * block_stride + (key % BLOCK) * token_stride
        where = line[:, None] + column[None, :]
        inside = stored[:, None] & (column < head_dim)[None, :]
        k = tl.load(pool + where, mask=inside, other=0.0).to(PRODUCT)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        # A row that has seen no key yet has no maximum; any number does for the differences.
        base = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp(score - base[:, None])
        keep = tl.exp(top - base)
        total = total * keep + tl.sum(weight, 1)
        v = tl.load(pool + kv_stride + where, mask=inside, other=0.0).to(PRODUCT)
        mixed = mixed * keep[:, None] + tl.dot(weight.to(PRODUCT), v, input_precision="ieee")
        top = new
    return top, total, mixed


@triton.jit
def merge(top, total, mixed, next_top, next_total, next_mixed):
    """Return the state of two consecutive splits from the states of each."""
    new = tl.maximum(top, next_top)
    base = tl.where(new == float("-inf"), 0.0, new)
    keep, take = tl.exp(top - base), tl.exp(next_top - base)
    return (
        new,
        total * keep + next_total * take,
        mixed * keep[:, None] + next_mixed * take[:, None],
    )


@triton.jit
def finish(total, mixed):
    """Return the weighted mean `[ROWS, DIM]`; rows that saw no key give zeros."""
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


def tile_positions(group: int) -> int:
    """Return how many positions a tile of `TILE_ROWS` query rows holds: a power of two.

    Raises:
        ValueError: more query heads share a KV head than a tile has rows.
    """
    check(1 <= group <= TILE_ROWS, f"at most {TILE_ROWS} query heads can share a KV head, not {group}")
    return 1 << ((TILE_ROWS // group).bit_length() - 1)


def layer_arguments(q: torch.Tensor, pool: torch.Tensor, tables: torch.Tensor) -> dict[str, Any]:
    """Check the tensors of a call and return the arguments that both kernels take.

    Raises:
        ValueError: a shape, type or stride that the kernels do not read.
    """
    heads, dim = q.shape[1:]
    check(pool.dtype == q.dtype, f"the pool holds {pool.dtype}, the queries {q.dtype}")
    check(pool.dim() == 5 and pool.shape[1:3] == (2, BLOCK_TOKENS), "the pool is [blocks, 2, 16, kv_heads, head_dim]")
    check(pool.shape[4] == dim and heads % pool.shape[3] == 0, "query heads are a multiple of the pool's heads")
    check(has_rows(q) and has_rows(pool) and has_rows(tables), "last axes are contiguous")
    group = heads // pool.shape[3]
    return {
        "q_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "table_stride": tables.stride(0),
        "block_stride": pool.stride(0),
        "kv_stride": pool.stride(1),
        "token_stride": pool.stride(2),
        "head_stride": pool.stride(3),
        "head_dim": dim,
        "scale": dim**-0.5,
        "GROUP": group,
        "POSITIONS": tile_positions(group),
        "ROWS": TILE_ROWS,
        "DIM": max(16, triton.next_power_of_2(dim)),
        "PRODUCT": product_type(q.dtype),
        "BLOCK": BLOCK_TOKENS,
        "KEYS": TILE_KEYS,
        "SPLIT": SPLIT_KEYS,
    }
