"""Segment files: written whole under a private name, read record by record, scanned at a start."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.disk.files import Files, Found
from kvstore.errors import BadRecord
from kvstore.record import HEADER_NBYTES, RecordHeader, is_blank, unpack

MAX_IO_BUFFERS = 512  # the kernel takes 1,024 in one call
MAX_READ_NBYTES = 8 << 20  # in one call: what a reader has to wait for before it may stop

_NAME = re.compile(r"(segment|staging)-(\d{12})-([A-Za-z0-9]{1,16})")


@dataclass(frozen=True, slots=True)
class Slot:
    """A record's place in a segment, and its header."""

    offset: int
    header: RecordHeader


@dataclass(slots=True)
class Scanned:
    """What a segment file holds: sound headers, and how many slots (a cut last one included) have none."""

    name: str
    number: int
    charge: int
    slots: list[Slot] = field(default_factory=list)
    bad: int = 0


def segment_name(number: int, epoch: str) -> str:
    """Return the name of a finished segment."""
    return f"segment-{number:012d}-{epoch}"


def staging_name(number: int, epoch: str) -> str:
    """Return the name of a segment while it is written."""
    return f"staging-{number:012d}-{epoch}"


def parse_name(name: str) -> tuple[str, int] | None:
    """Return (`segment` or `staging`, number) of one of our names, or None."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def write_segment(
    files: Files,
    staging: Path,
    final: Path,
    records: Sequence[tuple[bytes, memoryview]],
    *,
    sync: bool,
    step: Callable[[str], None],
) -> int:
    """Write headers and payloads to a new file, then give it its final name; returns the bytes that it takes.

    Raises:
        OSError: if anything was refused; neither name is left behind, as far as the system lets us remove it.
    """
    try:
        fd = files.create(staging)
        try:
            step("created")
            for header, payload in records:
                _write_all(files, fd, [memoryview(header), payload])
                step("record")
            if sync:
                files.sync(fd)
            charge = files.charge(fd)
        finally:
            files.close(fd)
        step("written")
        files.rename(staging, final)
        if sync:
            files.sync_folder(final.parent)
        step("renamed")
        return charge
    except OSError:
        for path in (staging, final):
            try:
                files.unlink(path)
            except OSError:
                pass  # the next start removes it, or finds whole records in it
        raise


def self_test(files: Files, staging: Path, final: Path, record: bytes, *, sync: bool) -> None:
    """Write a record, read it back, compare every byte, remove it.

    Raises:
        OSError: if anything was refused.
        BadRecord: if other bytes came back.
    """
    parts = (record[:HEADER_NBYTES], memoryview(record)[HEADER_NBYTES:])
    write_segment(files, staging, final, [parts], sync=sync, step=lambda name: None)
    got = bytearray(len(record))
    try:
        fd = files.open(final)
        try:
            nbytes = files.read(fd, [got], 0)
        finally:
            files.close(fd)
    finally:
        files.unlink(final)
    if nbytes != len(record) or got != record:
        raise BadRecord("the self-test read other bytes than it wrote")


def _write_all(files: Files, fd: int, buffers: list[memoryview]) -> None:
    while buffers:
        written = files.write(fd, buffers)
        if written <= 0:
            raise OSError(5, "nothing was written")
        while buffers and written >= len(buffers[0]):
            written -= len(buffers.pop(0))
        if written:
            buffers[0] = buffers[0][written:]  # the rest of a short write; what stands in its way is raised next


def read_run(files: Files, fd: int, offset: int, heads: list[bytearray], payloads: Sequence[memoryview]) -> int:
    """Read adjacent records into headers and payloads; returns how many of them came whole.

    The count is that of the bytes which the system says it has read, never of those that were asked for.

    Raises:
        OSError: if the read was refused.
    """
    buffers: list[bytearray | memoryview] = []
    for head, payload in zip(heads, payloads, strict=True):
        buffers += [head, payload]
    got = files.read(fd, buffers, offset)
    whole = 0
    for head, payload in zip(heads, payloads, strict=True):
        got -= len(head) + len(payload)
        if got < 0:
            break
        whole += 1
    return whole


def longest_run(stride: int) -> int:
    """Return how many records are read in one call."""
    return max(1, min(MAX_IO_BUFFERS // 2, MAX_READ_NBYTES // stride))


def scan_segment(files: Files, folder: Path, found: Found, shelf: bytes, block_nbytes: int) -> Scanned:
    """Read the headers of a segment; payloads are verified when they are first read.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the name is not that of a segment.
    """
    parsed = parse_name(found.name)
    if parsed is None or parsed[0] != "segment":
        raise ValueError(f"{found.name} is no segment")
    out = Scanned(found.name, parsed[1], found.charge)
    stride = HEADER_NBYTES + block_nbytes
    head = bytearray(HEADER_NBYTES)
    fd = files.open(folder / found.name)
    try:
        for offset in range(0, found.nbytes, stride):
            got = files.read(fd, [head], offset)
            try:
                header = unpack(memoryview(head)[:got])
            except BadRecord:
                out.bad += not is_blank(memoryview(head)[:got])
                continue
            if header.shelf == shelf and header.nbytes == block_nbytes and offset + stride <= found.nbytes:
                out.slots.append(Slot(offset, header))
            else:
                out.bad += 1
    finally:
        files.close(fd)
    return out
