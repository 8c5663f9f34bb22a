"""The gate, elementwise over tiles of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import OPTIONS, check, has_rows

_WIDTH = 1024


@triton.jit
def _silu_mul(x, out, x_stride, ffn, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < ffn
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + ffn + column, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    # exp of a large argument is infinite and the quotient then 0, as it should be; the bound only keeps it finite.
    silu = gate / (1.0 + tl.exp(tl.minimum(-gate, 88.0)))
    tl.store(out + row * ffn + column, (silu.to(kind).to(tl.float32) * up).to(kind), mask=inside)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) · up` `[rows, ffn]` for x `[rows, 2 · ffn]`; the last axis of x is contiguous.

    Raises:
        ValueError: the last axis is strided or odd.
    """
    rows, both = x.shape
    check(both % 2 == 0 and has_rows(x), "x holds gate and up side by side in contiguous rows")
    ffn = both // 2
    out = torch.empty(rows, ffn, dtype=x.dtype, device=x.device)
    if rows:
        width = min(_WIDTH, triton.next_power_of_2(ffn))
        _silu_mul[(rows, triton.cdiv(ffn, width))](x, out, x.stride(0), ffn, width, **OPTIONS)
    return out
