"""RMS normalization in plain torch."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, add: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalize rows of x `[rows, hidden]` (float32), to which `add` is added in place first.

    Returns:
        `[rows, hidden]` in `dtype`.
    """
    if add is not None:
        x += add
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)  # [rows, 1]
    return (x * scale * weight).to(dtype)
