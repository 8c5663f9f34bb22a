"""What all Triton launches share: how to multiply, and options that keep a row's bits."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

# One layout per kernel for every shape, and no fusing of a product with a sum that one kernel may do and another not:
# the order and the rounding of every sum are then those that the source states.
OPTIONS: Final[dict[str, Any]] = {"num_warps": 4, "enable_fp_fusion": False}

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def interpreted() -> bool:
    """Tell whether kernels run in Triton's interpreter, on numpy arrays, instead of on a GPU."""
    return bool(triton.knobs.runtime.interpret)


def product_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type of the operands of `tl.dot` for tensors of `dtype`; sums are float32 in any case.

    The interpreter of Triton 3.9 multiplies the bit patterns of bfloat16 as integers. The products of two bfloat16
    numbers are exact in float32, so the operands are widened there; on a GPU they stay, for its matrix units.

    Raises:
        ValueError: a type without a matrix product.
    """
    if dtype not in _TYPES:
        raise ValueError(f"no matrix product is written for {dtype}")
    return tl.float32 if interpreted() else _TYPES[dtype]


def has_rows(x: torch.Tensor) -> bool:
    """Tell whether the elements of the last axis lie side by side."""
    return x.stride(-1) == 1 or x.shape[-1] == 1 or x.numel() == 0


def check(condition: bool, message: str) -> None:
    """Refuse what a kernel would read or write wrongly.

    Raises:
        ValueError: the condition does not hold.
    """
    if not condition:
        raise ValueError(message)
