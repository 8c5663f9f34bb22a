"""The plain ops against formulas written out, and the same bits for a row in any company."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.attention import reference as attention
from kernels.kv_write.reference import kv_write
from kernels.linear.reference import linear
from kernels.rms_norm.reference import rms_norm
from kernels.rope.reference import rope, turns_table
from kernels.silu_mul.reference import silu_mul

ROWS = [0, 1, 2, 3, 16, 17, 65]


def _noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_divides_by_the_root_of_the_mean_square(rows: int) -> None:
    """Against float64, and each row alone gives the same bits."""
    x, weight = _noise(rows, 48) * 3, _noise(48, seed=2)

    got = rms_norm(x, weight, 1e-5, torch.float32)

    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    for i in range(rows):
        assert torch.equal(rms_norm(x[i : i + 1], weight, 1e-5, torch.float32)[0], got[i])


@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul_gates_the_second_half_by_the_first(rows: int) -> None:
    """silu(gate) · up against float64."""
    x = _noise(rows, 2 * 24) * 4

    got = silu_mul(x)

    gate, up = x.double()[:, :24], x.double()[:, 24:]
    torch.testing.assert_close(got.double(), gate / (1 + (-gate).exp()) * up, rtol=1e-6, atol=1e-6)
    for i in range(rows):
        assert torch.equal(silu_mul(x[i : i + 1])[0], got[i])


@pytest.mark.parametrize("rows", ROWS)
def test_rope_turns_neighbouring_pairs_by_position_times_frequency(rows: int) -> None:
    """Pair i of position p turns by p · theta^(-2i / dim); the length of a pair stays."""
    dim, theta = 8, 100.0
    x = _noise(rows, 3, dim)
    turns = turns_table(100, dim, theta)[torch.arange(rows)].unsqueeze(1)

    got = rope(x, turns)

    assert got.shape == x.shape
    for p in range(rows):
        for i in range(dim // 2):
            angle = p * theta ** (-2 * i / dim)
            a, b = x[p, :, 2 * i].double(), x[p, :, 2 * i + 1].double()
            want = torch.stack(
                (a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)), -1
            )
            torch.testing.assert_close(got[p, :, 2 * i : 2 * i + 2].double(), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(rope(x[p : p + 1], turns[p : p + 1])[0], got[p])


def test_scaled_rope_divides_positions_and_frequencies() -> None:
    """Linear scaling by 4 at position 8 is position 2; factors divide single frequencies."""
    plain, scaled = turns_table(9, 8, 100.0), turns_table(9, 8, 100.0, 4.0)
    factors = turns_table(9, 8, 100.0, factors=torch.tensor([1.0, 2.0, 4.0, 8.0]))

    torch.testing.assert_close(scaled[8], plain[2])
    torch.testing.assert_close(factors[8, 2], plain[2, 2])


def test_linear_pads_and_takes_the_padding_away() -> None:
    """Fewer rows than the minimum give what more rows give."""
    x, weight = _noise(3, 20), _noise(7, 20, seed=2)

    for min_rows in (1, 3, 16):
        got = linear(x, weight, min_rows)
        assert got.shape == (3, 7)
        torch.testing.assert_close(got, x @ weight.T)


def test_long_products_are_cut_and_their_last_piece_is_padded() -> None:
    """Every row is multiplied in a call of the shape that was asked for, and stands in its place."""
    x, weight = _noise(19, 20), _noise(7, 20, seed=2)

    got = linear(x, weight, 4, 8)

    pieces = [linear(x[:8], weight), linear(x[8:16], weight), linear(x[16:], weight, 4)]
    assert torch.equal(got, torch.cat(pieces))
    torch.testing.assert_close(got, x @ weight.T)


def test_kv_write_touches_only_its_lines() -> None:
    """Keys and values arrive at their slots; all other lines keep their NaN."""
    lines = torch.full((200, 4), float("nan"))
    kv = _noise(3, 2, 4)
    slots = torch.tensor([[5, 21], [6, 22], [100, 116]])

    kv_write(lines, slots, kv)

    assert torch.equal(lines[slots], kv)
    rest = torch.ones(200, dtype=torch.bool)
    rest[slots.flatten()] = False
    assert lines[rest].isnan().all()


@pytest.mark.parametrize("group", [1, 3, 8])
def test_attention_by_tiles_and_by_rows_equals_the_softmax_written_out(group: int) -> None:
    """Every position of a sequence, against float64; rows are repeated until they have a tile's bits."""
    heads, dim, tile = 2, 16, attention.tile_rows(group)
    length = 3 * tile
    q, k, v = (
        _noise(3, tile, heads, group, dim),
        _noise(1, length, heads, dim, seed=2),
        _noise(1, length, heads, dim, seed=3),
    )
    mask = attention.causal_mask(length, tile, torch.float32)

    tiles = attention.tile_attention(q, k, v, mask.repeat_interleave(group, 0), 0)

    flat = q.view(length, heads, group, dim).double()
    for p in range(length):
        scores = torch.einsum("hgd,lhd->hgl", flat[p], k[0, : p + 1].double()) / math.sqrt(dim)
        want = torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v[0, : p + 1].double())
        torch.testing.assert_close(tiles.reshape(length, heads, group, dim)[p].double(), want, rtol=1e-5, atol=1e-5)
        end = (p // tile + 1) * tile
        row = attention.row_attention(
            flat[p : p + 1].float(), k[:, :end], v[:, :end], mask[p % tile, length - end :].view(1, 1, 1, -1), 2
        )
        torch.testing.assert_close(row[0].double(), want, rtol=1e-5, atol=1e-5)
