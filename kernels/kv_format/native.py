"""Rounding and packing by the compiled kernels, on addresses; the calls let go of the interpreter's lock."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.kv_format import NUMBER, Shape, group_of
from kernels.native import library

Bytes = npt.NDArray[np.uint8]


class _Order(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "kv_heads", "dim")),
        ("tokens_apart", ctypes.c_int32),
    ]


def round_groups(x: npt.NDArray[np.float32], head_dim: int, form: str) -> npt.NDArray[np.float32]:
    """Return float32 `[…, n · head_dim]` with each group rounded."""
    out = np.array(x, dtype=np.float32, order="C")
    library().hr_kv_round(
        ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(out.size), ctypes.c_int64(group_of(head_dim)), NUMBER[form]
    )
    return out


def pack_into(shape: Shape, blocks: Bytes, packed: Bytes) -> None:
    """Pack a pool's blocks, one after another, into as many packed ones; both are flat and contiguous."""
    _call("hr_kv_pack", shape, blocks, packed, blocks.size // shape.block_nbytes)


def unpack_into(shape: Shape, packed: Bytes, blocks: Bytes) -> None:
    """Unpack into a pool's blocks; both are flat and contiguous."""
    _call("hr_kv_unpack", shape, packed, blocks, blocks.size // shape.block_nbytes)


def first_unequal(shape: Shape, blocks: Bytes, packed: Bytes) -> int | None:
    """Return the first block that its packed one does not give back bit by bit."""
    found = _call("hr_kv_first_unequal", shape, blocks, packed, blocks.size // shape.block_nbytes)
    return None if found < 0 else int(found)


def _call(name: str, shape: Shape, one: Bytes, other: Bytes, count: int) -> Any:
    order = _Order(shape.layers, shape.kv_heads, shape.head_dim, shape.order == "native-1")
    addresses = ctypes.c_void_p(one.ctypes.data), ctypes.c_void_p(other.ctypes.data)
    return _function(name)(ctypes.byref(order), NUMBER[shape.format], ctypes.c_int64(count), *addresses)


@functools.cache
def _function(name: str) -> Any:
    function = library()[name]  # an object of its own: its types are set for nobody else
    function.restype = ctypes.c_int64 if name == "hr_kv_first_unequal" else None
    return function
