"""Keys and values rounded to 8 bits, and blocks of them packed: three implementations, bit by bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_format import BLOCK_TOKENS, ORDERS, Shape, group_of, native, plain, reference
from tests.kernels.native_ops import need_native

need_native()

FORMS = ("int8", "fp8")
SHAPES = [Shape(order, 2, heads, dim, form) for order in ORDERS for form in FORMS for heads, dim in ((1, 48), (3, 64))]
Floats = npt.NDArray[np.float32]


def values(seed: int, rows: int, width: int) -> Floats:
    """Numbers of all sizes, in groups of all sizes, with zeros of both signs."""
    rng = np.random.default_rng(seed)
    shape = (rows, width)
    out = (
        rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape)) * 2.0 ** rng.integers(-140, 100, (rows, 1))
    )
    out[rng.random(shape) < 0.1] = 0.0
    out[rng.random(shape) < 0.1] = -0.0
    return out.astype(np.float32)


def bits(x: Floats) -> npt.NDArray[np.uint32]:
    """The bits of float32."""
    return np.ascontiguousarray(x).view(np.uint32)


def pool_blocks(shape: Shape, seed: int, count: int = 3, *, spread: float = 4.0) -> npt.NDArray[np.uint8]:
    """Blocks as an engine that rounds writes them, `[count, block_nbytes]`."""
    rng = np.random.default_rng(seed)
    group = group_of(shape.head_dim)
    x = rng.standard_normal((count, shape.groups, group)) * np.exp(
        spread * rng.standard_normal((count, shape.groups, 1))
    )
    rounded = plain.round_groups(x.astype(np.float32).reshape(count, -1), shape.head_dim, shape.format)
    places, _ = plain._places(shape)
    flat = np.empty((count, shape.elements), np.float32)
    flat[:, places.reshape(-1)] = rounded
    assert not (bits(flat) & 0xFFFF).any(), "a rounded value is no bfloat16"
    return (bits(flat) >> 16).astype(np.uint16).view(np.uint8)


# --- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [16, 48, 64, 128])
def test_all_implementations_round_alike(form: str, dim: int) -> None:
    """Compiled, numpy and torch; subnormals, zeros, groups next to infinities."""
    x = values(dim, 120, 2 * dim)
    x[1, 3], x[2, 5] = np.inf, np.nan

    want = plain.round_groups(x, dim, form)

    assert (bits(native.round_groups(x, dim, form)) == bits(want)).all()
    assert (bits(reference.round_groups(torch.from_numpy(x), dim, form).numpy()) == bits(want)).all()


@pytest.mark.parametrize("form", FORMS)
def test_rounding_again_changes_no_bit(form: str) -> None:
    """A group's scale follows from its rounded values too, and bfloat16 holds them."""
    once = native.round_groups(values(1, 300, 64), 64, form)

    assert (bits(native.round_groups(once, 64, form)) == bits(once)).all()
    assert not (bits(once) & 0xFFFF).any()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=16, max_size=16), st.sampled_from(FORMS))
def test_the_error_is_bounded_by_the_largest_of_the_group(group: list[float], form: str) -> None:
    """Half a place: of 2^-6 of the largest's power of two for int8, of 4 significant bits (or 2^-17) for fp8."""
    x = np.array([group], np.float32)

    got = native.round_groups(x, 16, form).astype(np.float64)

    top = 2.0 ** np.floor(np.log2(max(float(np.abs(x).max()), 2.0**-94)))
    error = np.abs(got - x.astype(np.float64))
    if form == "int8":
        allowed = np.full_like(error, top / 64)  # a whole place where 127.5 and more are cut off
        allowed[np.abs(x) < 1.98 * top] = top / 128
    else:
        allowed = np.maximum(np.abs(x) / 16, top * 2.0**-18).astype(np.float64)
        allowed[np.abs(x) > 1.75 * top] = top / 4  # 448 is the largest
    assert (error <= allowed * (1 + 1e-6)).all()


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_stays(form: str) -> None:
    """An infinity or NaN is not turned into a number; its group is as it was, its neighbours are rounded."""
    x = values(3, 1, 96)
    x[0, 40] = np.nan

    got = native.round_groups(x, 96, form)

    assert (bits(got[0, 32:64]) == bits(x[0, 32:64])).all()
    assert (bits(got[0, :32]) == bits(plain.round_groups(x[:, :32], 32, form)[0])).all()


def test_heads_that_cannot_be_cut_are_refused() -> None:
    """Groups are of 32 or 16."""
    assert (group_of(64), group_of(48)) == (32, 16)
    with pytest.raises(ValueError, match="40"):
        group_of(40)


# --- packing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_blocks_give_every_bit_back(shape: Shape) -> None:
    """Both implementations make the same bytes, half as many and a scale per group."""
    blocks = pool_blocks(shape, 1)
    packed = np.full((len(blocks), shape.packed_nbytes), 0xEE, np.uint8)
    back = np.full_like(blocks, 0xEE)

    native.pack_into(shape, blocks.reshape(-1), packed.reshape(-1))
    native.unpack_into(shape, packed.reshape(-1), back.reshape(-1))

    assert (packed == plain.pack(shape, blocks)).all()
    assert (back == blocks).all() and (plain.unpack(shape, packed) == blocks).all()
    assert native.first_unequal(shape, blocks.reshape(-1), packed.reshape(-1)) is None
    assert shape.packed_nbytes == shape.elements * (group_of(shape.head_dim) + 1) // group_of(shape.head_dim)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_block_that_was_not_rounded_is_found(shape: Shape) -> None:
    """One value of one block that its format does not have."""
    blocks = pool_blocks(shape, 2, spread=0.0)
    words = blocks.view(np.uint16)
    words[1, shape.elements // 3] ^= 1
    packed = np.empty((len(blocks), shape.packed_nbytes), np.uint8)

    native.pack_into(shape, blocks.reshape(-1), packed.reshape(-1))

    assert native.first_unequal(shape, blocks.reshape(-1), packed.reshape(-1)) == 1
    assert plain.first_unequal(shape, blocks, packed) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("word", [0x7F80, 0xFFC0, 0x0001, 0x8000], ids=["infinity", "nan", "subnormal", "minus-zero"])
def test_bits_that_no_rounding_makes_never_come_back_as_others(shape: Shape, word: int) -> None:
    """They are given back as they are, or found; the compiled code and the plain one agree on which."""
    blocks = pool_blocks(shape, 3, 1, spread=0.0)
    blocks.view(np.uint16)[0, 7] = word
    packed = np.empty((1, shape.packed_nbytes), np.uint8)
    back = np.empty_like(blocks)

    native.pack_into(shape, blocks.reshape(-1), packed.reshape(-1))
    native.unpack_into(shape, packed.reshape(-1), back.reshape(-1))

    same = bool((back == blocks).all())
    assert (native.first_unequal(shape, blocks.reshape(-1), packed.reshape(-1)) is None) == same
    assert (plain.first_unequal(shape, blocks, plain.pack(shape, blocks)) is None) == same
    assert same == (word == 0x8000 and shape.format == "fp8")


def test_the_order_of_scales_is_that_of_the_tokens() -> None:
    """A token whose key is a thousand times larger changes its own scales and codes alone."""
    shape = Shape("native-1", 1, 2, 64, "int8")
    keys = np.ones((2, 32, BLOCK_TOKENS, 2), np.float32)
    keys[1, :, 5] = 1024.0  # head 1, token 5
    both = np.concatenate([keys.reshape(-1), np.ones(keys.size, np.float32)])
    block = (bits(both) >> 16).astype(np.uint16).view(np.uint8)
    packed = np.empty(shape.packed_nbytes, np.uint8)

    native.pack_into(shape, block, packed)

    scales = packed[: shape.groups].astype(int) - 127
    odd = np.flatnonzero(scales != -6)
    assert odd.tolist() == [2 * 16 + 5, 3 * 16 + 5] and set(scales[odd]) == {4}
    assert set(packed[shape.groups :]) == {64}
