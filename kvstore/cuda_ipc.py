"""Pools in the memory of a CUDA device, exported by IPC handles. Written against CuPy's runtime; not run on a GPU yet.

An IPC handle names a whole allocation: one made for a slice of an allocator's pool would map everything that lies
beside it. So a pool allocates its memory itself (`cudaMalloc`, not CuPy's memory pool), and what it exports is the base
of that allocation, where the blocks begin in it, and its generation. As with pools in shared memory, a page behind the
blocks says whose they are, and whoever opens a handle compares it: memory that was freed and given out again, or
belongs to another incarnation, is refused.

Importing this module touches neither CuPy nor a device.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.errors import PoolGone
from schemas.messages import PoolHandle

KIND = "cuda_ipc"
VERSION = "v1"
HANDLE_NBYTES = 64  # cudaIpcMemHandle_t
LABEL_NBYTES = 4096


class Runtime(Protocol):
    """The few calls of the CUDA runtime that are needed; addresses are integers, sizes bytes.

    Every method raises OSError if the device, or the driver, refuses.
    """

    def device(self) -> str:
        """Return what names the current device on this host: its PCI bus id."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Return the address of an allocation of its own."""
        ...

    def free(self, address: int) -> None:
        """Give an allocation back."""
        ...

    def export(self, base: int) -> bytes:
        """Return the IPC handle, 64 bytes, of an allocation."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here."""
        ...

    def close(self, base: int) -> None:
        """Unmap what `open` returned."""
        ...

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy from the device, and wait for it."""
        ...

    def write(self, address: int, data: bytes | memoryview) -> None:
        """Copy to the device, and wait for it."""
        ...

    def move(self, source: int, dest: int, nbytes: int) -> None:
        """Copy within or between devices, and wait for it."""
        ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where blocks lie on a device: the `path` of a handle of this kind.

    Args:
        device: PCI bus id.
        base: IPC handle of the whole allocation.
        base_nbytes: of the allocation.
        offset: of the first block in it.
        generation: counts the allocations of one owner.
    """

    device: str
    base: bytes
    base_nbytes: int
    offset: int
    generation: int

    def text(self) -> str:
        """Return it as one word."""
        return "/".join(
            (VERSION, self.device, str(self.base_nbytes), str(self.offset), str(self.generation), self.base.hex())
        )

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read what `text` wrote.

        Raises:
            ValueError: if it is anything else.
        """
        match text.split("/"):
            case [str(version), str(device), nbytes, offset, generation, base] if version == VERSION and device:
                numbers = [_count(word) for word in (nbytes, offset, generation)]
                handle = bytes.fromhex(base)
                if len(handle) == HANDLE_NBYTES and base == handle.hex():
                    return cls(device, handle, *numbers)
        raise ValueError(f"{text[:80]!r} is no address of memory on a device")


class CudaMemory:
    """Memory for blocks on the current device, owned by this process until `close`."""

    def __init__(
        self, nbytes: int, block_nbytes: int, layout: str, epoch: str, host: str, generation: int, runtime: Runtime
    ) -> None:
        """Allocate and label the memory.

        Raises:
            OSError: if the device has no room; nothing is left behind.
            ValueError: if sizes are not positive or do not fit.
        """
        if block_nbytes <= 0 or nbytes <= 0 or nbytes % block_nbytes:
            raise ValueError(f"{nbytes} bytes for blocks of {block_nbytes}")
        self._runtime = runtime
        self._base: int | None = runtime.allocate(nbytes + LABEL_NBYTES)
        try:
            runtime.write(self._base + nbytes, _label(epoch, layout, block_nbytes, generation))
            address = Address(runtime.device(), runtime.export(self._base), nbytes + LABEL_NBYTES, 0, generation)
        except BaseException:
            self.close()
            raise
        self._handle = PoolHandle(
            kind=KIND, path=address.text(), nbytes=nbytes, block_nbytes=block_nbytes, layout=layout, epoch=epoch,
            host=host,
        )  # fmt: skip

    def handle(self) -> PoolHandle:
        """Return what another process of this host needs to open the memory."""
        return self._handle

    @property
    def address(self) -> int:
        """Address of the first block, in this process."""
        assert self._base is not None, "closed"
        return self._base

    def close(self) -> None:
        """Take the label away and free the memory. Whoever still has it open must have been told before (R10)."""
        base, self._base = self._base, None
        if base is not None:
            self._runtime.free(base)


class AttachedCuda:
    """Another process's pool on a device."""

    def __init__(self, handle: PoolHandle, runtime: Runtime) -> None:
        """Open the allocation and compare its label.

        Raises:
            PoolGone: if it is not there, on another device, of other sizes, or of another incarnation or generation.
        """
        self.handle = handle
        self.layout = handle.layout
        self.block_nbytes = handle.block_nbytes
        self._runtime = runtime
        self._base: int | None = None
        try:
            self.where = where = Address.parse(handle.path)
            if handle.kind != KIND or where.offset + handle.nbytes + LABEL_NBYTES > where.base_nbytes:
                raise ValueError(f"{handle.nbytes} bytes at {where.offset} of {where.base_nbytes}")
            self._base = runtime.open(where.base)
            self._check()
        except (OSError, ValueError) as exc:
            self.close()
            raise PoolGone(handle.path[:80], str(exc)) from exc

    def _check(self) -> None:
        found = self._runtime.read(self.address + self.handle.nbytes, LABEL_NBYTES)
        wanted = _label(self.handle.epoch, self.layout, self.block_nbytes, self.where.generation)
        if found != wanted:
            raise ValueError("the memory has another owner, another generation, or other blocks")

    @property
    def address(self) -> int:
        """Address of the first block, in this process."""
        assert self._base is not None, "closed"
        return self._base + self.where.offset

    @property
    def num_blocks(self) -> int:
        """How many blocks the pool has."""
        return self.handle.nbytes // self.block_nbytes

    def present(self) -> bool:
        """Whether the memory still has the owner, generation and blocks that the handle names."""
        try:
            self._check()
        except (OSError, ValueError):
            return False
        return True

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the bytes of blocks.

        Raises:
            OSError: if the device refuses.
            ValueError: if an index is outside the pool.
        """
        return [self._runtime.read(self._place(block), self.block_nbytes) for block in blocks]

    def write(self, block: int, data: bytes | memoryview) -> None:
        """Overwrite a block.

        Raises:
            OSError: if the device refuses.
            ValueError: if the index is outside the pool, or the data are not one block.
        """
        if len(data) != self.block_nbytes:
            raise ValueError(f"{len(data)} bytes for a block of {self.block_nbytes}")
        self._runtime.write(self._place(block), data)

    def take(self, source: AttachedCuda, from_: int, to: int) -> None:
        """Copy a block of another pool on a device, without the way through host memory.

        Raises:
            OSError: if a device refuses.
            ValueError: if an index is outside its pool, or blocks are of other sizes.
        """
        if source.block_nbytes != self.block_nbytes:
            raise ValueError(f"a block of {source.block_nbytes} bytes for one of {self.block_nbytes}")
        self._runtime.move(source._place(from_), self._place(to), self.block_nbytes)

    def _place(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError("a block index is outside its pool")
        return self.address + block * self.block_nbytes

    def close(self) -> None:
        """Unmap the allocation."""
        base, self._base = self._base, None
        if base is not None:
            self._runtime.close(base)


_runtime: Runtime | None = None
_runtime_lock = threading.Lock()


def default_runtime() -> Runtime:
    """Return CuPy's runtime on a device that answers.

    Raises:
        OSError: if CuPy is not installed or there is no device; it says which.
    """
    global _runtime
    with _runtime_lock:
        if _runtime is None:
            _runtime = _CupyRuntime()
        return _runtime


class _CupyRuntime:
    """CuPy's runtime behind `Runtime`: copies run on a stream of their own, errors are OSErrors."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as exc:
            raise OSError("CuPy is not installed (extra `gpu`)") from exc
        self._cupy: Any = cupy
        if self._do(lambda: cupy.cuda.runtime.getDeviceCount()) < 1:
            raise OSError("there is no CUDA device")
        self._stream = self._do(lambda: cupy.cuda.Stream(non_blocking=True))

    def _do(self, call: Any) -> Any:
        try:
            return call()
        except (self._cupy.cuda.runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError) as exc:
            raise OSError(str(exc)) from exc

    def device(self) -> str:
        runtime = self._cupy.cuda.runtime
        return str(self._do(lambda: runtime.deviceGetPCIBusId(runtime.getDevice())))

    def allocate(self, nbytes: int) -> int:
        return int(self._do(lambda: self._cupy.cuda.runtime.malloc(nbytes)))

    def free(self, address: int) -> None:
        self._do(lambda: self._cupy.cuda.runtime.free(address))

    def export(self, base: int) -> bytes:
        return bytes(self._do(lambda: self._cupy.cuda.runtime.ipcGetMemHandle(base)))

    def open(self, handle: bytes) -> int:
        runtime = self._cupy.cuda.runtime
        return int(self._do(lambda: runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)))

    def close(self, base: int) -> None:
        self._do(lambda: self._cupy.cuda.runtime.ipcCloseMemHandle(base))

    def read(self, address: int, nbytes: int) -> bytes:
        import numpy as np

        out = np.empty(nbytes, dtype=np.uint8)
        self._copy(out.ctypes.data, address, nbytes)
        return out.tobytes()

    def write(self, address: int, data: bytes | memoryview) -> None:
        import numpy as np

        own = np.frombuffer(data, dtype=np.uint8)
        self._copy(address, own.ctypes.data, own.size)

    def move(self, source: int, dest: int, nbytes: int) -> None:
        self._copy(dest, source, nbytes)

    def _copy(self, dest: int, source: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime

        def copy() -> None:
            runtime.memcpyAsync(dest, source, nbytes, runtime.memcpyDefault, self._stream.ptr)
            self._stream.synchronize()

        self._do(copy)


def _label(epoch: str, layout: str, block_nbytes: int, generation: int) -> bytes:
    said = {"epoch": epoch, "layout": layout, "block_nbytes": block_nbytes, "generation": generation}
    return json.dumps(said).encode().ljust(LABEL_NBYTES, b" ")


def _count(word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise ValueError(f"{word!r} is no number")
    return int(word)
