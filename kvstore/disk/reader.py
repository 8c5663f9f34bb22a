"""Reading records into memory: what came is compared with what was asked for, and only then counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def read_places(
    files: Files, folder: Path, shelf: bytes, wanted: Sequence[Wanted], *, verify: bool = True
) -> Outcome:
    """Read blocks in order, adjacent ones in one call, until one is not what it should be.

    Without `verify` nothing but its length is looked at: that is for tests that must then find wrong bytes.
    """
    out = Outcome()
    for first, count in _pieces(wanted, len(wanted), lambda one, two: one.segment is two.segment):
        try:
            fd = files.open(folder / wanted[first].place.segment.name)
            try:
                whole = _read_file(files, fd, shelf, wanted[first : first + count], out.checksums, verify)
            finally:
                files.close(fd)
        except OSError as exc:
            out.bad, out.error = len(out.checksums), exc
            return out
        if not whole:
            out.bad = len(out.checksums)
            return out
    return out


def _read_file(
    files: Files, fd: int, shelf: bytes, wanted: Sequence[Wanted], checksums: list[int], verify: bool
) -> bool:
    """Read blocks of one segment and note the checksums of those that are right; false at the first that is not.

    Raises:
        OSError: if a read was refused.
    """
    stride = HEADER_NBYTES + len(wanted[0].data)
    runs = list(_pieces(wanted, longest_run(stride), lambda one, two: two.offset == one.offset + stride))
    for first, count in runs:
        files.announce(fd, wanted[first].place.offset, count * stride)  # the disk reads on while bytes are verified
    for first, count in runs:
        part = wanted[first : first + count]
        heads = [bytearray(HEADER_NBYTES) for _ in part]
        whole = read_run(files, fd, part[0].place.offset, heads, [item.data for item in part])
        for position, item in enumerate(part):
            if position >= whole or (verify and not _verified(heads[position], item, shelf)):
                return False
            checksums.append(item.place.checksum)
    return True


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


def _pieces(
    wanted: Sequence[Wanted], longest: int, together: Callable[[Place, Place], bool]
) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of pieces of at most `longest` blocks, each of which goes with the one before it."""
    first = 0
    for i in range(1, len(wanted) + 1):
        if i == len(wanted) or i - first >= longest or not together(wanted[i - 1].place, wanted[i].place):
            yield first, i - first
            first = i
