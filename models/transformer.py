"""A transformer of the llama family over a paged pool of keys and values, in plain torch.

One call computes a ragged batch: runs of consecutive tokens of several sequences, prompts in chunks and single decoded
tokens side by side. The bits of a row depend on its own sequence alone (see kernels/attention and kernels/linear).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention.reference import tile_rows
from kernels.kv_format import RAW, group_of
from kernels.kv_format.reference import round_groups
from kernels.rope.reference import turns_table
from models import exactness
from models.attention import BLOCK_TOKENS, Attention, PagedAttention, Plan, TiledAttention, slots
from models.config import ModelConfig
from models.ops import torch_ops
from models.run import Run
from models.weights import Layer, Weights


class Transformer:
    """Weights and the functions over them. Not thread-safe: one step at a time."""

    def __init__(self, config: ModelConfig, weights: Weights, kv_format: str = RAW) -> None:
        """Bind sizes and weights; keys and values are rounded to `kv_format`, see `kernels.kv_format`.

        Raises:
            ValueError: if heads of this size cannot be rounded.
        """
        if kv_format != RAW:
            group_of(config.head_dim)
        self.kv_format = kv_format
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.ops = torch_ops()
        tile = tile_rows(config.group)
        self.max_context = config.context_length // tile * tile
        self.turns = turns_table(
            self.max_context, config.head_dim, config.rope_theta, config.rope_scale, weights.rope_factors
        ).unsqueeze(1)  # [positions, 1, head_dim / 2]
        layer = weights.layers[0]
        with torch.inference_mode():
            self.exact = exactness.probe(
                [layer.qkv, layer.out, layer.gate_up, layer.down, weights.head],
                config.num_kv_heads,
                config.group,
                config.head_dim,
            )
        self.attention: Attention
        if self.ops.plain_attention:
            self.attention = TiledAttention(config, self.dtype, self.max_context)
        else:
            self.attention = PagedAttention(config, self.ops)

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
        normed = self.ops.rms_norm(x, self.weights.norm, self.config.norm_eps, self.dtype)
        return self._linear(normed, self.weights.head).float()

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        exact, shape = self.exact, weight.shape
        return self.ops.linear(x, weight, exact.min_rows[shape], exact.max_rows.get(shape))

    def _hidden(self, runs: Sequence[Run], lines: torch.Tensor) -> torch.Tensor:
        """Run all layers; returns the residual stream, float32 `[tokens, hidden]`."""
        positions = torch.cat([torch.arange(r.start, r.start + len(r.ids)) for r in runs])
        tables = [torch.tensor(r.blocks) for r in runs]
        places = torch.cat([slots(self.config, r, table) for r, table in zip(runs, tables, strict=True)])  # [tokens, 2]
        plan = self.attention.plan(runs, tables, self.exact.repeat)
        turns = self.turns[positions]  # [tokens, 1, head_dim / 2]
        ids = torch.tensor([token for r in runs for token in r.ids])
        x = self.weights.embedding[ids].float()  # [tokens, hidden]
        eps, add = self.config.norm_eps, None
        for index, layer in enumerate(self.weights.layers):
            normed = self.ops.rms_norm(x, layer.attn_norm, eps, self.dtype, add)
            add = self._attention(layer, index, normed, turns, lines, places, plan)
            normed = self.ops.rms_norm(x, layer.ffn_norm, eps, self.dtype, add)
            add = self._linear(self.ops.silu_mul(self._linear(normed, layer.gate_up)), layer.down)
        if add is not None:
            x += add
        return x

    def _attention(
        self,
        layer: Layer,
        index: int,
        normed: torch.Tensor,
        turns: torch.Tensor,
        lines: torch.Tensor,
        places: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        c = self.config
        qkv = self._linear(normed, layer.qkv)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        qkv = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)  # [tokens, heads + 2 kv_heads, head_dim]
        turned = self.ops.rope(self._normed_heads(layer, qkv[:, : -c.num_kv_heads]), turns, c.rope_pairing)
        q, k, v = turned[:, : c.num_heads], turned[:, c.num_heads :], qkv[:, -c.num_kv_heads :]
        kv = torch.stack((k.flatten(1), v.flatten(1)), dim=1)
        if self.kv_format != RAW:
            # Before anybody reads them: whoever computes, recomputes or loads them attends to the same values.
            kv = round_groups(kv, c.head_dim, self.kv_format)
        self.ops.kv_write(lines, places + index * 2 * BLOCK_TOKENS, kv)
        return self._linear(plan.attend(index, q, lines), layer.out)

    def _normed_heads(self, layer: Layer, heads: torch.Tensor) -> torch.Tensor:
        """Normalize each head of queries and keys `[tokens, heads + kv_heads, head_dim]` where the model does so."""
        if layer.q_norm is None or layer.k_norm is None:
            return heads
        c = self.config
        x = heads.float()
        queries, keys = (part.reshape(-1, c.head_dim) for part in (x[:, : c.num_heads], x[:, c.num_heads :]))
        q = self.ops.rms_norm(queries, layer.q_norm, c.norm_eps, self.dtype)
        k = self.ops.rms_norm(keys, layer.k_norm, c.norm_eps, self.dtype)
        return torch.cat((q.view(len(x), -1, c.head_dim), k.view(len(x), -1, c.head_dim)), dim=1)
