"""Matrix product in plain torch."""

from __future__ import annotations

import torch

linear_op = torch.nn.functional.linear


def linear(x: torch.Tensor, weight: torch.Tensor, min_rows: int = 1) -> torch.Tensor:
    """Return `x · weightᵀ` for x `[rows, in]`; fewer than `min_rows` rows are padded for the product."""
    rows = x.shape[0]
    if rows >= min_rows:
        return linear_op(x, weight)
    padded = x.new_zeros(min_rows, x.shape[1])
    padded[:rows] = x
    return linear_op(padded, weight)[:rows]
