"""Matrix products: as the plain versions, and the same bits for a row in any batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from triton_cases import DEVICE, DTYPES, assert_close, assert_same_bits, noise, on_device

from kernels.linear import GroupedWeight, reference
from kernels.linear import triton as fast

SHAPES = [(0, 5, 32), (1, 70, 96), (3, 64, 64), (35, 9, 160)]  # rows, out, in


def grouped(outputs: int, inputs: int, packed: bool, offset: bool, scale: torch.dtype = torch.float16) -> GroupedWeight:
    """Return a seeded weight; the integers take all their values."""
    generator = torch.Generator().manual_seed(5)
    if packed:
        q = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    else:
        q = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales, offsets = torch.rand(2, outputs, inputs // 32, generator=generator) * 0.02
    return GroupedWeight(q, scales.to(scale), -8 * offsets.to(scale) if offset else None)


def moved(weight: GroupedWeight) -> GroupedWeight:
    """Return the weight where kernels run."""
    offset = None if weight.offset is None else on_device(weight.offset)
    return GroupedWeight(on_device(weight.q), on_device(weight.scale), offset)


def test_a_grouped_weight_is_scale_times_integer_plus_offset() -> None:
    """Element by element, from the formula; a packed byte holds elements i and i + 16."""
    for packed in (True, False):
        weight = grouped(3, 64, packed, True, torch.float32)

        values = reference.dequantize(weight)

        assert weight.shape == (3, 64)
        for row in range(3):
            for column in range(64):
                group, i = divmod(column, 32)
                if packed:
                    byte = int(weight.q[row, group * 16 + i % 16])
                    q = byte & 15 if i < 16 else byte >> 4
                else:
                    q = int(weight.q[row, column])
                want = float(weight.scale[row, group]) * q + float(weight.offset[row, group])
                assert float(values[row, column]) == pytest.approx(want, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [*SHAPES, (2, 3, 45)])
def test_a_dense_product_is_the_plain_one(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Sizes that are no multiple of a tile, and rows with a stride."""
    x, weight = noise(rows, inputs + 3, dtype=dtype), noise(outputs, inputs, dtype=dtype, seed=2)

    got = fast.linear(on_device(x)[:, :inputs], on_device(weight))

    want = x[:, :inputs].double() @ weight.double().T
    assert_close(got, want.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_a_product_with_integers_in_groups_is_the_plain_one(
    rows: int, outputs: int, inputs: int, offset: bool, packed: bool, dtype: torch.dtype
) -> None:
    """4 and 8 bits, with and without an offset, against the dequantized weight in float64."""
    x, weight = noise(rows, inputs, dtype=dtype), grouped(outputs, inputs, packed, offset)

    got = fast.linear_grouped(on_device(x), moved(weight))

    want = x.double() @ reference.dequantize(weight).double().T
    assert_close(got, want.to(dtype))
    assert_close(reference.linear_grouped(x, weight), want.to(dtype))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_a_product_with_rounded_rows_is_the_plain_one_bit_for_bit(
    rows: int, outputs: int, inputs: int, packed: bool, bits: int
) -> None:
    """Sums of integers are exact and the groups are added in order, so nothing is left to chance."""
    x, weight = noise(rows, inputs) * 5, grouped(outputs, inputs, packed, packed)
    if rows:
        x[0, :32] = 0  # a group without a magnitude

    got = fast.linear_grouped_int(on_device(x), moved(weight), bits)

    assert_same_bits(got, reference.linear_grouped_int(x, weight, bits))
    exact = x.double() @ reference.dequantize(weight).double().T
    if rows:
        # At worst every element is half a step off. The last factor is for float32, which shows at 16 bits.
        half_step = float(x.abs().max()) / reference.LIMITS[bits] / 2
        bound = half_step * float(reference.dequantize(weight).abs().sum(1).max()) * 1.1
        torch.testing.assert_close(got.cpu().double(), exact, rtol=0.0, atol=bound)


Product = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    """For every product, at every place in a tile; a row of NaN beside it changes nothing."""
    x = noise(35, 96, dtype=dtype)
    x[34] = float("nan")
    dense = on_device(noise(70, 96, dtype=dtype, seed=2))
    products: list[Product] = [lambda part: fast.linear(part, dense)]
    for packed in (True, False):
        weight = moved(grouped(70, 96, packed, True))
        products.append(lambda part, weight=weight: fast.linear_grouped(part, weight))
        # Integers cannot hold NaN, so its row is left out there.
        products.append(lambda part, weight=weight: fast.linear_grouped_int(part.nan_to_num(), weight, 16))

    for product in products:
        together = product(on_device(x))
        for begin, end in ((0, 1), (5, 6), (31, 34), (33, 34), (7, 28)):
            assert_same_bits(product(on_device(x[begin:end])), together[begin:end])


def test_what_a_kernel_would_misread_is_refused() -> None:
    """Types and shapes that do not fit."""
    x = torch.zeros(2, 64, device=DEVICE)

    with pytest.raises(ValueError, match="the weight torch.bfloat16"):
        fast.linear(x, x.bfloat16())
    with pytest.raises(ValueError, match=r"x is \[rows, 96\]"):
        fast.linear_grouped(x, moved(grouped(5, 96, True, True)))
    with pytest.raises(ValueError, match="8 or 16 bits, not 12"):
        fast.linear_grouped_int(x, moved(grouped(5, 64, True, True)), 12)
