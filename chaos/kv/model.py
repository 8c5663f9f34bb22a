"""What every stored block must hold, and the book of what was done to a store and what came of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvstore.block import BLOCK_TOKENS, chain_hashes, root_hash
from kvstore.disk.tier import Block, DiskTier
from kvstore.handoff import checksum
from kvstore.record import HEADER_NBYTES

NBYTES = 512  # of a block
STRIDE = HEADER_NBYTES + NBYTES
LAYOUT = "chaos-1"
HOST = "here"
ROOT = root_hash("chaos")
PLENTY = 1 << 20
KEPT = 20  # texts of violations


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive blocks by their hashes, and the hash before each."""

    hashes: list[bytes]
    parents: list[bytes]

    def __len__(self) -> int:
        return len(self.hashes)


def chain(name: int, length: int) -> Chain:
    """Return a chain that is like no other of another name."""
    hashes = chain_hashes([name] * BLOCK_TOKENS * length, root=ROOT)
    return Chain(hashes, [ROOT, *hashes[:-1]])


def content(digest: bytes) -> bytes:
    """Return the bytes that a block of this hash must hold, in every tier, for ever: no two hashes have the same."""
    return (digest * (NBYTES // len(digest) + 1))[:NBYTES]


def blocks(of: Chain) -> list[Block]:
    """Return a chain's blocks as they are given to a disk tier."""
    out = []
    for digest, parent in zip(of.hashes, of.parents, strict=True):
        data = memoryview(content(digest))
        out.append(Block(digest, parent, BLOCK_TOKENS, checksum(data), data))
    return out


class Checked(Protocol):
    """Whatever has a ledger."""

    def check_integrity(self) -> None: ...


@dataclass(slots=True)
class Tally:
    """What was done, and what was found. A fault is effective if it struck: things went otherwise than without it."""

    performed: Counter[str] = field(default_factory=Counter)
    effective: Counter[str] = field(default_factory=Counter)
    blocks_compared: int = 0
    num_wrong: int = 0
    ledgers: int = 0
    num_broken: int = 0
    violations: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def fault(self, kind: str, *, effective: bool) -> None:
        """Note a fault."""
        self.performed[kind] += 1
        self.effective[kind] += effective

    def compare(self, digest: bytes, data: bytes | bytearray | memoryview, where: str) -> bool:
        """Compare what was read with what the model says."""
        self.blocks_compared += 1
        if bytes(data) == content(digest):
            return True
        self.num_wrong += 1
        self._say(f"{where}: a block has wrong bytes")
        return False

    def expect(self, holds: bool, what: str) -> bool:
        """Note a violation unless it holds."""
        if not holds:
            self.num_broken += 1
            self._say(what)
        return holds

    def balance(self, *ledgers: Checked) -> None:
        """Check ledgers: what was allocated and not freed is in use, and whose it is."""
        for ledger in ledgers:
            self.ledgers += 1
            try:
                ledger.check_integrity()
            except AssertionError as exc:
                self.expect(False, f"the ledger of a {type(ledger).__name__} does not balance: {exc}")

    def add(self, other: Tally) -> None:
        """Take another book's entries over."""
        self.performed += other.performed
        self.effective += other.effective
        self.blocks_compared += other.blocks_compared
        self.num_wrong += other.num_wrong
        self.ledgers += other.ledgers
        self.num_broken += other.num_broken
        self.violations = (self.violations + other.violations)[:KEPT]
        self.skipped |= other.skipped

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.num_wrong and not self.num_broken

    def _say(self, what: str) -> None:
        if len(self.violations) < KEPT:
            self.violations.append(what)


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a campaign takes place: a folder on a disk, one in shared memory, and its own generator."""

    disk: Path
    memory: Path
    rng: random.Random


def open_tier(directory: Path, epoch: str = "e1", *, now: float = 0.0, **options: Any) -> DiskTier:
    """Return an open disk tier.

    Raises:
        DiskBusy: if another owner lives.
    """
    merged: dict[str, Any] = {"layout": LAYOUT, "block_nbytes": NBYTES, "max_nbytes": PLENTY, **options}
    tier = DiskTier(directory, epoch=epoch, **merged)
    tier.open(now)
    return tier


@contextmanager
def opened(directory: Path, epoch: str = "e1", **options: Any) -> Iterator[DiskTier]:
    """Yield an open disk tier that is closed at the end."""
    tier = open_tier(directory, epoch, **options)
    try:
        yield tier
    finally:
        tier.close()


def read(tier: DiskTier, of: Chain, tally: Tally, *, now: float = 0.0) -> int:
    """Read a chain into poisoned memory and compare what came; returns how many blocks did."""
    memory = bytearray(b"\xee" * NBYTES * len(of))
    into = [memoryview(memory)[i * NBYTES : (i + 1) * NBYTES] for i in range(len(of))]
    sums = tier.read(of.hashes, of.parents, into, now)
    for digest, data, total in zip(of.hashes, into, sums, strict=False):
        if tally.compare(digest, data, "disk"):
            tally.expect(total == checksum(data), "disk: a checksum is not that of the bytes")
    return len(sums)


def heals(tier: DiskTier, of: Chain, tally: Tally, *, now: float) -> bool:
    """Probe, read and write until the whole chain is there again; false if it does not come."""
    for turn in range(len(of) + 1):
        at = now + 100.0 * turn
        tier.probe(at)
        if read(tier, of, tally, now=at) == len(of):
            return True
        tier.write(blocks(of), at)
    return read(tier, of, tally, now=now) == len(of)


def segments(tier: DiskTier) -> list[Path]:
    """Return the tier's segment files, oldest first."""
    return sorted(tier.folder.glob("segment-*"))


def leftovers(tier: DiskTier) -> list[Path]:
    """Return unfinished files."""
    return sorted(tier.folder.glob("staging-*"))
