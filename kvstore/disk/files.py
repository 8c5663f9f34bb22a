"""The operating system as the disk tier uses it: one thin call each, so that a test can make any of them fail."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import DiskBusy

LOCK = "LOCK"
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """A regular file of a folder: its name, size and the bytes that it takes from the disk."""

    name: str
    nbytes: int
    charge: int
    mtime: float


class Files:
    """Real files. Every method raises OSError if the system refuses."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def folders(self, path: Path) -> list[str]:
        """Return the names of the folders in a folder."""
        with os.scandir(path) as entries:
            return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))

    def list(self, path: Path) -> list[Found]:
        """Return the regular files in a folder, by name."""
        out = []
        with os.scandir(path) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    out.append(Found(entry.name, status.st_size, charge(status), status.st_mtime))
        return sorted(out, key=lambda found: found.name)

    def create(self, path: Path) -> int:
        """Make a file that must not exist, for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, path: Path, *, write: bool = False) -> int:
        """Open a file that must exist."""
        return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def write(self, fd: int, buffers: Sequence[bytes | memoryview]) -> int:
        """Append buffers; returns how many bytes were written, perhaps fewer than given."""
        return os.writev(fd, buffers)

    def write_at(self, fd: int, data: bytes, offset: int) -> int:
        """Overwrite bytes in place; returns how many were written."""
        return os.pwrite(fd, data, offset)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fill buffers from an offset; returns how many bytes were read, perhaps fewer than they hold."""
        return os.preadv(fd, buffers, offset)

    def announce(self, fd: int, offset: int, nbytes: int) -> None:
        """Let the system fetch bytes that will be read soon."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def charge(self, fd: int) -> int:
        """Return the bytes that an open file takes from the disk."""
        return charge(os.fstat(fd))

    def sync(self, fd: int) -> None:
        """Wait until a file's data is on the disk."""
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Wait until a folder's names are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Cut an open file."""
        os.ftruncate(fd, nbytes)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its final name."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is not there is removed already."""
        path.unlink(missing_ok=True)


def charge(status: os.stat_result) -> int:
    """Return the bytes that a file counts for: its size in pages, or what the file system has given it, if more."""
    return max(-(-status.st_size // PAGE) * PAGE, status.st_blocks * 512)


class Lock:
    """The claim on a directory; it ends with the process, however that ends."""

    def __init__(self, directory: Path, owner: str) -> None:
        """Claim a directory that exists.

        Args:
            directory: where the lock file lies, or is made.
            owner: what a second comer is told.

        Raises:
            DiskBusy: if another owner lives.
            OSError: if the file cannot be made or written.
        """
        self._path = directory / LOCK
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise DiskBusy(str(directory), os.pread(fd, 256, 0).decode("utf-8", "replace").strip()) from exc
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner.encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def holds(self) -> bool:
        """Whether the file that is locked is still the one in the directory."""
        try:
            now, mine = os.stat(self._path), os.fstat(self._fd)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Let the directory go; the file stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
