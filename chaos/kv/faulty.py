"""The disk tier's seam to the system, some of whose calls fail when told to; and places that are really too small."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.disk.files import Files

Less = Callable[[int], int]
Fault = int | Less | None


class FaultyFiles(Files):
    """Real files. What is planned for an operation happens at its next calls, one after another.

    None lets a call pass, a number refuses it with that errno, and a function of the bytes that a read or a write was
    asked for returns how many it does.
    """

    def __init__(self) -> None:
        self._plan: dict[str, deque[Fault]] = {}
        self.struck = 0

    def plan(self, operation: str, *faults: Fault) -> None:
        """Add to what happens at the next calls."""
        self._plan.setdefault(operation, deque()).extend(faults)

    def clear(self) -> None:
        """Let everything pass from now on."""
        self._plan.clear()

    def _next(self, operation: str) -> Less | None:
        queue = self._plan.get(operation)
        fault = queue.popleft() if queue else None
        if fault is None:
            return None
        self.struck += 1
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        return fault

    def create(self, path: Path) -> int:
        """See `Files`."""
        self._next("create")
        return super().create(path)

    def open(self, path: Path, *, write: bool = False) -> int:
        """See `Files`."""
        self._next("open")
        return super().open(path, write=write)

    def write(self, fd: int, buffers: Sequence[bytes | memoryview]) -> int:
        """See `Files`."""
        less = self._next("write")
        if less is None:
            return super().write(fd, buffers)
        given = cut([memoryview(buffer) for buffer in buffers], less(sum(map(len, buffers))))
        return super().write(fd, given) if given else 0

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """See `Files`; of a read that does less, the rest of the memory stays as it was."""
        less = self._next("read")
        if less is None:
            return super().read(fd, buffers, offset)
        given = cut([memoryview(buffer) for buffer in buffers], less(sum(map(len, buffers))))
        return super().read(fd, given, offset) if given else 0

    def rename(self, old: Path, new: Path) -> None:
        """See `Files`."""
        self._next("rename")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        """See `Files`."""
        self._next("unlink")
        super().unlink(path)

    def sync(self, fd: int) -> None:
        """See `Files`."""
        self._next("sync")
        super().sync(fd)


def cut(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return the first so many bytes of all these together, without empty pieces."""
    out = []
    for buffer in buffers:
        part = buffer[: max(0, nbytes)]
        nbytes -= len(buffer)
        if len(part):
            out.append(part)
    return out


@contextmanager
def small_place(place: Path, nbytes: int) -> Iterator[bool]:
    """Mount a file system in memory of that size for a while; yields false where that is not allowed."""
    place.mkdir(parents=True, exist_ok=True)
    argv = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "chaos-kv", str(place)]
    if os.getuid() != 0 or subprocess.run(argv, capture_output=True, check=False).returncode != 0:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def fill(path: Path) -> int:
    """Write zeros until the file system takes no more; returns the errno that ended it, 0 after 64 MiB."""
    with path.open("wb", buffering=0) as file:
        for _ in range(64):
            try:
                while file.write(bytes(1 << 20)) < 1 << 20:
                    pass  # the rest of the room is tried for at the next call
            except OSError as exc:
                return exc.errno or 0
    return 0


@contextmanager
def read_only(place: Path) -> Iterator[bool]:
    """Let nobody change what is under a folder for a while; yields false where that is not allowed."""
    bind = ["mount", "--bind", str(place), str(place)]
    if os.getuid() != 0 or subprocess.run(bind, capture_output=True, check=False).returncode != 0:
        yield False
        return
    try:
        argv = ["mount", "-o", "remount,bind,ro", str(place)]
        yield subprocess.run(argv, capture_output=True, check=False).returncode == 0
    finally:
        subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)
