"""Blocks, tiers and faulty files for the tests of the disk tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.kv import faulty
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


class FaultyFiles(faulty.FaultyFiles):
    """Real files, some of whose operations fail when told to.

    As the campaigns have them, but that a function planned for a read gets the bytes really read, and returns how many
    it says there were.
    """

    def fail(self, operation: str, *what: faulty.Fault) -> None:
        """Add to what happens at the next calls."""
        self.plan(operation, *what)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        said = self._next("read")
        done = Files.read(self, fd, buffers, offset)
        return done if said is None else int(said(done))
