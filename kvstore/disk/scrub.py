"""Checking a disk tier that nobody uses: every header and every payload, of all layouts in the directory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.disk.files import LOCK, Files, Found, Lock
from kvstore.disk.segment import parse_name
from kvstore.errors import BadRecord, KvError
from kvstore.handoff import checksum
from kvstore.record import HEADER_NBYTES, is_blank, unpack

_FOLDER = re.compile(r"([0-9a-f]{32})-(\d{1,18})")
CHUNK_NBYTES = 8 << 20


class NoDiskTier(KvError):
    """Raised when a directory holds no disk tier."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"{directory} holds no disk tier")
        self.directory = directory


@dataclass(slots=True)
class Report:
    """What was found; `good` + `bad_headers` + `bad_payloads` + `cut` records, and `blank` places without one."""

    layouts: int = 0
    segments: int = 0
    good: int = 0
    bad_headers: int = 0
    bad_payloads: int = 0
    cut: int = 0
    blank: int = 0
    unreadable: int = 0  # segments
    leftovers: int = 0  # of writers that died; not damage
    nbytes: int = 0  # of good payloads
    dropped: int = 0  # records and segments that are gone now

    @property
    def bad(self) -> int:
        """How many records and segments are not what they should be."""
        return self.bad_headers + self.bad_payloads + self.cut + self.unreadable

    def add(self, other: Report) -> None:
        """Add another report's counts."""
        for name, count in asdict(other).items():
            setattr(self, name, getattr(self, name) + count)


def tiers_in(directory: Path, files: Files | None = None) -> list[Path]:
    """Return the directories of disk tiers: this one, and those in it where several stores share it.

    Raises:
        NoDiskTier: if there is none.
        OSError: if a directory cannot be read.
    """
    files = files if files is not None else Files()
    inner = [directory / name for name in sorted(files.folders(directory))] if directory.is_dir() else []
    found = [path for path in (directory, *inner) if _layouts(files, path) is not None]
    if not found:
        raise NoDiskTier(directory)
    return found


def _layouts(files: Files, directory: Path) -> list[str] | None:
    """Return the folders of layouts in a disk tier's directory; None if it does not look like one."""
    if not directory.is_dir():
        return None
    folders = [name for name in files.folders(directory) if _FOLDER.fullmatch(name)]
    return folders if folders or (directory / LOCK).is_file() else None


def scrub(
    directory: Path,
    *,
    drop: bool = False,
    files: Files | None = None,
    progress: Callable[[str, Report], None] = lambda folder, report: None,
) -> Report:
    """Verify all records of a directory.

    Args:
        directory: of a disk tier; it is locked meanwhile.
        drop: take bad records out of their segments, and remove segments without a good one, and leftovers.
        files: the operating system.
        progress: told each folder's name and counts.

    Raises:
        NoDiskTier: if the directory does not look like one.
        DiskBusy: if a living owner holds it.
        OSError: if the directory cannot be read.
    """
    files = files if files is not None else Files()
    folders = _layouts(files, directory)
    if folders is None:
        raise NoDiskTier(directory)
    total = Report()
    lock = Lock(directory, "headrace kv verify")
    try:
        for name in folders:
            report = _scrub_folder(files, directory / name, drop)
            total.add(report)
            progress(name, report)
    finally:
        lock.release()
    return total


def _scrub_folder(files: Files, folder: Path, drop: bool) -> Report:
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None
    shelf, block_nbytes = bytes.fromhex(match[1]), int(match[2])
    out = Report(layouts=1)
    for found in files.list(folder):
        parsed = parse_name(found.name)
        if parsed is None:
            continue
        if parsed[0] == "staging":
            out.leftovers += 1
            if drop:
                files.unlink(folder / found.name)
            continue
        out.segments += 1
        try:
            out.add(_scrub_segment(files, folder, found, shelf, block_nbytes, drop))
        except OSError:
            out.unreadable += 1
    return out


def _scrub_segment(files: Files, folder: Path, found: Found, shelf: bytes, block_nbytes: int, drop: bool) -> Report:
    out = Report()
    stride = HEADER_NBYTES + block_nbytes
    bad: list[int] = []
    path = folder / found.name
    fd = files.open(path, write=drop)
    try:
        whole = found.nbytes // stride * stride
        record = bytearray(stride)
        for offset in range(0, whole, stride):
            kind = _kind(record, _read(files, fd, record, offset), shelf, block_nbytes)
            setattr(out, kind, getattr(out, kind) + 1)
            if kind.startswith("bad"):
                bad.append(offset)
        out.cut = int(found.nbytes > whole)
        out.nbytes = out.good * block_nbytes
        if drop and out.good:
            for offset in bad:
                files.write_at(fd, bytes(HEADER_NBYTES), offset)
            if out.cut:
                files.truncate(fd, whole)
            out.dropped = out.bad
    finally:
        files.close(fd)
    if drop and not out.good:
        files.unlink(path)
        out.dropped = max(1, out.bad)
    return out


def _read(files: Files, fd: int, record: bytearray, offset: int) -> int:
    """Fill a record in pieces; returns how many bytes came."""
    view = memoryview(record)
    done = 0
    while done < len(record):
        got = files.read(fd, [view[done : done + CHUNK_NBYTES]], offset + done)
        if got <= 0:
            break
        done += got
    return done


def _kind(record: bytearray, nbytes: int, shelf: bytes, block_nbytes: int) -> str:
    """Return the name of the count that a record belongs to."""
    try:
        header = unpack(memoryview(record)[:nbytes])
    except BadRecord:
        return "blank" if is_blank(memoryview(record)[:nbytes]) else "bad_headers"
    if (header.shelf, header.nbytes) != (shelf, block_nbytes):
        return "bad_headers"
    whole = nbytes == len(record) and checksum(memoryview(record)[HEADER_NBYTES:]) == header.checksum
    return "good" if whole else "bad_payloads"
