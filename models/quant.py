"""Quantized tensors: raw bytes to values, or to integers with scales. Numpy only, never torch.

Every quantized kind is an affine code: value = scale · (q − zero) + offset, with one scale (and offset) per group of
consecutive elements of a row. Formats, as in ggml's `ggml-common.h` and `ggml-quants.c` (d, m, dmin: float16):

- Q4_0, Q4_1: 32 elements; byte i of 16 holds element i in its low and element i + 16 in its high nibble.
  Q4_0: d·(q − 8). Q4_1: d·q + m.
- Q8_0: 32 elements, int8: d·q.
- Q4_K, Q5_K: 256 elements, 8 groups of 32 with 6-bit scales and minimums in 12 bytes: d·sc·q − dmin·m. Q5_K has its
  fifth bits apart: bit g of byte i of 32 belongs to element i of group g.
- Q6_K: 256 elements, 16 groups of 16 with int8 scales: d·sc·(q − 32).

The arithmetic is float32 in the order of ggml's, so that values equal the reference bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from models.errors import ModelFileError
from models.gguf import TENSOR_TYPES
from models.tensors import FLOAT_KINDS as FLOAT_KINDS  # one of the names of this module, too
from models.tensors import TensorData

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Elements and bytes of one block, by kind.
KINDS: dict[str, tuple[int, int]] = {kind: (per_block, nbytes) for kind, per_block, nbytes in TENSOR_TYPES.values()}

_ZERO = {"Q4_0": 8, "Q4_1": 0, "Q8_0": 128, "Q4_K": 0, "Q5_K": 0, "Q6_K": 32}
_SCALE_BYTES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# Blocks are unpacked in slices of about this many elements: temporaries stay in the caches, and small.
_SLICE = 1 << 18


class Tensors(Protocol):
    """The part of a `ModelSource` that is read here."""

    @property
    def path(self) -> Path: ...
    def tensor(self, name: str) -> TensorData: ...


@dataclass(frozen=True, slots=True)
class Affine:
    """A quantized matrix: value = scale · (q − zero) + offset, exactly as the file's format defines it."""

    q: Bytes  # [out, in]
    scale: Floats  # [out, in / group]
    offset: Floats | None  # [out, in / group]; None where the kind has none
    zero: int
    group: int  # consecutive elements of a row that share a scale

    def values(self) -> Floats:
        """Return the values, float32 `[out, in]`, bit for bit those of `dequantize`."""
        rows, width = self.q.shape
        q = self.q.reshape(rows, width // self.group, self.group).astype(np.float32)
        return _combine(q, self.scale, self.offset, self.zero).reshape(rows, width)


def dequantize(kind: str, raw: Bytes, num_elements: int) -> Floats:
    """Return the values of a tensor's raw bytes.

    Args:
        kind: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K or Q6_K.
        raw: uint8 `[nbytes]`.
        num_elements: how many values the bytes hold.

    Returns:
        float32 `[num_elements]`, a copy.

    Raises:
        ValueError: an unknown kind, or bytes that do not hold that many values.
    """
    _check(kind, raw, num_elements)
    match kind:
        case "F32":
            return _view(raw, "<f4").astype(np.float32)
        case "F16":
            return _view(raw, "<f2").astype(np.float32)
        case "BF16":
            return (_view(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    per_block, nbytes = KINDS[kind]
    blocks = raw.reshape(-1, nbytes)
    out = np.empty((len(blocks), per_block), np.float32)
    step = max(1, _SLICE // per_block)
    for at in range(0, len(blocks), step):
        q, scale, offset = _unpack(kind, blocks[at : at + step])
        grouped = q.reshape(*scale.shape, -1).astype(np.float32)
        out[at : at + step] = _combine(grouped, scale, offset, _ZERO[kind]).reshape(len(q), per_block)
    return out.reshape(-1)


def affine(kind: str, raw: Bytes, shape: tuple[int, ...]) -> Affine | None:
    """Return a quantized matrix as integers with scales, or None where `kind` is a float type.

    Args:
        kind: as for `dequantize`.
        raw: uint8 `[nbytes]`.
        shape: (out, in).

    Raises:
        ValueError: an unknown kind, or bytes that do not fit the shape.
    """
    _check(kind, raw, math.prod(shape))
    if kind in FLOAT_KINDS:
        return None
    per_block, nbytes = KINDS[kind]
    rows, width = shape
    if width % per_block:
        raise ValueError(f"rows of {width} elements are no whole blocks of {per_block} ({kind})")
    blocks = raw.reshape(-1, nbytes)
    q = np.empty((len(blocks), per_block), np.uint8)
    group = 16 if kind == "Q6_K" else 32
    scale = np.empty((len(blocks), per_block // group), np.float32)
    with_offset = kind in ("Q4_1", "Q4_K", "Q5_K")
    offset = np.empty_like(scale) if with_offset else None
    step = max(1, _SLICE // per_block)
    for at in range(0, len(blocks), step):
        part = slice(at, at + step)
        q[part], scale[part], some = _unpack(kind, blocks[part])
        if offset is not None and some is not None:
            offset[part] = some
    return Affine(
        q=q.reshape(rows, width),
        scale=scale.reshape(rows, width // group),
        offset=None if offset is None else offset.reshape(rows, width // group),
        zero=_ZERO[kind],
        group=group,
    )


def all_finite(kind: str, raw: Bytes) -> bool:
    """Whether no value is NaN or infinite; for quantized kinds the block scales alone decide, which is cheap.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    if kind in FLOAT_KINDS:
        code, exponent = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}[kind]
        bits = _view(raw, code)
        return not any(
            bool(((bits[at : at + _SLICE] & exponent) == exponent).any()) for at in range(0, bits.size, _SLICE)
        )
    blocks = raw.reshape(-1, KINDS[kind][1])
    return all(bool(((blocks[:, at + 1] & 0x7C) != 0x7C).all()) for at in _SCALE_BYTES[kind])


def checked(source: Tensors, name: str) -> tuple[str, Bytes, tuple[int, ...]]:
    """Return a tensor's kind, its raw bytes as uint8 `[nbytes]` (a view of the file), and its shape.

    Raises:
        ModelFileError: a value (or the scale of a block) is NaN or infinite.
        KeyError: the source has no such tensor.
    """
    kind, view, shape = source.tensor(name)
    raw = np.frombuffer(view, np.uint8)
    if not all_finite(kind, raw):
        raise ModelFileError(source.path, f"corrupt: tensor {name!r} holds values that are no finite numbers")
    return kind, raw, shape


def _check(kind: str, raw: Bytes, num_elements: int) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    per_block, nbytes = KINDS[kind]
    if raw.dtype != np.uint8 or num_elements % per_block or raw.size != num_elements // per_block * nbytes:
        raise ValueError(f"{raw.size} bytes do not hold {num_elements} elements of kind {kind}")


def _view(raw: Bytes, code: str) -> npt.NDArray[Any]:
    """Read bytes as another type, also where they do not lie aligned in memory."""
    return np.frombuffer(np.ascontiguousarray(raw), dtype=np.dtype(code))


def _combine(q: Floats, scale: Floats, offset: Floats | None, zero: int) -> Floats:
    """Return scale · (q − zero) + offset for q `[…, groups, group]` (changed in place), scale and offset `[…, groups]`.

    All in float32: small integers are exact, so q − zero rounds nothing.
    """
    if zero:
        q -= np.float32(zero)
    q *= scale[..., None]
    if offset is not None:
        q += offset[..., None]
    return q


def _unpack(kind: str, blocks: Bytes) -> tuple[Bytes, Floats, Floats | None]:
    """Unpack blocks `[n, nbytes]` to q `[n, per_block]`, scale `[n, groups]` and offset `[n, groups]` (or None)."""
    match kind:
        case "Q4_0":
            return _nibbles(blocks[:, 2:], 16), _half(blocks, 0), None
        case "Q4_1":
            return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)
        case "Q8_0":
            return blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), None  # int8 + 128 as uint8
        case "Q4_K":
            scale, offset = _k_scales(blocks)
            return _nibbles(blocks[:, 16:], 32), scale, offset
        case "Q5_K":
            scale, offset = _k_scales(blocks)
            bits = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
            fifth = (blocks[:, None, 16:48] >> bits) & np.uint8(1)  # [n, 8, 32]
            q = _nibbles(blocks[:, 48:], 32)
            q |= (fifth << np.uint8(4)).reshape(q.shape)
            return q, scale, offset
        case "Q6_K":
            low = _nibbles(blocks[:, :128], 64)
            shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
            high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)  # [n, 2, 4, 32]
            low |= (high << np.uint8(4)).reshape(low.shape)
            return low, _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32), None
    raise AssertionError(f"no way to unpack {kind} is written")


def _half(blocks: Bytes, at: int) -> Floats:
    """Read the float16 at byte `at` of every block; float32 `[n, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Unpack `[n, bytes]` to `[n, 2 · bytes]`: of each `run` bytes first the low nibbles, then the high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return (np.concatenate((runs & np.uint8(15), runs >> np.uint8(4)), axis=2)).reshape(len(packed), -1)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return scales d·sc and offsets −dmin·m, float32 `[n, 8]`, of Q4_K or Q5_K blocks.

    12 bytes hold 8 scales and 8 minimums of 6 bits: bytes 0 to 3 (scales) and 4 to 7 (minimums) those of groups 0 to 3
    in their low 6 bits and, in their high 2, the high bits of groups 4 to 7, whose low 4 bits are in bytes 8 to 11.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    sc = np.concatenate((first & 63, (third & 15) | ((first >> 2) & 48)), axis=1).astype(np.float32)
    m = np.concatenate((second & 63, (third >> 4) | ((second >> 2) & 48)), axis=1).astype(np.float32)
    return _half(blocks, 0) * sc, -(_half(blocks, 2) * m)
