"""The compiled ops behind functions of numpy arrays, and a second build of them without vector instructions."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels import native
from kernels.native.build import FLAGS, KERNELS, SOURCE, find_compiler
from models import packed

BLOCK_TOKENS = 16
Array = np.ndarray[Any, Any]


def need_native() -> None:
    """Skip a module where there is no compiler."""
    if not native.available():
        pytest.skip(native.why_not(), allow_module_level=True)


class _Packed(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in "outputs inputs kind group scale_bits has_offset zero".split()),
        ("coarse_below", ctypes.c_float),
    ]


@dataclass
class Weights:
    """A packed matrix, as the kernels see it."""

    data: Array
    matrix: packed.Matrix
    coarse_below: float = 0.0

    def packed(self) -> _Packed:
        """Return the structure; this object keeps its bytes alive."""
        m = self.matrix
        return _Packed(
            self.data.ctypes.data, m.outputs, m.inputs, m.kind, m.group, m.scale_bits, m.has_offset, m.zero,
            self.coarse_below,
        )  # fmt: skip


def pack(*parts: tuple[str, Array, tuple[int, int]], alternate: bool = False) -> Weights:
    """Pack matrices (kind, uint8 bytes, shape) one below the other, or tile by tile in turn."""
    read = [packed._matrix("x", kind, raw.reshape(-1), shape) for kind, raw, shape in parts]
    data, matrix = packed._tiles(read, alternate)
    # A copy whose end is the end of an allocation of its own size, so that a stray read is at least a likely crash.
    return Weights(np.frombuffer(data, np.uint8).copy(), matrix)


def _address(x: Array) -> ctypes.c_void_p:
    assert x.flags.c_contiguous
    return ctypes.c_void_p(x.ctypes.data)


class Ops:
    """The exported functions of one build. Outputs start as NaN, between canaries."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.hr_team_new.restype = ctypes.c_void_p

    @contextmanager
    def team(self, threads: int) -> Iterator[ctypes.c_void_p]:
        """Threads for `linear`."""
        made = ctypes.c_void_p(self.library.hr_team_new(threads, 100))
        try:
            yield made
        finally:
            self.library.hr_team_free(made)

    def linear(self, w: Weights, x: Array, threads: int = 1) -> Array:
        """Return `[rows, outputs]`, padded outputs included."""
        with self.team(threads) as team, guarded((len(x), w.matrix.outputs)) as out:
            self.library.hr_linear(team, ctypes.byref(w.packed()), _address(x), ctypes.c_int64(len(x)), _address(out))
        return out

    def weight_row(self, w: Weights, row: int) -> Array:
        """Return one row of the weights, `[inputs]`."""
        with guarded((w.matrix.inputs,)) as out:
            self.library.hr_weight_row(ctypes.byref(w.packed()), ctypes.c_int64(row), _address(out))
        return out

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Normalize `[rows, size]`."""
        rows, size = map(ctypes.c_int64, x.shape)
        with guarded(x.shape) as out:
            self.library.hr_rms_norm(_address(x), _address(weight), rows, size, ctypes.c_float(eps), _address(out))
        return out

    def rope(self, x: Array, cosines: Array, sines: Array, interleaved: bool) -> Array:
        """Turn `[rows, heads, dim]`."""
        rows, heads, dim = map(ctypes.c_int64, x.shape)
        with guarded(x.shape) as out:
            out[...] = x
            self.library.hr_rope(_address(out), _address(cosines), _address(sines), rows, heads, dim, int(interleaved))
        return out

    def silu_mul(self, gate: Array, up: Array) -> Array:
        """Return silu(gate) · up for `[size]`."""
        with guarded(gate.shape) as out:
            self.library.hr_silu_mul(_address(gate), _address(up), ctypes.c_int64(gate.size), _address(out))
        return out

    def kv_write(self, layer: Array, offset: int, keys: Array, values: Array) -> None:
        """Write `[kv_heads, dim]` of one token into a layer of a block, uint16 `[2 · 16 · kv_heads · dim]`."""
        kv_heads, dim = map(ctypes.c_int64, keys.shape)
        self.library.hr_kv_write(
            _address(layer), kv_heads, dim, ctypes.c_int64(offset), _address(keys), _address(values)
        )

    def attention(self, pool: Array, blocks: Array, kv_heads: int, head: int, positions: Array, q: Array) -> Array:
        """Attend with rows `[count, dim]` of one KV head over a pool of one layer."""
        with guarded(q.shape) as out:
            self.library.hr_attention(
                _address(pool), _address(blocks), ctypes.c_int64(kv_heads), ctypes.c_int64(q.shape[1]),
                ctypes.c_int64(head), len(q), _address(positions), _address(q), _address(out),
            )  # fmt: skip
        return out


@contextmanager
def guarded(shape: tuple[int, ...]) -> Iterator[Array]:
    """An output of NaN; what stands before and after it must stay as it is."""
    size = int(np.prod(shape))
    whole = np.full(size + 64, np.nan, np.float32)
    whole[:32], whole[-32:] = 7.5, -7.5
    yield whole[32:-32].reshape(shape)
    assert (whole[:32] == 7.5).all() and (whole[-32:] == -7.5).all(), "written outside of the output"


@functools.cache
def ops() -> Ops:
    """The build that serves."""
    return Ops(native.library())


def build_portable(directory: Path) -> ctypes.CDLL:
    """Compile the same source for the oldest machine of this architecture, unoptimized: that takes seconds."""
    compiler = find_compiler()
    assert compiler is not None
    flags = [flag for flag in FLAGS if flag not in ("-march=native", "-O3")]
    made = directory / "portable.so"
    command = [*compiler, *flags, "-O0", "-I", str(KERNELS.parent), "-o", str(made), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(made))


def bits(x: Array) -> Array:
    """Return float32 as its bits, so that NaN and signs of zero are compared too."""
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def to_bf16(x: Array) -> Array:
    """Round float32 to bfloat16, ties to even; returns float32."""
    raw = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((raw + np.uint32(0x7FFF) + (raw >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
