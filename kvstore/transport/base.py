"""What every way between hosts offers: open a peer, fetch blocks of a pool that it exports into blocks here.

A fetch returns checksums of blocks that lie verified in the destination, or raises, and then says which ones came all
the same. In either case nothing is written to the destination after it has ended (R10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import LayoutMismatch
from kvstore.handoff import Memory
from schemas.messages import BlockRef


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where another host serves, and what proves to each of the two that the other one knows it from the bus."""

    address: str
    key: bytes


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of another host's pool, under a ticket that their owner has told that host to serve.

    Args:
        ticket: names the lease.
        epoch: of the pool that the blocks are in.
        layout, block_nbytes: of that pool.
        blocks: which, by index and generation.
        expected: xxh3_64 of each where it is known already; otherwise the source says.
    """

    ticket: str
    epoch: str
    layout: str
    block_nbytes: int
    blocks: Sequence[BlockRef]
    expected: Sequence[int] = ()


class Peer(Protocol):
    """One other host."""

    def fetch(
        self,
        wanted: Wanted,
        into: Memory,
        refs: Sequence[BlockRef],
        *,
        should_stop: Callable[[], bool],
        deadline: float,
    ) -> list[int]:
        """Copy blocks into `refs` of a pool here, and verify them; called in a thread.

        Returns:
            The xxh3_64 of each block.

        Raises (with `arrived`, see `KvError`, once blocks have come):
            PeerFailed: if the other host is not there, refuses, is too slow, or says what makes no sense.
            LayoutMismatch: if the pools differ in layout or block size.
            TransferAborted: if `should_stop` says so.
            TransferCorrupt: if a block is not what it should be.
            ValueError: if the lists differ in length or an index is outside the pool.
        """
        ...

    def close(self) -> None:
        """Let go of what is open."""
        ...


class Transport(Protocol):
    """A way between hosts."""

    def open(self, address: PeerAddress) -> Peer:
        """Return the peer at an address; nothing is sent before its first fetch."""
        ...


def check(wanted: Wanted, into: Memory, refs: Sequence[BlockRef]) -> None:
    """Check a fetch before anything is asked for.

    Raises:
        LayoutMismatch: if the pools differ in layout or block size.
        ValueError: if the lists differ in length or an index is outside the pool.
    """
    size = into.block_nbytes
    if (wanted.layout, wanted.block_nbytes) != (into.layout, size):
        raise LayoutMismatch(f"{wanted.layout}/{wanted.block_nbytes}", f"{into.layout}/{size}")
    if len(wanted.blocks) != len(refs) or (wanted.expected and len(wanted.expected) != len(refs)):
        raise ValueError(f"{len(wanted.blocks)} blocks wanted, {len(wanted.expected)} checksums, {len(refs)} places")
    nbytes = len(into.view())
    if any(ref.index < 0 or (ref.index + 1) * size > nbytes for ref in refs):
        raise ValueError("a block index is outside its pool")


def runs(indices: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """Return (first, count) of the pieces of a list whose block indices follow one another, `longest` at most."""
    out: list[tuple[int, int]] = []
    first = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or i - first >= longest or indices[i] != indices[i - 1] + 1:
            out.append((first, i - first))
            first = i
    return out
