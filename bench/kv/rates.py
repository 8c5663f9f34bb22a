"""Bytes per second of the ways between tiers, beside plain copies and plain reads of the same bytes in this process.

`copy_blocks` and the disk tier's read are measured as they are, and with their verification taken out. The memory is
that of pools in shared memory, as in an instance, and larger than any cache.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from bench.kv import probe
from bench.kv.plan import verdict
from bench.targets import KV_RATE
from kvstore import handoff
from kvstore.block import BLOCK_TOKENS, chain_hashes, root_hash
from kvstore.disk import reader
from kvstore.disk.files import Files
from kvstore.disk.tier import Block, DiskTier
from kvstore.handoff import checksum, copy_blocks
from kvstore.pool import DEFAULT_DIRECTORY, BlockPool

LAYOUT = "bench"
SEGMENT_BLOCKS = 64  # as the store writes them
READ_NBYTES = 8 << 20  # of one plain read
NO_CAP = 1 << 40
PLAIN, UNVERIFIED, VERIFIED = "plain", "unverified", "verified"


class WrongBytes(Exception):
    """Raised when a path did not bring the bytes that it should: it has no speed then."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks in a disk tier: their chain, where the right bytes are, and where those that are read go."""

    tier: DiskTier
    hashes: list[bytes]
    parents: list[bytes]
    source: BlockPool
    dest: BlockPool


def measure(directory: Path, num_blocks: int, block_nbytes: int, turns: int) -> list[dict[str, Any]]:
    """Return a row per path: host to device memory, another host, the disk, remembered by the system or not.

    Args:
        directory: on the disk.
        num_blocks, block_nbytes: what is moved at a time.
        turns: how often each way; one more goes first and does not count.

    Raises:
        WrongBytes: if bytes or checksums are not those of the source.
        OSError: if there is no room for two pools in memory and one on the disk.
    """
    with ExitStack() as stack:
        memory = DEFAULT_DIRECTORY if DEFAULT_DIRECTORY.is_dir() else None
        pools = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=memory)))
        source = BlockPool.create(pools, "host", num_blocks, block_nbytes, LAYOUT, "0", "here")
        stack.callback(source.close)
        dest = BlockPool.create(pools, "device", num_blocks, block_nbytes, LAYOUT, "0", "here")
        stack.callback(dest.close)
        rng = random.Random(1)
        for block in _blocks(source):
            block[:] = rng.randbytes(block_nbytes)
        from bench.kv.wire import fetches  # it measures by what is in this module

        copied = copies(source, dest, turns)
        fetched = fetches(source, dest, turns)
        tier = DiskTier(directory, layout=LAYOUT, block_nbytes=block_nbytes, epoch="0", max_nbytes=NO_CAP, sync=True)
        stack.callback(tier.close)
        tier.open(time.monotonic())
        stored = Stored(tier, *_store(tier, source), source, dest)
        return [copied, fetched, reads(stored, turns, forgotten=False), reads(stored, turns, forgotten=True)]


def copies(source: BlockPool, dest: BlockPool, turns: int) -> dict[str, Any]:
    """Copy all blocks from one pool to the other: in one piece, by `copy_blocks`, and by that without checksums.

    Raises:
        WrongBytes: if checksums or bytes are not those of the source.
    """
    from_, to = (pool.refs(pool.allocate(pool.num_blocks)) for pool in (source, dest))
    of, into = source.view(), dest.view()
    wanted = [checksum(block) for block in _blocks(source)]

    def plain() -> None:
        into[:] = of

    def copy() -> list[int]:
        return copy_blocks(source, from_, dest, to, should_stop=lambda: False)

    def unverified() -> None:
        with mock.patch.object(handoff, "checksum", lambda block: 0):
            copy()

    def verified() -> None:
        if copy() != wanted:
            raise WrongBytes("copied blocks have other checksums than their sources")

    ways = {PLAIN: plain, UNVERIFIED: unverified, VERIFIED: verified}
    return compared("host to device", "copy", of, into, ways, turns)


def compared(
    path: str, what: str, of: memoryview, into: memoryview, ways: dict[str, Callable[[], Any]], turns: int
) -> dict[str, Any]:
    """Time ways of bringing the same bytes to a place, by turns, and look at what each of them left there.

    Args:
        path: the name of the row.
        what: each way is called, after its own name, in an error.
        of: the bytes.
        into: the place.
        ways: by name.
        turns: of each way.

    Raises:
        WrongBytes: if one of them left other bytes.
    """
    blank = bytes(len(into))

    def clear() -> None:
        into[:] = blank

    seconds = interleaved(ways, turns, clear)
    for name, way in ways.items():
        clear()
        way()
        if into != of:
            raise WrongBytes(f"{name} {what}: other bytes than those of the source")
    return row(path, len(of), seconds)


def reads(stored: Stored, turns: int, *, forgotten: bool) -> dict[str, Any]:
    """Read all blocks from the disk tier into a pool: its files as they are, by the tier, and by it without checks.

    Args:
        stored: what lies on the disk.
        turns: how often each way.
        forgotten: whether the system must fetch the bytes from the disk each time.

    Raises:
        WrongBytes: if checksums or bytes are not those that were written.
    """
    into, blocks, files = stored.dest.view(), _blocks(stored.dest), probe.segments(stored.tier.directory)
    wanted = [checksum(block) for block in _blocks(stored.source)]
    system, blank, fetched = Files(), bytes(len(into)), list[int]()

    def plain() -> None:
        at, before = 0, probe.read_nbytes()
        for path in files:
            at += plain_read(system, path, into[at:])
        after = probe.read_nbytes()
        if before is not None and after is not None:
            fetched.append(after - before)

    def read() -> None:
        if stored.tier.read(stored.hashes, stored.parents, blocks, time.monotonic()) != wanted:
            raise WrongBytes("blocks from the disk have other checksums than those written, or did not come")

    def unverified() -> None:
        with mock.patch.object(reader, "_verified", lambda head, item, shelf: True):
            read()

    def prepare() -> None:
        into[:] = blank
        if forgotten:
            probe.forget(files)

    ways = {PLAIN: plain, UNVERIFIED: unverified, VERIFIED: read}
    seconds = interleaved(ways, turns, prepare)
    for name in (UNVERIFIED, VERIFIED):
        prepare()
        ways[name]()
        if into != stored.source.view():
            raise WrongBytes(f"{name} read: other bytes than those written")
    found = row("disk, forgotten" if forgotten else "disk, remembered", len(into), seconds)
    return found | {"plain_read_from_disk_mb": round(statistics.median(fetched) / 1e6, 1) if fetched else None}


def interleaved(
    ways: Mapping[str, Callable[[], None]], turns: int, prepare: Callable[[], None]
) -> dict[str, list[float]]:
    """Return the seconds of each way, by turns, each first in its turn; one turn more goes before and is not counted.

    `prepare` is called before each way and takes no time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(turns + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            prepare()
            began = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - began)
    return {name: taken[1:] for name, taken in seconds.items()}


def row(path: str, nbytes: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return rates, and their ratios to the plain way; medians over the turns."""
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    out: dict[str, Any] = {"path": path, "mb": round(nbytes / 1e6, 1)}
    out |= {f"{name}_mb_s": round(nbytes / 1e6 / taken, 1) for name, taken in median.items()}
    for name in (UNVERIFIED, VERIFIED):
        value, target = median[PLAIN] / median[name], KV_RATE[name]
        met = verdict(value, target, len(seconds[name]))
        out[name] = {"over_plain": round(value, 3), "target": str(target), "met": met}
    return out


def plain_read(system: Files, path: Path, into: memoryview) -> int:
    """Read a file from its beginning to its end, as far as there is room; returns the bytes read."""
    fd, at = system.open(path), 0
    try:
        while got := system.read(fd, [into[at : at + READ_NBYTES]], at):
            at += got
    finally:
        system.close(fd)
    return at


def _blocks(pool: BlockPool) -> list[memoryview]:
    view, size = pool.view(), pool.block_nbytes
    return [view[at : at + size] for at in range(0, len(view), size)]


def _store(tier: DiskTier, source: BlockPool) -> tuple[list[bytes], list[bytes]]:
    """Write a chain of all blocks of a pool to the disk; returns its hashes and the hash before each."""
    root = root_hash(LAYOUT)
    hashes = chain_hashes([7] * BLOCK_TOKENS * source.num_blocks, root=root)
    parents = [root, *hashes[:-1]]
    blocks = [
        Block(digest, parent, BLOCK_TOKENS, checksum(data), data)
        for digest, parent, data in zip(hashes, parents, _blocks(source), strict=True)
    ]
    parts = [blocks[at : at + SEGMENT_BLOCKS] for at in range(0, len(blocks), SEGMENT_BLOCKS)]
    stored = sum(tier.write(part, time.monotonic()) for part in parts)
    if stored != len(blocks):
        raise WrongBytes(f"{stored} of {len(blocks)} blocks could be written: {tier.health.reason}")
    return hashes, parents
