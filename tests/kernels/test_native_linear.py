"""Products with packed weights: their values, and that a row has the same bits beside any others."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.linear.reference import linear
from models.packed import Matrix
from models.quant import FLOAT_KINDS, affine, dequantize
from tests.kernels.native_ops import Array, Weights, bits, need_native, ops, pack
from tests.models.gguf_models import random_blocks

need_native()

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16", "F32")
INPUTS = 512
# What stands in one product when a file mixes kinds.
MIXES = (
    ("Q4_0", "Q4_1"), ("Q4_0", "Q4_K"), ("Q4_K", "Q6_K", "Q4_K"), ("Q8_0", "Q4_0", "Q5_K"), ("Q8_0", "Q6_K"),
    ("BF16", "F32"), ("F16", "BF16", "F16"), ("Q4_K", "F16"), ("Q6_K", "F32", "Q8_0"),
)  # fmt: skip


def _matrix(kind: str, rows: int, seed: int = 0, inputs: int = INPUTS) -> tuple[str, Array, tuple[int, int]]:
    raw = random_blocks(kind, rows, inputs, np.random.default_rng(seed))
    return kind, np.ascontiguousarray(raw).view(np.uint8).reshape(-1), (rows, inputs)


def _values(part: tuple[str, Array, tuple[int, int]]) -> Array:
    kind, raw, shape = part
    return dequantize(kind, raw, shape[0] * shape[1]).reshape(shape)


def _rows(count: int, seed: int = 1, inputs: int = INPUTS) -> Array:
    """Activations as unlike as those of a model: rows and single channels far larger than others, and zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, inputs), dtype=np.float32)
    x *= np.exp(rng.standard_normal((count, 1), dtype=np.float32))
    x[:, rng.integers(0, inputs, 8)] *= 30
    x[:, 96:128] = 0  # a group of nothing
    return x


def _bound(parts: list[tuple[str, Array, tuple[int, int]]], x: Array) -> Array:
    """How far a product may lie from the exact one, `[rows, outputs]` float64.

    An activation of a group is off by at most half a step, of which the largest of its group has 32512; float32 sums
    add one rounding of 2^-24 per group, of terms whose offsets have not been added yet.
    """
    group = 16 if any(kind == "Q6_K" for kind, _, _ in parts) else 32
    step = np.abs(x.astype(np.float64)).reshape(len(x), -1, group).max(axis=2).repeat(group, axis=1) / 32512
    out = []
    for kind, raw, shape in parts:
        w = np.abs(_values((kind, raw, shape)).astype(np.float64))
        integers = affine(kind, raw, shape)
        size = w
        if integers is not None:
            times = integers.group
            size = np.abs(integers.scale.astype(np.float64)).repeat(times, axis=1) * 256
            if integers.offset is not None:
                size = size + np.abs(integers.offset.astype(np.float64)).repeat(times, axis=1)
        terms = shape[1] if {k for k, _, _ in parts} & FLOAT_KINDS else 2 * shape[1] // 16
        error = np.abs(x.astype(np.float64)) @ size.T * terms * 2.0**-24
        if kind not in FLOAT_KINDS:
            error = error + 0.501 * step @ w.T
        out.append(error)
    return np.concatenate(out, axis=1)


def _check(parts: list[tuple[str, Array, tuple[int, int]]], x: Array, got: Array) -> None:
    want = x.astype(np.float64) @ np.concatenate([_values(part) for part in parts]).astype(np.float64).T
    outputs = want.shape[1]
    assert got.shape[0] == len(x) and got.shape[1] == math.ceil(outputs / 16) * 16
    error, bound = np.abs(got[:, :outputs] - want), _bound(parts, x)
    assert (error <= bound).all(), float((error / bound).max())
    # The bound is worth something: far below what eight bits of activations would give.
    spread = np.sqrt((want**2).mean(axis=1, keepdims=True))
    assert float(np.median(error / spread)) < 2e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 19])
def test_a_product_is_that_of_the_values_in_the_file(kind: str, rows: int) -> None:
    """Against float64, within what 16 bits of activation cost; 40 outputs are no whole number of tiles."""
    part = _matrix(kind, 40)
    x = _rows(rows)

    got = ops().linear(pack(part), x)

    _check([part], x, got)
    assert (got[:, 40:] == 0).all()


@pytest.mark.parametrize("kinds", MIXES, ids="+".join)
def test_matrices_of_different_kinds_stand_in_one_product(kinds: tuple[str, ...]) -> None:
    """Query, key and value weights of one layer need not be of one kind."""
    parts = [_matrix(kind, 16 * (1 + i), seed=i) for i, kind in enumerate(kinds)]
    x = _rows(7)

    got = ops().linear(pack(*parts), x)

    _check(parts, x, got)


def test_tiles_of_two_matrices_can_take_turns() -> None:
    """Tile 0 of the first, tile 0 of the second, tile 1 of the first, …"""
    gate, up = _matrix("Q4_1", 48, seed=1), _matrix("Q4_1", 48, seed=2)
    x = _rows(3)

    turns = ops().linear(pack(gate, up, alternate=True), x).reshape(3, 3, 2, 16)

    assert np.array_equal(turns[:, :, 0].reshape(3, 48), ops().linear(pack(gate), x))
    assert np.array_equal(turns[:, :, 1].reshape(3, 48), ops().linear(pack(up), x))


def test_the_reference_in_torch_agrees() -> None:
    """The same contract on the other side: float32 weights, float32 rows."""
    part = _matrix("F32", 32)
    x = _rows(9)

    want = linear(torch.from_numpy(x), torch.from_numpy(_values(part))).numpy()

    np.testing.assert_allclose(ops().linear(pack(part), x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beside_any_number_of_others(kind: str) -> None:
    """1 to 70 rows, wherever the row stands, on 1, 2 and 3 threads."""
    w = pack(_matrix(kind, 80))
    x = _rows(70)
    alone = np.concatenate([ops().linear(w, x[i : i + 1]) for i in range(70)])

    for count in (2, 3, 4, 5, 7, 8, 9, 16, 33, 70):
        for first in (0, 70 - count):
            got = ops().linear(w, np.ascontiguousarray(x[first : first + count]), threads=1 + count % 3)
            assert np.array_equal(bits(got), bits(alone[first : first + count])), (count, first)
    for threads in (1, 2, 3):
        assert np.array_equal(bits(ops().linear(w, x, threads)), bits(alone))


COARSE_BELOW = 4.0


def _coarse(w: Weights) -> Weights:
    return replace(w, coarse_below=COARSE_BELOW)


def _mixed_rows(count: int) -> Array:
    """Rows of which some groups stand out, in some rows alone: every third row has them in places of its own."""
    x = _rows(count, seed=5)
    x[:, 64:96] = np.float32(0.3)
    for row in range(0, count, 3):
        x[row, (37 * row) % INPUTS] *= 50
    return x


def _rounded(x: Array, group: int) -> Array:
    """Activations as they are multiplied, float64: 8 bits where a group's largest is below the bound, else 16."""
    parts = x.astype(np.float64).reshape(len(x), -1, group)
    most = np.abs(parts).max(axis=2, keepdims=True)
    root = np.sqrt((x.astype(np.float64) ** 2).mean(axis=1))[:, None, None]
    levels = np.where(most < COARSE_BELOW * root, 127.0, 32512.0)
    step = np.where(most > 0, most / levels, 1.0)
    return (np.rint(parts / step) * step).reshape(x.shape)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in FLOAT_KINDS])
@pytest.mark.parametrize("rows", [1, 3, 8, 19])
def test_groups_that_do_not_stand_out_get_eight_bits(kind: str, rows: int) -> None:
    """The product is that of the rounded activations, with 8 bits in some groups and 16 in the others."""
    part = _matrix(kind, 32)
    x = _mixed_rows(rows)
    rounded = _rounded(x, 16 if kind == "Q6_K" else 32)

    got = ops().linear(_coarse(pack(part)), x)

    want = rounded @ _values(part).astype(np.float64).T
    # A value halfway between two steps may go either way in float32.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=float(_bound([part], x).max()))
    coarse = np.abs(want - x.astype(np.float64) @ _values(part).astype(np.float64).T)
    assert float(np.median(coarse)) > float(np.median(np.abs(got - want))) * 10


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in FLOAT_KINDS])
def test_what_stands_out_in_one_row_changes_no_bit_of_another(kind: str) -> None:
    """The low bytes of a whole block are multiplied if one row needs them; the others' are zeros."""
    w = _coarse(pack(_matrix(kind, 80)))
    x = _mixed_rows(40)
    alone = np.concatenate([ops().linear(w, x[i : i + 1]) for i in range(40)])

    for count in (2, 4, 8, 11, 40):
        for first in (0, 40 - count):
            got = ops().linear(w, np.ascontiguousarray(x[first : first + count]), threads=1 + count % 3)
            assert np.array_equal(bits(got), bits(alone[first : first + count])), (count, first)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in FLOAT_KINDS])
def test_a_block_gives_the_same_bits_however_many_of_its_rows_stand_out(kind: str) -> None:
    """Low bytes of few rows are multiplied row by row, those of many together: which way was taken leaves no trace."""
    w = _coarse(pack(_matrix(kind, 48)))
    even, uneven = _rows(8, seed=7), _rows(8, seed=7)
    even[:, 64:96] = np.float32(0.3)
    uneven[:, 64:96] = np.float32(0.3)
    uneven[:, 70] = np.float32(40.0)
    alone = [np.concatenate([ops().linear(w, x[i : i + 1]) for i in range(8)]) for x in (even, uneven)]

    for chosen in range(256):
        rows = np.array([chosen >> i & 1 for i in range(8)])
        got = ops().linear(w, np.where(rows[:, None] == 1, uneven, even))
        assert np.array_equal(bits(got), bits(np.where(rows[:, None] == 1, alone[1], alone[0]))), bin(chosen)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_row_of_extremes_beside_coarse_ones_leaves_them_alone(value: float) -> None:
    """What is no number spoils its row; what is merely large does not, though its square is no number."""
    w = _coarse(pack(_matrix("Q4_1", 32)))
    x = _mixed_rows(9)
    want = ops().linear(w, x)
    x[4, 100] = value

    got = ops().linear(w, x)

    assert np.array_equal(bits(np.delete(got, 4, 0)), bits(np.delete(want, 4, 0)))
    assert np.isfinite(got[4]).all() == np.isfinite(value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((kind, value) for kind in ("Q4_1", "Q6_K", "BF16") for value in (np.nan, np.inf, -np.inf)),
    ],
)
@pytest.mark.parametrize("at", [0, 5, 17, 31, 500])
def test_one_activation_that_is_no_number_spoils_its_whole_row(kind: str, value: float, at: int) -> None:
    """It reaches every output, so that the sequence fails instead of going on with another text."""
    w = pack(_matrix(kind, 32))
    x = _rows(9)
    x[4, at] = value

    assert not np.isfinite(ops().linear(w, x)[4]).any()


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 17, 500])
def test_a_row_that_is_not_numbers_leaves_its_neighbours_alone(kind: str, value: float, at: int) -> None:
    """Every bit of the other eight rows is that of a step without it."""
    w = pack(_matrix(kind, 32))
    x = _rows(9)
    want = ops().linear(w, x)
    x[4, at] = value

    got = ops().linear(w, x)

    assert np.array_equal(bits(np.delete(got, 4, 0)), bits(np.delete(want, 4, 0)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_nan_stays_nan(kind: str) -> None:
    """That is what a norm makes of a row with one NaN in it."""
    x = _rows(3)
    x[1] = np.nan

    got = ops().linear(pack(_matrix(kind, 32)), x)

    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()


def test_rows_of_nothing_and_of_extremes_keep_their_size() -> None:
    """Zeros give zeros; the largest and the smallest ordinary numbers are scaled as they should be."""
    part = _matrix("Q8_0", 16)
    x = np.zeros((4, INPUTS), np.float32)
    x[1, 3], x[2, 3], x[3, 3] = 1e30, 1e-30, -1.0

    got = ops().linear(pack(part), x)

    column = _values(part)[:, 3]
    assert (got[0] == 0).all()
    np.testing.assert_allclose(got[1], column * np.float32(1e30), rtol=1e-5)
    np.testing.assert_allclose(got[2], column * np.float32(1e-30), rtol=1e-5)
    np.testing.assert_allclose(got[3], -column, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_the_weights_has_the_bits_of_the_file(kind: str) -> None:
    """What an embedding looks up is what `dequantize` gives."""
    part = _matrix(kind, 40)
    w = pack(part)

    got = np.stack([ops().weight_row(w, row) for row in range(40)])

    assert np.array_equal(got, _values(part))


def test_the_comparison_sees_a_wrong_weight() -> None:
    """A single changed code of 20480 lies outside the bound."""
    part = _matrix("Q4_1", 40)
    x = _rows(5)
    w = pack(part)
    w.data[70] ^= 0x40

    with pytest.raises(AssertionError):
        _check([part], x, ops().linear(w, x))


def test_the_layout_is_the_documented_one() -> None:
    """A group of q4: four steps of 16 lanes, low and high nibbles 16 inputs apart, then scales and offsets."""
    kind, raw, shape = _matrix("Q4_1", 16, inputs=64)
    integers = affine(kind, raw, shape)
    assert integers is not None and integers.offset is not None

    w: Weights = pack((kind, raw, shape))

    assert w.matrix == Matrix(16, 64, 4, 32, 16, 1, 0)
    groups = w.data.reshape(2, 256 + 32 + 32)
    for group in range(2):
        codes = groups[group, :256].reshape(4, 16, 4)
        for j, lane, i in ((0, 0, 0), (3, 15, 3), (1, 7, 2)):
            assert codes[j, lane, i] & 15 == integers.q[lane, 32 * group + 4 * j + i]
            assert codes[j, lane, i] >> 4 == integers.q[lane, 32 * group + 4 * (j + 4) + i]
        scales = groups[group, 256:].view("<f2").astype(np.float32)
        assert np.array_equal(scales[:16], integers.scale[:, group])
        assert np.array_equal(scales[16:], integers.offset[:, group])
