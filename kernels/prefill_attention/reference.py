"""Paged causal attention in canonical tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention import reference as attention


def read_pages(
    pool: torch.Tensor, table: torch.Tensor, num_tokens: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the keys and values of positions `[0, num_tokens)`; zeros follow up to `length`.

    Args:
        pool: `[num_blocks, 2, 16, kv_heads, head_dim]`.
        table: `[width]`, blocks of positions from 0.

    Returns:
        k and v, each `[1, length, kv_heads, head_dim]`.
    """
    blocks = table[: -(-num_tokens // attention.BLOCK_TOKENS)].long()
    both = pool[blocks].transpose(0, 1).flatten(1, 2)[:, :num_tokens]  # [2, num_tokens, kv_heads, head_dim]
    padded = both.new_zeros(2, length, *both.shape[2:])
    padded[:, :num_tokens] = both
    return padded[:1], padded[1:]


def prefill_attention(
    q: torch.Tensor, pool: torch.Tensor, tables: torch.Tensor, begins: Sequence[int], starts: Sequence[int]
) -> torch.Tensor:
    """Attend as `kernels.prefill_attention` says, one run after the other."""
    heads, dim = q.shape[1:]
    kv_heads = pool.shape[3]
    group = heads // kv_heads
    tile = attention.tile_rows(group)
    out = torch.empty_like(q)
    for run, start in enumerate(starts):
        begin, end = begins[run], begins[run + 1]
        if begin == end:
            continue
        num_tokens = start + end - begin
        first, before = divmod(start, tile)
        length = -(-num_tokens // tile) * tile
        k, v = read_pages(pool, tables[run], num_tokens, length)
        rows = q.new_zeros(length - first * tile, heads, dim)
        rows[before : before + end - begin] = q[begin:end]
        mask = attention.causal_mask(length, tile, q.dtype).to(q.device).repeat_interleave(group, 0)
        result = attention.tile_attention(rows.view(-1, tile, kv_heads, group, dim), k, v, mask, first)
        out[begin:end] = result.reshape(rows.shape)[before : before + end - begin]
    return out
