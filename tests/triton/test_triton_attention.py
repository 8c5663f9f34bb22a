"""Paged attention: as the plain version, from any cut of a prompt, and the same bits for a position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from triton_cases import DTYPES, assert_close, assert_same_bits, noise, on_device

from kernels.attention.triton import SPLIT_KEYS, TILE_ROWS, tile_positions
from kernels.decode_attention import reference as decode_reference
from kernels.decode_attention import triton as decode_triton
from kernels.prefill_attention import reference as prefill_reference
from kernels.prefill_attention import triton as prefill_triton

WILD = 2**30  # a block that does not exist: reading it would be seen


@dataclass
class Case:
    """Sequences in scattered blocks of one layer of a pool; whatever holds no token is NaN."""

    pool: torch.Tensor  # [num_blocks, 2, 16, kv_heads, head_dim], a view
    tables: torch.Tensor  # [sequences, width]
    q: list[torch.Tensor]  # per sequence [length, heads, head_dim]

    def prefill(self, runs: list[tuple[int, int, int]], module: object) -> torch.Tensor:
        """Attend with runs (sequence, first position, position after the last)."""
        q = torch.cat([self.q[s][start:end] for s, start, end in runs])
        begins = [0, *accumulate(end - start for _, start, end in runs)]
        tables = self.tables[[s for s, _, _ in runs]]
        call = module.prefill_attention  # type: ignore[attr-defined]
        return call(on_device(q), on_device_view(self.pool), on_device(tables), begins, [start for _, start, _ in runs])

    def decode(self, rows: list[tuple[int, int]], module: object) -> torch.Tensor:
        """Attend with rows (sequence, position)."""
        q = torch.stack([self.q[s][p] for s, p in rows])
        call = module.decode_attention  # type: ignore[attr-defined]
        tables = self.tables[[s for s, _ in rows]]
        return call(on_device(q), on_device_view(self.pool), on_device(tables), [p + 1 for _, p in rows])


def on_device_view(pool: torch.Tensor) -> torch.Tensor:
    """Return the pool where kernels run, with the strides of a view of one layer."""
    whole = torch.full((len(pool), 3, *pool.shape[1:]), float("nan"), dtype=pool.dtype)
    whole[:, 1] = pool
    return on_device(whole)[:, 1]


def make(lengths: list[int], group: int, dim: int = 16, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> Case:
    """Return sequences of these lengths; blocks of one are never next to one another."""
    counts = [-(-n // 16) for n in lengths]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(6))
    pool = torch.full((len(order), 2, 16, kv_heads, dim), float("nan"), dtype=dtype)
    tables = torch.full((len(lengths), max(counts) + 1), WILD, dtype=torch.int32)
    at = 0
    for s, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = order[at : at + count]
        at += count
        tables[s, :count] = blocks
        kv = torch.full((2, count * 16, kv_heads, dim), float("nan"), dtype=dtype)
        kv[:, :n] = noise(2, n, kv_heads, dim, dtype=dtype, seed=100 + s)
        pool[blocks] = kv.view(2, count, 16, kv_heads, dim).transpose(0, 1)
    return Case(
        pool, tables, [noise(n, kv_heads * group, dim, dtype=dtype, seed=s) * 1.5 for s, n in enumerate(lengths)]
    )


def softmax_written_out(case: Case, s: int, position: int) -> torch.Tensor:
    """Return attention of one row in float64, `[heads, head_dim]`."""
    blocks = case.tables[s, : position // 16 + 1].long()
    k, v = case.pool[blocks].transpose(0, 1).flatten(1, 2)[:, : position + 1].double()
    heads, dim = case.q[s].shape[1:]
    q = case.q[s][position].double().view(k.shape[1], -1, dim)
    scores = torch.einsum("hgd,lhd->hgl", q, k) / math.sqrt(dim)
    return torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v).reshape(heads, dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 7])
def test_prefill_is_the_softmax_written_out_and_the_plain_version(group: int, dtype: torch.dtype) -> None:
    """A ragged batch: a whole prompt, one with a cached prefix past a split, one token, an empty run."""
    case = make([35, SPLIT_KEYS + 30, 16, 1], group, dim=24, dtype=dtype)
    runs = [(0, 0, 35), (1, SPLIT_KEYS - 3, SPLIT_KEYS + 30), (2, 15, 16), (2, 15, 15), (3, 0, 1)]

    got = case.prefill(runs, prefill_triton)

    want = torch.stack([softmax_written_out(case, s, p) for s, start, end in runs for p in range(start, end)])
    assert_close(got, want.to(dtype))
    assert_close(case.prefill(runs, prefill_reference).cpu(), want.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 7])
def test_decode_is_the_softmax_written_out_and_the_plain_version(group: int, dtype: torch.dtype) -> None:
    """Lengths around the edges of blocks, key tiles and splits; a head size that is no power of two."""
    lengths = [1, 15, 16, 17, 64, 65, SPLIT_KEYS, SPLIT_KEYS + 1, 2 * SPLIT_KEYS + 5]
    case = make(lengths, group, dim=24, dtype=dtype)
    rows = [(s, n - 1) for s, n in enumerate(lengths)]

    got = case.decode(rows, decode_triton)

    want = torch.stack([softmax_written_out(case, s, p) for s, p in rows])
    assert_close(got, want.to(dtype))
    assert_close(case.decode(rows, decode_reference).cpu(), want.to(dtype))


@pytest.mark.parametrize("module", ["triton", "reference"])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_a_position_has_the_same_bits_prefilled_chunked_and_decoded(group: int, module: str) -> None:
    """Alone or among others, whole, cut anywhere, or token by token: one result per position."""
    prefill = prefill_triton if module == "triton" else prefill_reference
    decode = decode_triton if module == "triton" else decode_reference
    n = SPLIT_KEYS + 21
    case = make([n, 40], group)
    whole = case.prefill([(0, 0, n)], prefill)

    for cuts in ([0, 1, 16, 90, n], [0, 33, SPLIT_KEYS - 1, SPLIT_KEYS + 2, n]):
        for start, end in zip(cuts, cuts[1:], strict=False):
            among = case.prefill([(1, 3, 40), (0, start, end)], prefill)
            assert_same_bits(among[37:], whole[start:end])
    positions = [0, 1, 15, 16, 63, 64, 100, SPLIT_KEYS - 1, SPLIT_KEYS, n - 1]
    together = case.decode([(1, 30), *((0, p) for p in positions), (1, 39)], decode)
    assert_same_bits(together[1:-1], whole[positions])
    for at, p in enumerate(positions[-3:], start=len(positions) - 3):
        assert_same_bits(case.decode([(0, p)], decode)[0], together[1 + at])


def test_where_blocks_lie_changes_nothing() -> None:
    """The same sequence in other blocks gives the same bits."""
    case = make([50, 70], 3)
    order = torch.randperm(len(case.pool), generator=torch.Generator().manual_seed(8))
    tables = case.tables.clone()
    known = tables < WILD
    tables[known] = order.argsort()[tables[known].long()].int()
    moved = Case(case.pool[order], tables, case.q)

    runs = [(0, 3, 50), (1, 60, 70)]

    assert_same_bits(moved.prefill(runs, prefill_triton), case.prefill(runs, prefill_triton))
    assert_same_bits(moved.decode([(0, 49), (1, 69)], decode_triton), case.decode([(0, 49), (1, 69)], decode_triton))


def test_an_empty_batch_gives_an_empty_result() -> None:
    """No rows, and runs without rows."""
    case = make([5], 3)

    assert case.prefill([(0, 5, 5)], prefill_triton).shape == (0, 6, 16)
    q = on_device(torch.empty(0, 6, 16))
    tables = on_device(torch.empty(0, 1, dtype=torch.int32))
    assert decode_triton.decode_attention(q, on_device_view(case.pool), tables, []).shape == (0, 6, 16)


def test_what_a_kernel_would_misread_is_refused() -> None:
    """Lengths of zero, heads that do not divide, another type, too many heads per KV head."""
    case = make([5], 3)
    pool, q, tables = on_device_view(case.pool), on_device(case.q[0]), on_device(case.tables)

    with pytest.raises(ValueError, match="at least its own key"):
        decode_triton.decode_attention(q[:1], pool, tables, [0])
    with pytest.raises(ValueError, match="multiple"):
        decode_triton.decode_attention(q[:1, :5], pool, tables, [1])
    with pytest.raises(ValueError, match="the queries torch.bfloat16"):
        prefill_triton.prefill_attention(q.bfloat16(), pool, tables, [0, 5], [0])
    with pytest.raises(ValueError, match="one entry more"):
        prefill_triton.prefill_attention(q, pool, tables, [0, 2, 5], [0])
    with pytest.raises(ValueError, match="not 65"):
        tile_positions(TILE_ROWS + 1)
