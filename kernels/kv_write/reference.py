"""Scatter in plain torch."""

from __future__ import annotations

import torch


def kv_write(lines: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
    """Write kv `[tokens, 2, width]` into lines `[num_lines, width]` at slots `[tokens, 2]`."""
    lines.index_copy_(0, slots.flatten(), kv.flatten(0, 1))
