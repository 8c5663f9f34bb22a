"""RMS normalization, one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import OPTIONS, check, has_rows


@triton.jit
def _rms_norm(x, weight, add, out, x_stride, add_stride, hidden, eps, HAS_ADD: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < hidden
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if HAS_ADD:
        value += tl.load(add + row * add_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * x_stride + column, value, mask=inside)
    mean = tl.sum(value * value, 0) / hidden
    scale = 1.0 / tl.sqrt_rn(mean + eps)
    w = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * hidden + column, (value * scale * w).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, add: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalize rows as `kernels.rms_norm` says. The last axis of x and of `add` is contiguous.

    Raises:
        ValueError: x or weight is not float32, or a last axis is strided.
    """
    rows, hidden = x.shape
    check(x.dtype == weight.dtype == torch.float32, f"x and weight are float32, not {x.dtype} and {weight.dtype}")
    check(has_rows(x) and (add is None or has_rows(add)), "the last axis of x and add is contiguous")
    check(add is None or add.shape == x.shape, "add has the shape of x")
    out = torch.empty(rows, hidden, dtype=dtype, device=x.device)
    if rows:
        width = triton.next_power_of_2(hidden)
        other = x if add is None else add
        _rms_norm[(rows,)](
            x, weight, other, out, x.stride(0), other.stride(0), hidden, eps, add is not None, width, **OPTIONS
        )
    return out
