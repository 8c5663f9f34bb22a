"""Attention over the pool, in the shapes that a step needs: planned once, used by every layer.

`TiledAttention` computes the plain version's canonical tiles, with all index tensors made once per step;
`PagedAttention` calls the ops of the registry, which find their way through the pool themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from kernels.attention import reference as attention
from models.config import ModelConfig
from models.ops import Ops
from models.run import Run

BLOCK_TOKENS = attention.BLOCK_TOKENS


class Plan(Protocol):
    """The attention of one step."""

    def attend(self, layer: int, q: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        """Attend with q `[tokens, heads, head_dim]` over the pool's lines; returns `[tokens, heads · head_dim]`."""


class Attention(Protocol):
    """One way to attend."""

    def plan(self, runs: Sequence[Run], tables: Sequence[torch.Tensor], repeat: int) -> Plan:
        """Prepare a step.

        Args:
            tables: the blocks of each run.
            repeat: how often a single row stands in a call of torch's own kernel (see `models.exactness`).
        """


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


class TiledAttention:
    """Canonical tiles on torch's own kernel."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_context: int) -> None:
        """Make the masks.

        Args:
            max_context: a multiple of the tile.
        """
        self.config = config
        self.tile = attention.tile_rows(config.group)
        self.max_context = max_context
        # The mask of the longest context; those of all shorter ones are its right-hand parts.
        self.mask = attention.causal_mask(max_context, self.tile, dtype)
        self.tile_mask = self.mask.repeat_interleave(config.group, 0)

    def plan(self, runs: Sequence[Run], tables: Sequence[torch.Tensor], repeat: int) -> _TiledPlan:
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
        return _TiledPlan(self, parts, repeat)

    def _lines(self, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return `[2, length]`: lines of keys and values of positions from 0 to the end of the last token's tile."""
        length = -(-num_tokens // self.tile) * self.tile
        positions = torch.arange(length)
        # Positions past the last token borrow a line of it; they are zeroed and masked after the gather.
        positions.clamp_(max=num_tokens - 1)
        key = _block_lines(self.config, table[positions // BLOCK_TOKENS]) + positions % BLOCK_TOKENS
        return torch.stack((key, key + BLOCK_TOKENS))


@dataclass(frozen=True, slots=True)
class _TiledPlan:
    by: TiledAttention
    parts: list[_Rows | _Tiles]
    repeat: int

    def attend(self, layer: int, q: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        shift = layer * 2 * BLOCK_TOKENS
        out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype)
        for part in self.parts:
            if isinstance(part, _Rows):
                self._attend_rows(part, shift, q, lines, out)
            else:
                self._attend_tiles(part, shift, q, lines, out)
        return out

    def _attend_rows(self, part: _Rows, shift: int, q: torch.Tensor, lines: torch.Tensor, out: torch.Tensor) -> None:
        c = self.by.config
        k, v = attention.gather(lines, part.lines + shift, c.num_kv_heads)
        k[:, -self.by.tile :].masked_fill_(part.empty, 0)
        v[:, -self.by.tile :].masked_fill_(part.empty, 0)
        rows = q[part.at].view(-1, c.num_kv_heads, c.group, c.head_dim)
        out[part.at] = attention.row_attention(rows, k, v, part.mask, self.repeat).reshape(len(rows), -1)

    def _attend_tiles(self, part: _Tiles, shift: int, q: torch.Tensor, lines: torch.Tensor, out: torch.Tensor) -> None:
        c = self.by.config
        k, v = attention.gather(lines, part.lines + shift, c.num_kv_heads)
        if part.after:
            k[:, -part.after :].zero_()
            v[:, -part.after :].zero_()
        rows = torch.nn.functional.pad(q[part.begin : part.end].flatten(1), (0, 0, part.before, part.after))
        tiles = rows.view(-1, self.by.tile, c.num_kv_heads, c.group, c.head_dim)
        result = attention.tile_attention(tiles, k, v, self.by.tile_mask, part.first).reshape(len(rows), -1)
        out[part.begin : part.end] = result[part.before : len(rows) - part.after]


class PagedAttention:
    """The ops of the registry."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        self.config = config
        self.ops = ops

    def plan(self, runs: Sequence[Run], tables: Sequence[torch.Tensor], repeat: int) -> _PagedPlan:
        """Part single rows from longer runs."""
        begins = [0, *accumulate(len(run.ids) for run in runs)]
        padded = torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True).int()  # [runs, most blocks]
        single = [i for i, run in enumerate(runs) if len(run.ids) == 1]
        longer = [i for i, run in enumerate(runs) if len(run.ids) > 1]
        rows = [torch.arange(begins[i], begins[i + 1]) for i in longer]
        return _PagedPlan(
            by=self,
            decoded=torch.tensor([begins[i] for i in single], dtype=torch.int64),
            decode_tables=padded[single],
            lengths=[runs[i].start + 1 for i in single],
            prefilled=torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64),
            prefill_tables=padded[longer],
            begins=[0, *accumulate(len(runs[i].ids) for i in longer)],
            starts=[runs[i].start for i in longer],
        )


@dataclass(frozen=True, slots=True)
class _PagedPlan:
    by: PagedAttention
    decoded: torch.Tensor  # [rows] where single rows stand in the batch
    decode_tables: torch.Tensor
    lengths: list[int]
    prefilled: torch.Tensor  # [tokens of longer runs]
    prefill_tables: torch.Tensor
    begins: list[int]
    starts: list[int]

    def attend(self, layer: int, q: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        c, ops = self.by.config, self.by.ops
        pool = lines.view(-1, c.num_layers, 2, BLOCK_TOKENS, c.num_kv_heads, c.head_dim)[:, layer]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self.lengths:
            out[self.decoded] = ops.decode_attention(q[self.decoded], pool, self.decode_tables, self.lengths)
        if self.starts:
            rows = q[self.prefilled]
            out[self.prefilled] = ops.prefill_attention(rows, pool, self.prefill_tables, self.begins, self.starts)
        return out.flatten(1)


def _block_lines(config: ModelConfig, blocks: torch.Tensor) -> torch.Tensor:
    """Return the pool line of each block's first key in layer 0."""
    return blocks * (config.num_layers * 2 * BLOCK_TOKENS)


def slots(config: ModelConfig, run: Run, table: torch.Tensor) -> torch.Tensor:
    """Return `[tokens, 2]`: the lines (layer 0) of each token's key and value."""
    positions = torch.arange(run.start, run.start + len(run.ids))
    key = _block_lines(config, table[positions // BLOCK_TOKENS]) + positions % BLOCK_TOKENS
    return torch.stack((key, key + BLOCK_TOKENS), dim=1)
