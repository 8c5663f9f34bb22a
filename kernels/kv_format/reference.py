"""Rounding in plain torch."""

from __future__ import annotations

import torch

from kernels.kv_format import SMALLEST, group_of

LIMIT = {"int8": 127.0, "fp8": 448.0}
BELOW_TOP = {"int8": 6, "fp8": 8}


def round_groups(x: torch.Tensor, head_dim: int, form: str) -> torch.Tensor:
    """Return x `[…, n · head_dim]`, in its own type, with each group rounded; float32 and bfloat16 hold the results."""
    groups = x.float().reshape(-1, group_of(head_dim))
    most = groups.abs().amax(-1, keepdim=True)
    finite = torch.isfinite(most)
    top = torch.frexp(torch.where(finite, most, 1.0)).exponent - 1
    scale = torch.exp2((top - BELOW_TOP[form]).clamp(min=SMALLEST).float())
    y = (groups / scale).clamp(-LIMIT[form], LIMIT[form])
    if form == "int8":
        near = y.round()
    else:
        place = torch.exp2(((torch.frexp(y).exponent - 1).clamp(min=-6) - 3).float())
        near = (y / place).round() * place
    out = torch.where(finite, (near + 0.0) * scale, groups)  # -0 + 0 is +0
    return out.to(x.dtype).reshape(x.shape)
