"""A transformer of the llama family over a paged pool of keys and values, in plain torch.

One call computes a ragged batch: runs of consecutive tokens of several sequences, prompts in chunks and single decoded
tokens side by side. The bits of a row depend on its own sequence alone (see kernels/attention and kernels/linear).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.attention import reference as attention
from kernels.kv_write.reference import kv_write
from kernels.linear.reference import linear
from kernels.rms_norm.reference import rms_norm
from kernels.rope.reference import rope, turns_table
from kernels.silu_mul.reference import silu_mul
from models import exactness
from models.config import ModelConfig
from models.weights import Layer, Weights

BLOCK_TOKENS = attention.BLOCK_TOKENS


class Run(Protocol):
    """Consecutive tokens `[start, start + len(ids))` of one sequence whose positions from 0 lie in `blocks`."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class _Rows:
    """Single rows whose tiles end alike; shared by all layers of a step."""

    at: torch.Tensor  # [batch] where they stand in the batch
    lines: torch.Tensor  # [batch, 2, length] pool lines in layer 0
    mask: torch.Tensor  # [batch, 1, 1, length]
    empty: torch.Tensor  # [batch, 1, tile, 1, 1] lines of the last tile that hold no token yet


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A run of several tokens, as whole tiles."""

    begin: int  # where it stands in the batch
    end: int
    before: int  # positions of the first tile before the run, and of the last one after it
    after: int
    first: int  # number of the first tile
    lines: torch.Tensor  # [1, 2, length]


class Transformer:
    """Weights and the functions over them. Not thread-safe: one step at a time."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.tile = attention.tile_rows(config.group)
        # The longest tile-aligned context, and the masks of all shorter ones as its right-hand parts.
        self.max_context = config.context_length // self.tile * self.tile
        self.turns = turns_table(
            self.max_context, config.head_dim, config.rope_theta, config.rope_scale, weights.rope_factors
        ).unsqueeze(1)  # [positions, 1, head_dim / 2]
        self.mask = attention.causal_mask(self.max_context, self.tile, self.dtype)
        self.tile_mask = self.mask.repeat_interleave(config.group, 0)
        layer = weights.layers[0]
        with torch.inference_mode():
            self.exact = exactness.probe(
                [layer.qkv, layer.out, layer.gate_up, layer.down, weights.head],
                config.num_kv_heads,
                config.group,
                config.head_dim,
            )

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block: layers × 2 × 16 tokens × kv_width."""
        return self.config.num_layers * 2 * BLOCK_TOKENS * self.config.kv_width * self.dtype.itemsize

    def forward(self, runs: Sequence[Run], lines: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
        """Compute runs, write their keys and values, and return logits.

        Args:
            runs: at most one per sequence.
            lines: the pool as `[num_blocks · layers · 2 · 16, kv_width]`.
            wanted: for each run, of how many of its last tokens logits are asked for.

        Returns:
            float32 `[sum(wanted), vocab]`.
        """
        places: list[int] = []
        end = 0
        for run, count in zip(runs, wanted, strict=True):
            end += len(run.ids)
            places += range(end - count, end)
        x = self._hidden(runs, lines)[places]
        return self.logits(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[rows, vocab]` of hidden rows `[rows, hidden]` (float32)."""
        normed = rms_norm(x, self.weights.norm, self.config.norm_eps, self.dtype)
        return self._linear(normed, self.weights.head).float()

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, self.exact.min_rows[weight.shape])

    def _hidden(self, runs: Sequence[Run], lines: torch.Tensor) -> torch.Tensor:
        """Run all layers; returns the residual stream, float32 `[tokens, hidden]`."""
        positions = torch.cat([torch.arange(r.start, r.start + len(r.ids)) for r in runs])
        tables = [torch.tensor(r.blocks) for r in runs]
        slots = torch.cat([self._slots(r, table) for r, table in zip(runs, tables, strict=True)])  # [tokens, 2]
        plan = self._plan(runs, tables)
        turns = self.turns[positions]  # [tokens, 1, head_dim / 2]
        ids = torch.tensor([token for r in runs for token in r.ids])
        x = self.weights.embedding[ids].float()  # [tokens, hidden]
        for index, layer in enumerate(self.weights.layers):
            x += self._attention(layer, index * 2 * BLOCK_TOKENS, x, turns, lines, slots, plan)
            x += self._feed_forward(layer, x)
        return x

    def _attention(
        self,
        layer: Layer,
        shift: int,
        x: torch.Tensor,
        turns: torch.Tensor,
        lines: torch.Tensor,
        slots: torch.Tensor,
        plan: list[_Rows | _Tiles],
    ) -> torch.Tensor:
        c = self.config
        normed = rms_norm(x, layer.attn_norm, c.norm_eps, self.dtype)
        qkv = self._linear(normed, layer.qkv)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        qkv = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)  # [tokens, heads + 2 kv_heads, head_dim]
        turned = rope(self._normed_heads(layer, qkv[:, : -c.num_kv_heads]), turns, c.rope_pairing)
        q, k, v = turned[:, : c.num_heads], turned[:, c.num_heads :], qkv[:, -c.num_kv_heads :]
        kv_write(lines, slots + shift, torch.stack((k.flatten(1), v.flatten(1)), dim=1))
        out = torch.empty(len(x), c.num_heads * c.head_dim, dtype=self.dtype)
        for part in plan:
            if isinstance(part, _Rows):
                self._attend_rows(part, shift, q, lines, out)
            else:
                self._attend_tiles(part, shift, q, lines, out)
        return self._linear(out, layer.out)

    def _normed_heads(self, layer: Layer, heads: torch.Tensor) -> torch.Tensor:
        """Normalize each head of queries and keys `[tokens, heads + kv_heads, head_dim]` where the model does so."""
        if layer.q_norm is None or layer.k_norm is None:
            return heads
        c = self.config
        x = heads.float()
        q = rms_norm(x[:, : c.num_heads], layer.q_norm, c.norm_eps, self.dtype)
        k = rms_norm(x[:, c.num_heads :], layer.k_norm, c.norm_eps, self.dtype)
        return torch.cat((q, k), dim=1)

    def _attend_rows(self, part: _Rows, shift: int, q: torch.Tensor, lines: torch.Tensor, out: torch.Tensor) -> None:
        c = self.config
        k, v = attention.gather(lines, part.lines + shift, c.num_kv_heads)
        k[:, -self.tile :].masked_fill_(part.empty, 0)
        v[:, -self.tile :].masked_fill_(part.empty, 0)
        rows = q[part.at].view(-1, c.num_kv_heads, c.group, c.head_dim)
        out[part.at] = attention.row_attention(rows, k, v, part.mask, self.exact.repeat).reshape(len(rows), -1)

    def _attend_tiles(self, part: _Tiles, shift: int, q: torch.Tensor, lines: torch.Tensor, out: torch.Tensor) -> None:
        c = self.config
        k, v = attention.gather(lines, part.lines + shift, c.num_kv_heads)
        if part.after:
            k[:, -part.after :].zero_()
            v[:, -part.after :].zero_()
        rows = torch.nn.functional.pad(q[part.begin : part.end].flatten(1), (0, 0, part.before, part.after))
        tiles = rows.view(-1, self.tile, c.num_kv_heads, c.group, c.head_dim)
        result = attention.tile_attention(tiles, k, v, self.tile_mask, part.first).reshape(len(rows), -1)
        out[part.begin : part.end] = result[part.before : len(rows) - part.after]

    def _feed_forward(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(x, layer.ffn_norm, self.config.norm_eps, self.dtype)
        gated = silu_mul(self._linear(normed, layer.gate_up))
        return self._linear(gated, layer.down)

    def _block_lines(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the pool line of each block's first key in layer 0."""
        return blocks * (self.config.num_layers * 2 * BLOCK_TOKENS)

    def _slots(self, run: Run, table: torch.Tensor) -> torch.Tensor:
        """Return `[tokens, 2]`: the lines (layer 0) of each token's key and value."""
        positions = torch.arange(run.start, run.start + len(run.ids))
        key = self._block_lines(table[positions // BLOCK_TOKENS]) + positions % BLOCK_TOKENS
        return torch.stack((key, key + BLOCK_TOKENS), dim=1)

    def _lines(self, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return `[2, length]`: lines of keys and values of positions from 0 to the end of the last token's tile."""
        length = -(-num_tokens // self.tile) * self.tile
        positions = torch.arange(length)
        # Positions past the last token borrow a line of it; they are zeroed and masked after the gather.
        positions.clamp_(max=num_tokens - 1)
        key = self._block_lines(table[positions // BLOCK_TOKENS]) + positions % BLOCK_TOKENS
        return torch.stack((key, key + BLOCK_TOKENS))

    def _plan(self, runs: Sequence[Run], tables: list[torch.Tensor]) -> list[_Rows | _Tiles]:
        """Group single rows by the end of their tile; cut longer runs into tiles."""
        parts: list[_Rows | _Tiles] = []
        singles: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        begin = 0
        for run, table in zip(runs, tables, strict=True):
            num_new = len(run.ids)
            num_tokens = run.start + num_new
            lines = self._lines(table, num_tokens)
            if num_new == 1:
                singles.setdefault(lines.shape[1], []).append((begin, num_tokens, lines))
            else:
                first, before = divmod(run.start, self.tile)
                after = lines.shape[1] - num_tokens
                parts.append(_Tiles(begin, begin + num_new, before, after, first, lines.unsqueeze(0)))
            begin += num_new
        for length, group in singles.items():
            rows = torch.tensor([(n - 1) % self.tile for _, n, _ in group])  # [batch]
            parts.append(
                _Rows(
                    at=torch.tensor([at for at, _, _ in group]),
                    lines=torch.stack([lines for _, _, lines in group]),
                    mask=self.mask[rows, self.max_context - length :].view(len(group), 1, 1, length),
                    empty=(torch.arange(self.tile) > rows[:, None]).view(len(group), self.tile, 1, 1),
                )
            )
        return parts
