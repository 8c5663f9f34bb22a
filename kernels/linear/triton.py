"""Matrix products in tiles of one shape for every number of rows, sums over the inputs in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import OPTIONS, check, has_rows, product_type
from kernels.linear import GROUP, LIMITS, GroupedWeight

_ROWS, _OUTPUTS, _INPUTS = 32, 64, 64


@triton.jit
def _linear(
    x, weight, out, rows, outputs, inputs, x_stride, weight_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, inputs, INPUTS):
        column = at + tl.arange(0, INPUTS)
        inside = column < inputs
        a = tl.load(
            x + row[:, None] * x_stride + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        b = tl.load(
            weight + output[:, None] * weight_stride + column[None, :],
            mask=(output < outputs)[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.dot(a.to(PRODUCT), tl.trans(b.to(PRODUCT)), input_precision="ieee")
    where = row[:, None] * outputs + output[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (output < outputs)[None, :])


@triton.jit
def _grouped(
    x, q, scale, offset, out, rows, outputs, groups, x_stride,
    PACKED: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    row_in, output_in = (row < rows)[:, None], output < outputs
    half = tl.arange(0, 16)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for group in range(groups):
        at = x + row[:, None] * x_stride + group * 32 + half[None, :]
        low = tl.load(at, mask=row_in, other=0.0)
        high = tl.load(at + 16, mask=row_in, other=0.0)
        # Integers up to 255 are exact in every float type, and so are their products with x in float32.
        if PACKED:
            pair = tl.load(
                q + output[:, None] * (groups * 16) + group * 16 + half[None, :], mask=output_in[:, None], other=0
            ).to(tl.int32)
            q_low, q_high = pair & 15, pair >> 4
        else:
            where = q + output[:, None] * (groups * 32) + group * 32 + half[None, :]
            q_low = tl.load(where, mask=output_in[:, None], other=0)
            q_high = tl.load(where + 16, mask=output_in[:, None], other=0)
        part = tl.dot(low.to(PRODUCT), tl.trans(q_low.to(tl.float32).to(PRODUCT)), input_precision="ieee")
        part += tl.dot(high.to(PRODUCT), tl.trans(q_high.to(tl.float32).to(PRODUCT)), input_precision="ieee")
        factor = tl.load(scale + output * groups + group, mask=output_in, other=0.0).to(tl.float32)
        total += part * factor[None, :]
        if OFFSET:
            shift = tl.load(offset + output * groups + group, mask=output_in, other=0.0).to(tl.float32)
            total += tl.sum(low.to(tl.float32) + high.to(tl.float32), 1)[:, None] * shift[None, :]
    where_out = row[:, None] * outputs + output[None, :]
    tl.store(out + where_out, total.to(out.dtype.element_ty), mask=row_in & output_in[None, :])


@triton.jit
def _grouped_int(
    x, q, scale, offset, out, rows, outputs, groups, x_stride, limit,
    PACKED: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    row_in, output_in = (row < rows)[:, None], output < outputs
    element = tl.arange(0, 32)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for group in range(groups):
        value = tl.load(x + row[:, None] * x_stride + group * 32 + element[None, :], mask=row_in, other=0.0)
        value = value.to(tl.float32)
        most, limits = tl.max(tl.abs(value), 1), tl.zeros([ROWS], tl.float32) + limit
        step = tl.div_rn(most, limits)
        inverse = tl.where(most > 0.0, tl.div_rn(limits, tl.where(most > 0.0, most, 1.0)), 0.0)
        # Adding and taking away 1.5 · 2^23 rounds to a whole number, halves to the even one.
        a = ((value * inverse[:, None] + 12582912.0) - 12582912.0).to(tl.int32)
        if PACKED:
            pair = tl.load(
                q + output[:, None] * (groups * 16) + group * 16 + (element % 16)[None, :],
                mask=output_in[:, None],
                other=0,
            ).to(tl.int32)
            b = tl.where((element < 16)[None, :], pair & 15, pair >> 4).to(tl.int8)
        else:
            b = tl.load(
                q + output[:, None] * (groups * 32) + group * 32 + element[None, :], mask=output_in[:, None], other=0
            )
        b = tl.trans(b)
        if WIDE:
            # a = 256 · high + low with low from -128 to 127; both products are exact in int32.
            high = (a + 128) >> 8
            sums = tl.dot(high.to(tl.int8), b, out_dtype=tl.int32) * 256
            sums += tl.dot((a - high * 256).to(tl.int8), b, out_dtype=tl.int32)
        else:
            sums = tl.dot(a.to(tl.int8), b, out_dtype=tl.int32)
        factor = tl.load(scale + output * groups + group, mask=output_in, other=0.0).to(tl.float32)
        term = sums.to(tl.float32) * (step[:, None] * factor[None, :])
        if OFFSET:
            shift = tl.load(offset + output * groups + group, mask=output_in, other=0.0).to(tl.float32)
            term += (tl.sum(a, 1).to(tl.float32) * step)[:, None] * shift[None, :]
        total += term
    where = row[:, None] * outputs + output[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=row_in & output_in[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, min_rows: int = 1, max_rows: int | None = None) -> torch.Tensor:
    """Return `x · weightᵀ` `[rows, out]`; tiles have one shape for any number of rows, whatever the bounds.

    Raises:
        ValueError: types differ, or a last axis is strided.
    """
    check(x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}")
    check(has_rows(x) and has_rows(weight) and x.shape[1] == weight.shape[1], "x is [rows, in], weight [out, in]")
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows:
        _linear[(triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows, _ROWS))](
            x, weight, out, rows, outputs, inputs, x.stride(0), weight.stride(0),
            _ROWS, _OUTPUTS, _INPUTS, product_type(x.dtype), **OPTIONS,
        )  # fmt: skip
    return out


def _check_grouped(x: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """Return an empty result for a product with a grouped weight.

    Raises:
        ValueError: the tensors of the weight do not fit x or one another.
    """
    outputs, inputs = weight.shape
    check(x.shape[1] == inputs and has_rows(x), f"x is [rows, {inputs}] with contiguous rows")
    check(weight.q.shape == (outputs, inputs // 2 if weight.packed else inputs), "q has the shape of the weight")
    check(weight.q.is_contiguous() and weight.scale.is_contiguous(), "q and scale are contiguous")
    check(weight.offset is None or weight.offset.stride() == weight.scale.stride(), "offset lies as scale does")
    return torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)


def linear_grouped(x: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """Return `x · weightᵀ` `[rows, out]` in the type of x, with the weight's integers used as they are.

    Raises:
        ValueError: shapes, types or strides do not fit.
    """
    out = _check_grouped(x, weight)
    rows, outputs = out.shape
    if rows:
        offset = weight.scale if weight.offset is None else weight.offset
        _grouped[(triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows, _ROWS))](
            x, weight.q, weight.scale, offset, out, rows, outputs, weight.shape[1] // GROUP, x.stride(0),
            weight.packed, weight.offset is not None, _ROWS, _OUTPUTS, product_type(x.dtype), **OPTIONS,
        )  # fmt: skip
    return out


def linear_grouped_int(x: torch.Tensor, weight: GroupedWeight, bits: int = 16) -> torch.Tensor:
    """Return `x · weightᵀ` `[rows, out]` with x rounded to integers of 8 or 16 bits per group of 32.

    Raises:
        ValueError: another number of bits, or shapes, types or strides that do not fit.
    """
    check(bits in LIMITS, f"x is rounded to 8 or 16 bits, not {bits}")
    out = _check_grouped(x, weight)
    rows, outputs = out.shape
    if rows:
        offset = weight.scale if weight.offset is None else weight.offset
        _grouped_int[(triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows, _ROWS))](
            x, weight.q, weight.scale, offset, out, rows, outputs, weight.shape[1] // GROUP, x.stride(0),
            float(LIMITS[bits]), weight.packed, weight.offset is not None, bits == 16, _ROWS, _OUTPUTS, **OPTIONS,
        )  # fmt: skip
    return out
