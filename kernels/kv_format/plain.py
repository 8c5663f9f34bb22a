"""Rounding and packing in plain numpy: what the compiled ones must equal, and what stands in where there are none."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.kv_format import BLOCK_TOKENS, SMALLEST, Shape, group_of

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LIMIT = {"int8": 127.0, "fp8": 448.0}
BELOW_TOP = {"int8": 6, "fp8": 8}


def round_groups(x: Floats, head_dim: int, form: str, group: int = 0) -> Floats:
    """Return float32 `[…, n · head_dim]` with each group rounded; groups of another size than they have, if given."""
    groups = x.astype(np.float32).reshape(-1, group or group_of(head_dim))
    most = np.abs(groups).max(axis=-1, keepdims=True)
    finite = np.isfinite(most)
    scale = np.exp2(_exponents(np.where(finite, most, 1.0), form)).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(finite, _nearest(groups / scale, form) * scale, groups).astype(np.float32).reshape(x.shape)


def pack(shape: Shape, blocks: Bytes) -> Bytes:
    """Return packed blocks `[blocks, packed_nbytes]` of a pool's blocks `[blocks, block_nbytes]`."""
    order, owner = _places(shape)
    values = _floats(blocks.reshape(len(blocks), -1).view(np.uint16))
    with np.errstate(invalid="ignore", over="ignore"):
        grouped = np.abs(values[:, order])  # [blocks, groups, group]
        most = np.nan_to_num(grouped.max(axis=-1), nan=np.inf)
        exponents = _exponents(most, shape.format)
        codes = _codes(values / np.exp2(exponents.astype(np.float32))[:, owner], shape.format)
    return np.concatenate([(exponents + 127).astype(np.uint8), codes], axis=1)


def unpack(shape: Shape, packed: Bytes) -> Bytes:
    """Return a pool's blocks `[blocks, block_nbytes]` of packed ones `[blocks, packed_nbytes]`."""
    _, owner = _places(shape)
    exponents = packed[:, : shape.groups].astype(np.int32) - 127
    values = _table(shape.format)[packed[:, shape.groups :]] * np.exp2(exponents.astype(np.float32))[:, owner]
    bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32) >> 16
    return bits.astype(np.uint16).view(np.uint8)


def first_unequal(shape: Shape, blocks: Bytes, packed: Bytes) -> int | None:
    """Return the first block that its packed one does not give back bit by bit."""
    wrong = (unpack(shape, packed) != blocks).any(axis=1)
    return int(wrong.argmax()) if wrong.any() else None


@functools.lru_cache(maxsize=8)
def _places(shape: Shape) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where the elements of each group lie `[groups, group]`, and which group each element is of."""
    heads, dim, tokens, group = shape.kv_heads, shape.head_dim, BLOCK_TOKENS, group_of(shape.head_dim)
    parts = dim // group
    index = np.arange(shape.elements)
    if shape.order == "block":
        order = index.reshape(-1, group)
    else:
        layers = index.reshape(shape.layers, 2, -1)
        # Keys [heads, dim / 2, tokens, 2] to [heads, part, token, group]; values [heads, tokens / 2, dim, 2] to
        # [heads, pair of tokens, part, token of it, group]: as the chunks in native.hpp have their scales.
        keys = layers[:, 0].reshape(-1, heads, parts, group // 2, tokens, 2).transpose(0, 1, 2, 4, 3, 5)
        values = layers[:, 1].reshape(-1, heads, tokens // 2, parts, group, 2).transpose(0, 1, 2, 3, 5, 4)
        both = [part.reshape(shape.layers, -1, group) for part in (keys, values)]
        order = np.concatenate(both, axis=1).reshape(-1, group)
    owner = np.empty(shape.elements, dtype=np.int64)
    owner[order.reshape(-1)] = np.repeat(np.arange(len(order)), group)
    return order, owner


def _exponents(most: Floats, form: str) -> npt.NDArray[np.int32]:
    top = (most.astype(np.float32).view(np.uint32) >> 23).astype(np.int32) - 127
    return np.maximum(top - BELOW_TOP[form], SMALLEST)


def _nearest(y: Floats, form: str) -> Floats:
    y = np.clip(y, -LIMIT[form], LIMIT[form])
    if form == "int8":
        return np.asarray(np.rint(y) + np.float32(0), dtype=np.float32)
    place = np.exp2(np.maximum(np.frexp(y)[1] - 1, -6) - 3).astype(np.float32)
    return np.asarray(np.rint(y / place) * place + np.float32(0), dtype=np.float32)


def _codes(y: Floats, form: str) -> Bytes:
    if form == "int8":
        return np.asarray(np.nan_to_num(np.clip(y, -127, 127)).astype(np.int8).view(np.uint8))
    table = _table(form)[:127]
    codes = np.searchsorted(table, np.clip(np.nan_to_num(np.abs(y)), 0, LIMIT[form]), side="right") - 1
    return np.asarray(codes + np.where(np.signbit(y), 128, 0), dtype=np.uint8)


@functools.cache
def _table(form: str) -> Floats:
    """Return the number that each byte stands for."""
    codes = np.arange(256)
    if form == "int8":
        return codes.astype(np.uint8).view(np.int8).astype(np.float32)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * np.exp2(exponent - 7.0))
    return np.where(codes < 128, size, -size).astype(np.float32)


def _floats(bits: npt.NDArray[np.uint16]) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)
