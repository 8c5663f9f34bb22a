"""Matrix products in plain torch."""

from __future__ import annotations

import torch

from kernels.linear import GROUP, LIMITS, GroupedWeight

linear_op = torch.nn.functional.linear


def linear(x: torch.Tensor, weight: torch.Tensor, min_rows: int = 1, max_rows: int | None = None) -> torch.Tensor:
    """Return `x · weightᵀ` for x `[rows, in]`.

    Fewer than `min_rows` rows are padded for the product, more than `max_rows` are cut into several.
    """
    rows = x.shape[0]
    if max_rows is not None and rows > max_rows:
        parts = (x[at : at + max_rows] for at in range(0, rows, max_rows))
        return torch.cat([linear(part, weight, min_rows) for part in parts])
    if rows >= min_rows:
        return linear_op(x, weight)
    padded = x.new_zeros(min_rows, x.shape[1])
    padded[:rows] = x
    return linear_op(padded, weight)[:rows]


def integers(weight: GroupedWeight) -> torch.Tensor:
    """Return the integers of a weight as int32 `[out, groups, 32]`."""
    if not weight.packed:
        return weight.q.view(weight.shape[0], -1, GROUP).int()
    packed = weight.q.view(weight.shape[0], -1, GROUP // 2)
    return torch.cat((packed & 15, packed >> 4), dim=2).int()


def dequantize(weight: GroupedWeight) -> torch.Tensor:
    """Return the values of a weight as float32 `[out, in]`."""
    values = integers(weight) * weight.scale.float().unsqueeze(2)
    if weight.offset is not None:
        values = values + weight.offset.float().unsqueeze(2)
    return values.flatten(1)


def linear_grouped(x: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """Return `x · weightᵀ` `[rows, out]` in the type of x, computed row by row in float32."""
    values = dequantize(weight)
    # One product of a matrix with a vector per row: the same call, and so the same bits, in every batch.
    rows = [values.mv(row) for row in x.float()]
    return torch.stack(rows).to(x.dtype) if rows else x.new_empty(0, weight.shape[0])


def quantize_rows(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round every group of 32 values of x `[rows, in]` to multiples of its largest magnitude / LIMITS[bits].

    Returns:
        q int32 `[rows, groups, 32]` and scale float32 `[rows, groups]`; halves go to the even neighbour.
    """
    groups = x.float().view(len(x), x.shape[1] // GROUP, GROUP)
    most = groups.abs().amax(2)
    # A tensor, because torch divides a plain number by multiplying with the reciprocal, which rounds twice.
    limit = torch.full_like(most, LIMITS[bits])
    inverse = torch.where(most > 0, limit / most, 0.0)
    return (groups * inverse.unsqueeze(2)).round().int(), most / limit


def linear_grouped_int(x: torch.Tensor, weight: GroupedWeight, bits: int = 16) -> torch.Tensor:
    """Return `x · weightᵀ` `[rows, out]` in the type of x, with x rounded to integers of `bits` bits per group."""
    q, scale = quantize_rows(x, bits)
    # float64 holds these sums of integers (below 2^31) exactly.
    sums = torch.einsum("rgi,ogi->rog", q.double(), integers(weight).double()).float()
    terms = sums * (scale.unsqueeze(1) * weight.scale.float())  # [rows, out, groups]
    if weight.offset is not None:
        terms = terms + (q.sum(2).float() * scale).unsqueeze(1) * weight.offset.float()
    total = torch.zeros(len(x), weight.shape[0])
    for group in range(terms.shape[2]):  # in order, so that the sum has one meaning
        total += terms[:, :, group]
    return total.to(x.dtype)
