"""Blocks, tiers and faulty files for the tests of the disk tier."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.block import BLOCK_TOKENS, chain_hashes, root_hash
from kvstore.disk.files import Files
from kvstore.disk.tier import Block, DiskTier
from kvstore.handoff import checksum

NBYTES = 512
STRIDE = 256 + NBYTES
LAYOUT = "rows-1"
ROOT = root_hash("r")
PLENTY = 1 << 20


def chain(name: int, length: int) -> tuple[list[bytes], list[bytes]]:
    """Return hashes and parents of a chain."""
    hashes = chain_hashes([name] * BLOCK_TOKENS * length, root=ROOT)
    return hashes, [ROOT, *hashes[:-1]]


def content(digest: bytes) -> bytes:
    """Return the bytes that a block of this hash has: no two blocks have the same."""
    return (digest * (NBYTES // len(digest) + 1))[:NBYTES]


def blocks(name: int, length: int, first: int = 0) -> list[Block]:
    """Return the blocks of a chain from a position on."""
    hashes, parents = chain(name, length)
    out = []
    for digest, parent in list(zip(hashes, parents, strict=True))[first:]:
        data = memoryview(content(digest))
        out.append(Block(digest, parent, BLOCK_TOKENS, checksum(data), data))
    return out


def make(directory: Path, epoch: str = "e1", *, now: float = 0.0, **options: Any) -> DiskTier:
    """Return an open tier."""
    options = {"layout": LAYOUT, "block_nbytes": NBYTES, "max_nbytes": PLENTY, **options}
    tier = DiskTier(directory, epoch=epoch, **options)
    tier.open(now)
    return tier


def served(tier: DiskTier, name: int, length: int, now: float = 0.0) -> int:
    """Read a chain and return how many blocks came, each of which must have its very bytes."""
    hashes, parents = chain(name, length)
    memory = bytearray(b"\xee" * NBYTES * length)
    into = [memoryview(memory)[i * NBYTES : (i + 1) * NBYTES] for i in range(length)]
    sums = tier.read(hashes, parents, into, now)
    for i, total in enumerate(sums):
        assert bytes(into[i]) == content(hashes[i]), f"block {i} has wrong bytes"
        assert total == checksum(into[i])
    return len(sums)


def segments(tier: DiskTier) -> list[Path]:
    """Return the tier's segment files, oldest first."""
    return sorted(tier.folder.glob("segment-*"))


def leftovers(tier: DiskTier) -> list[Path]:
    """Return unfinished files."""
    return sorted(tier.folder.glob("staging-*"))


class FaultyFiles(Files):
    """Real files, some of whose operations fail when told to.

    `plan` maps the name of an operation to what happens at its next calls: None lets one pass, an errno refuses one,
    a callable gets the real result and returns another.
    """

    def __init__(self) -> None:
        self.plan: dict[str, list[int | Callable[[Any], Any] | None]] = {}

    def fail(self, operation: str, *what: int | Callable[[Any], Any] | None) -> None:
        """Add to the plan."""
        self.plan.setdefault(operation, []).extend(what)

    def _next(self, operation: str) -> Callable[[Any], Any]:
        planned = self.plan.get(operation)
        fault = planned.pop(0) if planned else None
        if isinstance(fault, int):
            raise OSError(fault, errno.errorcode[fault])
        return fault if fault is not None else (lambda result: result)

    def create(self, path: Path) -> int:
        self._next("create")
        return super().create(path)

    def open(self, path: Path, *, write: bool = False) -> int:
        self._next("open")
        return super().open(path, write=write)

    def write(self, fd: int, buffers: Sequence[bytes | memoryview]) -> int:
        change = self._next("write")
        limit = change(sum(map(len, buffers)))
        given: list[memoryview] = []
        for buffer in buffers:
            given.append(memoryview(buffer)[: max(0, limit)])
            limit -= len(buffer)
        return super().write(fd, [g for g in given if len(g)]) if any(map(len, given)) else 0

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        change = self._next("read")
        return int(change(super().read(fd, buffers, offset)))

    def rename(self, old: Path, new: Path) -> None:
        self._next("rename")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._next("unlink")
        super().unlink(path)

    def sync(self, fd: int) -> None:
        self._next("sync")
        super().sync(fd)
