"""Pool memory: a file that every process of the host may map, with a page at its end that says whose it is.

The owner holds a lock on the file for as long as it lives, so a leftover is told from a pool in use without asking.
(`multiprocessing.shared_memory` is not used: on Python 3.11 it unlinks a segment when an attacher exits.)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

from kvstore.errors import PoolGone
from schemas.messages import PoolHandle

TRAILER_NBYTES = 4096
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python has no name for it
PREFIX = "headrace-"
MAX_ATTACHED = 64


class SharedFile:
    """A mapped file of this process's own; it lasts until `close`."""

    def __init__(self, path: Path, nbytes: int, label: dict[str, object]) -> None:
        """Make, lock, fill and map the file.

        Raises:
            OSError: if the directory is full or not writable; nothing is left behind.
        """
        self.path = path
        self.nbytes = nbytes
        self._fd = _create_locked(path)
        try:
            # Without real pages behind it, a full /dev/shm would show as SIGBUS in the middle of a step.
            os.posix_fallocate(self._fd, 0, nbytes + TRAILER_NBYTES)
            os.pwrite(self._fd, json.dumps(label).encode().ljust(TRAILER_NBYTES, b" "), nbytes)
            self._map = mmap.mmap(self._fd, nbytes + TRAILER_NBYTES, mmap.MAP_SHARED)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(self._fd)
            raise
        self._closed = False

    def view(self) -> memoryview:
        """Return the writable bytes, without the trailer."""
        return memoryview(self._map)[: self.nbytes]

    def touch(self, start: int, nbytes: int) -> None:
        """Map so many bytes before they are written, in one call: each page costs an interrupt of the writer else."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError, ValueError):  # an old kernel: they are mapped as they are written
            self._map.madvise(_POPULATE_WRITE, first, start + nbytes - first)

    def close(self) -> None:
        """Unlink and unmap; a view that somebody still holds keeps its memory until it goes."""
        if self._closed:
            return
        self._closed = True
        self.path.unlink(missing_ok=True)
        _unmap(self._map)
        os.close(self._fd)


class AttachedPool:
    """Another process's pool, mapped for reading and writing."""

    def __init__(self, handle: PoolHandle) -> None:
        """Map the file and check that it is the one that the handle names.

        Raises:
            PoolGone: if it is absent, of another size, or of another epoch, layout or block size.
        """
        self.handle = handle
        self.layout = handle.layout
        self.block_nbytes = handle.block_nbytes
        try:
            fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise PoolGone(handle.path, exc.strerror or "cannot be opened") from exc
        try:
            status = os.fstat(fd)
            if status.st_size != handle.nbytes + TRAILER_NBYTES:
                raise PoolGone(handle.path, f"{status.st_size} bytes, {handle.nbytes + TRAILER_NBYTES} expected")
            _check_label(handle, os.pread(fd, TRAILER_NBYTES, handle.nbytes))
            self._map = mmap.mmap(fd, status.st_size, mmap.MAP_SHARED)
        except OSError as exc:
            raise PoolGone(handle.path, str(exc)) from exc
        finally:
            os.close(fd)
        self._inode = status.st_ino
        self._view = memoryview(self._map)[: handle.nbytes]

    @property
    def num_blocks(self) -> int:
        """How many blocks the pool has."""
        return self.handle.nbytes // self.block_nbytes

    def view(self) -> memoryview:
        """Return the writable bytes of all blocks."""
        return self._view

    def present(self) -> bool:
        """Whether the owner still keeps the file."""
        try:
            return os.stat(self.handle.path).st_ino == self._inode
        except OSError:
            return False


_attached: OrderedDict[tuple[str, str], AttachedPool] = OrderedDict()
_attached_lock = threading.Lock()


def attach(handle: PoolHandle) -> AttachedPool:
    """Map another process's pool; the map is kept by path and epoch. Callable from any thread.

    Raises:
        PoolGone: if the pool is not there, or is not the one that the handle names.
    """
    key = (handle.path, handle.epoch)
    with _attached_lock:
        found = _attached.get(key)
        if found is not None and found.handle == handle and found.present():
            _attached.move_to_end(key)
            return found
        _attached.pop(key, None)
    pool = AttachedPool(handle)
    with _attached_lock:
        _attached[key] = pool
        # An evicted map is not closed here: a copy may be running in it; it goes with its last reference.
        while len(_attached) > MAX_ATTACHED:
            _attached.popitem(last=False)
    return pool


def detach(epochs: set[str] | None = None) -> int:
    """Forget the maps of these epochs (all of them when absent); returns how many."""
    with _attached_lock:
        gone = [key for key in _attached if epochs is None or key[1] in epochs]
        for key in gone:
            del _attached[key]
        return len(gone)


def reap(directory: Path, prefix: str, live: set[str]) -> list[str]:
    """Remove files whose name starts with `prefix`, whose epoch is not in `live`, and which no living process owns.

    Returns:
        The names that were removed.
    """
    removed = []
    for path in sorted(directory.glob(f"{prefix}*")):
        if not path.name.startswith(PREFIX) or path.name.rpartition("-")[2] in live:
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except OSError:
            continue  # its owner lives, whatever `live` says
        finally:
            os.close(fd)
    return removed


def _create_locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        except OSError:
            pass  # a reaper came between creation and lock; it has removed, or will remove, the file
        os.close(fd)
        path.unlink(missing_ok=True)


def _check_label(handle: PoolHandle, trailer: bytes) -> None:
    try:
        label = json.loads(trailer)
    except ValueError as exc:
        raise PoolGone(handle.path, "it has no label") from exc
    wanted = {"epoch": handle.epoch, "layout": handle.layout, "block_nbytes": handle.block_nbytes}
    if label != wanted:
        raise PoolGone(handle.path, f"it is {label}, not {wanted}")


def _unmap(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        pass  # a view is still held; the memory goes with it
