"""Scatter, one program per line."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import OPTIONS, check


@triton.jit
def _kv_write(lines, slots, kv, width, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    line = tl.load(slots + at).to(tl.int64)
    tl.store(lines + line * width + column, tl.load(kv + at * width + column, mask=inside), mask=inside)


def kv_write(lines: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
    """Write kv `[tokens, 2, width]` into lines `[num_lines, width]` at slots `[tokens, 2]`; all contiguous.

    Raises:
        ValueError: types differ, or a tensor is strided.
    """
    check(lines.dtype == kv.dtype, f"the pool holds {lines.dtype}, not {kv.dtype}")
    check(lines.is_contiguous() and slots.is_contiguous() and kv.is_contiguous(), "lines, slots and kv are contiguous")
    check(kv.shape == (*slots.shape, lines.shape[1]), "kv is [tokens, 2, width] and slots [tokens, 2]")
    width = lines.shape[1]
    if slots.numel():
        _kv_write[(slots.numel(),)](lines, slots, kv, width, triton.next_power_of_2(width), **OPTIONS)
