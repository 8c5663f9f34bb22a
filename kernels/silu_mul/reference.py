"""Gate in plain torch."""

from __future__ import annotations

import torch


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) · up` for x `[rows, 2 · ffn]` that holds gate and up side by side."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
