"""Reading records into memory: what came is compared with what was asked for, and only then counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.disk.catalog import Place
from kvstore.disk.files import Files
from kvstore.disk.segment import longest_run, read_run
from kvstore.errors import BadRecord
from kvstore.handoff import checksum
from kvstore.record import HEADER_NBYTES, unpack


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block by its hash, where it should lie, and where its bytes go."""

    hash: bytes
    place: Place
    data: memoryview


@dataclass(slots=True)
class Outcome:
    """Checksums of the verified prefix; `bad` is the position that ended it early, `error` what the system said."""

    checksums: list[int] = field(default_factory=list)
    bad: int | None = None
    error: OSError | None = None


def read_places(files: Files, folder: Path, shelf: bytes, wanted: Sequence[Wanted]) -> Outcome:
    """Read blocks in order, adjacent ones in one call, until one is not what it should be."""
    out = Outcome()
    for first, count in _runs(wanted):
        part = wanted[first : first + count]
        heads = [bytearray(HEADER_NBYTES) for _ in part]
        try:
            fd = files.open(folder / part[0].place.segment.name)
            try:
                whole = read_run(files, fd, part[0].place.offset, heads, [item.data for item in part])
            finally:
                files.close(fd)
        except OSError as exc:
            out.bad, out.error = first, exc
            return out
        for position, item in enumerate(part):
            if position >= whole or not _verified(heads[position], item, shelf):
                out.bad = first + position
                return out
            out.checksums.append(item.place.checksum)
    return out


def _verified(head: bytearray, item: Wanted, shelf: bytes) -> bool:
    """Whether the header is the one of this block, and the bytes are those that it was made with."""
    try:
        header = unpack(head)
    except BadRecord:
        return False
    place = item.place
    found = (header.hash, header.parent, header.num_tokens, header.checksum, header.nbytes, header.shelf)
    if found != (item.hash, place.parent, place.num_tokens, place.checksum, len(item.data), shelf):
        return False
    return checksum(item.data) == place.checksum


def _runs(wanted: Sequence[Wanted]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the pieces that lie side by side in one file."""
    first = 0
    for i in range(1, len(wanted) + 1):
        before = wanted[i - 1]
        stride = HEADER_NBYTES + len(before.data)
        adjacent = (
            i < len(wanted)
            and i - first < longest_run(stride)
            and wanted[i].place.segment is before.place.segment
            and wanted[i].place.offset == before.place.offset + stride
        )
        if not adjacent:
            yield first, i - first
            first = i
