"""Canonical-shape attention on torch's own CPU kernel."""

from __future__ import annotations

import torch

BLOCK_TOKENS = 16


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # The kernel is named, because the public function may choose another one by shape.
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
        )[0]
    return torch.nn.functional.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)


def tile_rows(group: int) -> int:
    """Return how many positions a tile has: 32, or 16 where more than 4 query heads share a KV head."""
    return 2 * BLOCK_TOKENS if group <= 4 else BLOCK_TOKENS


def causal_mask(length: int, tile: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `[tile, length]`: the mask of a tile that ends at `length`; its last columns serve shorter lengths."""
    mask = torch.zeros(tile, length, dtype=dtype)
    mask[:, length - tile :] = torch.full((tile, tile), float("-inf"), dtype=dtype).triu(1)
    return mask


def gather(lines: torch.Tensor, index: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy keys and values out of the pool.

    Args:
        lines: the pool as `[num_lines, kv_heads · head_dim]`.
        index: `[batch, 2, length]`, lines of keys and of values.
        heads: kv_heads.

    Returns:
        k and v, each `[batch, length, kv_heads, head_dim]`.
    """
    batch, _, length = index.shape
    both = lines.index_select(0, index.flatten()).view(batch, 2, length, heads, -1)
    return both[:, 0], both[:, 1]


def row_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, repeat: int) -> torch.Tensor:
    """Attend with single rows.

    Args:
        q: `[batch, kv_heads, group, head_dim]`.
        k: `[batch, length, kv_heads, head_dim]`; v likewise. `length` ends the tile of every row.
        mask: `[batch, 1, 1, length]`.
        repeat: how often each row stands in the call.

    Returns:
        `[batch, kv_heads, group, head_dim]`.
    """
    batch, heads, group, _ = q.shape
    out = _sdpa(q.repeat(1, 1, repeat, 1), k, v, mask.expand(batch, heads, group * repeat, -1))
    return out[:, :, :group]


def tile_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, first: int) -> torch.Tensor:
    """Attend with consecutive tiles of one sequence.

    Args:
        q: `[tiles, tile, kv_heads, group, head_dim]`; rows outside the run are zeros.
        k: `[1, length, kv_heads, head_dim]`, `length` the end of the last tile; v likewise.
        mask: `causal_mask` with each row standing `group` times: `[tile · group, any longer length]`.
        first: number of the first tile.

    Returns:
        The shape of q.
    """
    tiles, tile, heads, group, dim = q.shape
    stacked = q.permute(0, 2, 1, 3, 4).reshape(tiles, heads, tile * group, dim)
    out = torch.empty_like(stacked)
    for j in range(tiles):
        length = (first + j + 1) * tile
        view = mask[:, mask.shape[1] - length :].expand(1, heads, -1, -1)
        out[j : j + 1] = _sdpa(stacked[j : j + 1], k[:, :length], v[:, :length], view)
    return out.view(tiles, heads, tile, group, dim).permute(0, 2, 1, 3, 4).reshape(q.shape)
