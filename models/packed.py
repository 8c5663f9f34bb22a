"""Weights in the shape that the native kernels read, packed once per model file and mapped by every engine.

The packed file lies in the cache directory. Its name holds the model's fingerprint and the version of the layout; its
head says so too, and holds a checksum of the rest, so that a damaged file is packed again and never read. All engines
of a host map the same pages. A cache that cannot be written costs memory, not service: the packed bytes then stay in
the process.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from models.config import ModelConfig
from models.errors import ModelFileError
from models.quant import FLOAT_KINDS, Affine, affine, dequantize

VERSION = 1  # of the layout of tiles; see kernels/linear/native.hpp
LANES = 16
_MAGIC = b"HEADRACE"
_ALIGN = 64
_HEAD = 24  # magic, checksum of all that follows, length of the description
_FLOAT_CODES = {"BF16": 16, "F16": 17, "F32": 32}

Bytes = npt.NDArray[np.uint8]
# name → (kind, raw bytes, shape); shapes are [out, in] or [size]
Tensors = Callable[[str], tuple[str, Bytes, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Matrix:
    """How a packed matrix is to be read; fields as `Packed` in kernels/linear/native.hpp."""

    outputs: int
    inputs: int
    kind: int  # 4 or 8 bits, 16 bfloat16, 17 float16, 32 float32
    group: int
    scale_bits: int
    has_offset: int
    zero: int


class PackedWeights:
    """Packed matrices and vectors by name, in one buffer."""

    def __init__(self, data: memoryview, entries: Mapping[str, Any]) -> None:
        self._data = np.frombuffer(data, dtype=np.uint8)
        self._entries = entries
        self.nbytes = len(data)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def address(self, name: str) -> int:
        """Return where the bytes of a matrix or vector begin."""
        return int(self._data.ctypes.data) + int(self._entries[name]["at"])

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """Return a vector."""
        entry = self._entries[name]
        return self._data[entry["at"] : entry["at"] + entry["nbytes"]].view("<f4")

    def matrix(self, name: str) -> Matrix:
        """Return the description of a packed matrix."""
        return Matrix(**self._entries[name]["matrix"])


class Unpackable(ValueError):
    """Raised when the native kernels cannot hold a model; the message says which size does not fit."""


def check_sizes(config: ModelConfig) -> None:
    """Compare a model's sizes with what the native kernels can hold.

    Raises:
        Unpackable: one does not fit.
    """
    sizes = {"hidden": config.hidden, "feed-forward": config.ffn, "attention": config.num_heads * config.head_dim}
    for name, size in sizes.items():
        if size % 32:
            raise Unpackable(f"the {name} width {size} is not a multiple of 32")
    if config.head_dim % 16 or config.head_dim > 256:
        raise Unpackable(f"heads of {config.head_dim} elements: a multiple of 16 up to 256 is needed")
    if config.num_layers > 256:
        raise Unpackable(f"{config.num_layers} layers: at most 256 fit")


def load(config: ModelConfig, tensors: Tensors, fingerprint: str, directory: Path | None) -> PackedWeights:
    """Map the packed weights of a model, packing them first if that has not been done.

    Args:
        config: sizes and flags.
        tensors: reads a tensor of the model file.
        fingerprint: names the model file's content.
        directory: the cache; None keeps the packed bytes in this process.

    Raises:
        ModelFileError: a tensor is not what the configuration says, or its scales are not numbers.
        Unpackable: the native kernels cannot hold this model.
    """
    check_sizes(config)
    if directory is not None:
        identity = f"{fingerprint}-{VERSION}"
        path = directory / "packed" / f"{identity}.hrw"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # engines start together; one packs, the others wait for its file
                return _read(path, identity) or _write(path, identity, *_pack(config, tensors))
        except OSError:
            pass  # read-only or full: go on without a file
    entries, parts = _pack(config, tensors)
    return PackedWeights(memoryview(b"".join(parts)), entries)


def _read(path: Path, identity: str) -> PackedWeights | None:
    """Map a packed file; None if there is none, it is not whole, or it is another model's under this name."""
    try:
        with path.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (FileNotFoundError, ValueError):
        return None
    checksum, size = (int.from_bytes(view[at : at + 8], "little") for at in (8, 16))
    if bytes(view[:8]) != _MAGIC or xxhash.xxh3_64_intdigest(view[16:]) != checksum:
        return None
    head = json.loads(bytes(view[_HEAD : _HEAD + size]))
    return PackedWeights(view[_aligned(_HEAD + size) :], head["entries"]) if head["identity"] == identity else None


def _write(path: Path, identity: str, entries: dict[str, Any], parts: list[bytes]) -> PackedWeights:
    head = json.dumps({"identity": identity, "entries": entries}, sort_keys=True).encode()
    padding = b"\0" * (_aligned(_HEAD + len(head)) - _HEAD - len(head))
    parts = [len(head).to_bytes(8, "little") + head + padding, *parts]
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + digest.intdigest().to_bytes(8, "little"))
            for part in parts:
                file.write(part)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        return PackedWeights(memoryview(b"".join(parts[1:])), entries)
    packed = _read(path, identity)
    assert packed is not None, "what was just written reads back"
    return packed


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


# --- packing ---------------------------------------------------------------------------------------


def _pack(config: ModelConfig, tensors: Tensors) -> tuple[dict[str, Any], list[bytes]]:
    entries: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0

    def put(name: str, data: bytes, matrix: Matrix | None = None) -> None:
        nonlocal at
        entries[name] = {"at": at, "nbytes": len(data), **({"matrix": asdict(matrix)} if matrix else {})}
        padded = data + b"\0" * (_aligned(len(data)) - len(data))
        parts.append(padded)
        at += len(padded)

    def vector(name: str, *sources: str) -> None:
        values = [_vector(*tensors(source)) for source in sources]
        put(name, np.concatenate(values).astype("<f4").tobytes())

    def matrix(name: str, *sources: str, alternate: bool = False) -> None:
        read = [_matrix(source, *tensors(source)) for source in sources]
        put(name, *_tiles(read, alternate))

    matrix("embedding", "token_embd.weight")
    if not config.tied_embeddings:
        matrix("head", "output.weight")
    vector("norm", "output_norm.weight")
    if config.rope_factors:
        vector("rope_factors", "rope_freqs.weight")
    for i in range(config.num_layers):
        blk = f"blk.{i}."
        qkv = [f"{blk}attn_{part}" for part in "qkv"]
        vector(f"{i}.attn_norm", blk + "attn_norm.weight")
        vector(f"{i}.ffn_norm", blk + "ffn_norm.weight")
        if config.qkv_bias:
            vector(f"{i}.qkv_bias", *(f"{name}.bias" for name in qkv))
        if config.qk_norm:
            vector(f"{i}.q_norm", blk + "attn_q_norm.weight")
            vector(f"{i}.k_norm", blk + "attn_k_norm.weight")
        matrix(f"{i}.qkv", *(f"{name}.weight" for name in qkv))
        matrix(f"{i}.out", blk + "attn_output.weight")
        matrix(f"{i}.gate_up", blk + "ffn_gate.weight", blk + "ffn_up.weight", alternate=True)
        matrix(f"{i}.down", blk + "ffn_down.weight")
    return entries, parts


def _vector(kind: str, raw: Bytes, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return dequantize(kind, raw, int(np.prod(shape)))


@dataclass(frozen=True, slots=True)
class _Read:
    """A matrix out of the file: integers with scales, or floats."""

    kind: str
    integers: Affine | None
    floats: npt.NDArray[Any] | None  # [out, in], uint16 bits or float32


def _matrix(name: str, kind: str, raw: Bytes, shape: tuple[int, ...]) -> _Read:
    rows, width = shape
    if kind in FLOAT_KINDS:
        dtype = "<f4" if kind == "F32" else "<u2"
        return _Read(kind, None, raw.view(dtype).reshape(rows, width))
    integers = affine(kind, raw, (rows, width))
    assert integers is not None
    scales = [integers.scale, *([] if integers.offset is None else [integers.offset])]
    if not all(np.isfinite(part).all() for part in scales):
        raise ModelFileError(name, f"corrupt: a scale of this {kind} tensor is not a number")
    return _Read(kind, integers, None)


def _tiles(read: list[_Read], alternate: bool) -> tuple[bytes, Matrix]:
    """Put matrices one below the other (or tile by tile in turn) and pack them."""
    kinds = {part.kind for part in read}
    if kinds <= FLOAT_KINDS:
        kind = kinds.pop() if len(kinds) == 1 else "F32"
        floats = [part.floats if part.kind == kind else _as_floats(part) for part in read]
        return _float_tiles(_join([f for f in floats if f is not None], alternate), kind)
    if kinds & FLOAT_KINDS:
        return _float_tiles(_join([_as_floats(part) for part in read], alternate), "F32")
    integers = [part.integers for part in read if part.integers is not None]
    if len(kinds) > 1:
        integers = _alike(integers)
    first = integers[0]
    offset = None if first.offset is None else _join([_offset(part) for part in integers], alternate)
    joined = Affine(
        _join([part.q for part in integers], alternate, fill=first.zero),
        _join([part.scale for part in integers], alternate),
        offset,
        first.zero,
        first.group,
    )
    return _integer_tiles(joined, bits=4 if kinds <= {"Q4_0", "Q4_1", "Q4_K"} else 8, half=kinds <= {"Q4_0", "Q4_1"})


def _as_floats(part: _Read) -> npt.NDArray[Any]:
    if part.integers is not None:
        return part.integers.values()
    assert part.floats is not None
    if part.kind == "F32":
        return part.floats
    raw = np.ascontiguousarray(part.floats).view(np.uint8).reshape(-1)
    return dequantize(part.kind, raw, part.floats.size).reshape(part.floats.shape)


def _offset(part: Affine) -> npt.NDArray[np.float32]:
    assert part.offset is not None
    return part.offset


def _alike(parts: list[Affine]) -> list[Affine]:
    """Give matrices of different kinds one form: the smallest group, offsets in place of a zero point."""
    group = min(part.group for part in parts)
    out = []
    for part in parts:
        times = part.group // group
        shift = (-part.zero * part.scale).astype(np.float32)  # exact: zero points are powers of two
        offset = shift if part.offset is None else part.offset
        repeated = (np.repeat(part.scale, times, axis=1), np.repeat(offset, times, axis=1))
        out.append(Affine(part.q, *repeated, 0, group))
    return out


def _join(parts: list[npt.NDArray[Any]], alternate: bool, fill: int = 0) -> npt.NDArray[Any]:
    """Stack `[rows, …]` arrays, rows padded to whole tiles."""
    if not alternate:
        whole = np.concatenate(parts)
        return _padded(whole, fill)
    turns = [_padded(part, fill).reshape(-1, LANES, part.shape[1]) for part in parts]
    return np.stack(turns, axis=1).reshape(-1, parts[0].shape[1])


def _padded(rows: npt.NDArray[Any], fill: int) -> npt.NDArray[Any]:
    missing = -len(rows) % LANES
    return rows if not missing else np.pad(rows, ((0, missing), (0, 0)), constant_values=fill)


def _integer_tiles(weights: Affine, bits: int, half: bool) -> tuple[bytes, Matrix]:
    rows, width = weights.q.shape
    tiles, groups, steps = rows // LANES, width // weights.group, weights.group // 4
    # [tile, group, step, lane, 4]
    q = weights.q.reshape(tiles, LANES, groups, steps, 4).transpose(0, 2, 3, 1, 4)
    if bits == 4:
        q = q[:, :, : steps // 2] | q[:, :, steps // 2 :] << np.uint8(4)
    pieces: list[Bytes] = [np.ascontiguousarray(q).reshape(tiles, groups, -1)]
    for scales in (weights.scale, weights.offset):
        if scales is not None:
            lanes = scales.reshape(tiles, LANES, groups).transpose(0, 2, 1).astype("<f2" if half else "<f4")
            pieces.append(np.ascontiguousarray(lanes).view(np.uint8).reshape(tiles, groups, -1))
    has_offset = int(weights.offset is not None)
    described = Matrix(rows, width, bits, weights.group, 16 if half else 32, has_offset, weights.zero)
    return np.concatenate(pieces, axis=2).tobytes(), described


def _float_tiles(weights: npt.NDArray[Any], kind: str) -> tuple[bytes, Matrix]:
    rows, width = weights.shape
    lanes = weights.reshape(rows // LANES, LANES, width).transpose(0, 2, 1)
    return lanes.tobytes(), Matrix(rows, width, _FLOAT_CODES[kind], 32, 32, 0, 0)
