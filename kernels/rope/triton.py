"""Rotary embedding, one program per token and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import OPTIONS, check, has_rows


@triton.jit
def _rope(
    x, turns, out, token_stride, head_stride, heads, half, HALVES: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, WIDTH)
    inside = pair < half
    # Pair i is (i, i + half) or (2i, 2i + 1).
    first = pair if HALVES else 2 * pair
    second = first + (half if HALVES else 1)
    row = x + token * token_stride + head * head_stride
    a = tl.load(row + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + second, mask=inside, other=0.0).to(tl.float32)
    turn = turns + token * 2 * half + 2 * pair
    cos, sin = tl.load(turn, mask=inside, other=0.0), tl.load(turn + 1, mask=inside, other=0.0)
    kind = out.dtype.element_ty
    to = out + (token * heads + head) * 2 * half
    tl.store(to + first, (a * cos - b * sin).to(kind), mask=inside)
    tl.store(to + second, (a * sin + b * cos).to(kind), mask=inside)


def rope(x: torch.Tensor, turns: torch.Tensor, pairing: str = "interleaved") -> torch.Tensor:
    """Turn the pairs of x `[tokens, heads, head_dim]` by `turns` `[tokens, 1, head_dim / 2]` (complex64).

    Raises:
        ValueError: an unknown pairing, or tensors that the kernel does not read.
    """
    check(pairing in ("interleaved", "halves"), f"pairing {pairing!r} is neither 'interleaved' nor 'halves'")
    tokens, heads, dim = x.shape
    check(dim % 2 == 0 and has_rows(x), "head_dim is even and contiguous")
    check(turns.shape == (tokens, 1, dim // 2) and turns.is_contiguous(), "one contiguous row of turns per token")
    out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
    if tokens:
        half = dim // 2
        _rope[(tokens, heads)](
            x, torch.view_as_real(turns), out, x.stride(0), x.stride(1), heads, half,
            pairing == "halves", triton.next_power_of_2(half), **OPTIONS,
        )  # fmt: skip
    return out
