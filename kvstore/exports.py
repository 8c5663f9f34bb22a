"""One interface to exported pools of every kind: open a handle, copy blocks between any two."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvstore.cuda_ipc import KIND as CUDA_IPC
from kvstore.cuda_ipc import AttachedCuda, default_runtime
from kvstore.errors import LayoutMismatch, PoolGone, TransferAborted, TransferCorrupt
from kvstore.handoff import checksum, copy_blocks
from kvstore.shm import AttachedPool, attach
from schemas.messages import BlockRef, PoolHandle

SHM = "shm"
MAX_ON_DEVICES = 64

Exported = AttachedPool | AttachedCuda

_on_devices: OrderedDict[tuple[str, str], AttachedCuda] = OrderedDict()
_lock = threading.Lock()


def open_pool(handle: PoolHandle) -> Exported:
    """Map another process's pool; maps are kept. Callable from any thread.

    Raises:
        PoolGone: if the pool is not there, is not the one that the handle names, or cannot be opened on this machine.
    """
    if handle.kind == SHM:
        return attach(handle)
    if handle.kind != CUDA_IPC:
        raise PoolGone(handle.path[:80], f"pools of kind {handle.kind!r} cannot be opened")
    key = (handle.path, handle.epoch)
    with _lock:
        found = _on_devices.get(key)
        if found is not None and found.handle == handle and found.present():
            _on_devices.move_to_end(key)
            return found
        # What is replaced or evicted is closed by nobody while a copy may be running in it: it goes with the process.
        _on_devices.pop(key, None)
        try:
            runtime = default_runtime()
        except OSError as exc:
            raise PoolGone(handle.path[:80], str(exc)) from exc
        _on_devices[key] = pool = AttachedCuda(handle, runtime)
        while len(_on_devices) > MAX_ON_DEVICES:
            _on_devices.popitem(last=False)
        return pool


def close_devices() -> int:
    """Unmap all pools on devices, while no copy runs; returns how many."""
    with _lock:
        pools = list(_on_devices.values())
        _on_devices.clear()
    for pool in pools:
        pool.close()
    return len(pools)


def copy_exported(
    src: Exported,
    src_refs: Sequence[BlockRef],
    dst: Exported,
    dst_refs: Sequence[BlockRef],
    *,
    should_stop: Callable[[], bool],
) -> list[int]:
    """Copy whole blocks between pools of any kind and verify every copy; in host memory by `copy_blocks`.

    With a device on either side blocks go one by one and are read back to be verified. Such blocks are not packed.

    Returns:
        The xxh3_64 of each block, as `copy_blocks` does.

    Raises:
        KvError, ValueError: as `copy_blocks` does.
        OSError: if a device refuses.
    """
    if isinstance(src, AttachedPool) and isinstance(dst, AttachedPool):
        return copy_blocks(src, src_refs, dst, dst_refs, should_stop=should_stop)
    if (src.layout, src.block_nbytes) != (dst.layout, dst.block_nbytes):
        raise LayoutMismatch(f"{src.layout}/{src.block_nbytes}", f"{dst.layout}/{dst.block_nbytes}")
    if len(src_refs) != len(dst_refs):
        raise ValueError(f"{len(src_refs)} source blocks, {len(dst_refs)} destination blocks")
    for pool, refs in ((src, src_refs), (dst, dst_refs)):
        if any(not 0 <= ref.index < pool.num_blocks for ref in refs):
            raise ValueError("a block index is outside its pool")
    checksums: list[int] = []
    for done, (one, other) in enumerate(zip(src_refs, dst_refs, strict=True)):
        if should_stop():
            raise TransferAborted(done, len(src_refs))
        data = _read(src, one.index)
        expected = checksum(memoryview(data))
        if isinstance(src, AttachedCuda) and isinstance(dst, AttachedCuda):
            dst.take(src, one.index, other.index)
        else:
            _write(dst, other.index, data)
        found = checksum(memoryview(_read(dst, other.index)))
        if found != expected:
            raise TransferCorrupt(done, expected, found)
        checksums.append(expected)
    return checksums


def _read(pool: Exported, block: int) -> bytes:
    if isinstance(pool, AttachedCuda):
        return pool.read([block])[0]
    return bytes(pool.view()[block * pool.block_nbytes : (block + 1) * pool.block_nbytes])


def _write(pool: Exported, block: int, data: bytes) -> None:
    if isinstance(pool, AttachedCuda):
        pool.write(block, data)
    else:
        pool.view()[block * pool.block_nbytes : (block + 1) * pool.block_nbytes] = data
