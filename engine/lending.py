"""Blocks that the core has lent to writers outside: reservations for hand-offs, and loads from a store's tier."""

from __future__ import annotations

from typing import NamedTuple

from engine.sequence import Key
from kvstore.pool import BlockPool


class Reservation(NamedTuple):
    """Blocks that wait for one prompt's KV, and how many sequences will start from them."""

    blocks: list[int]
    num_choices: int


class Lending:
    """The ledger of lent blocks. They cannot be preempted: somebody may be writing."""

    def __init__(self, pool: BlockPool) -> None:
        """Start with nothing lent."""
        self._pool = pool
        self.expected: dict[Key, Reservation] = {}
        self.loads: dict[Key, list[int]] = {}

    def expect(self, key: Key, num_blocks: int, num_choices: int) -> list[int]:
        """Reserve blocks; the caller has asked whether there is room."""
        self.expected[key] = Reservation(self._pool.allocate(num_blocks), num_choices)
        return self.expected[key].blocks

    def begin_load(self, key: Key, num_blocks: int) -> list[int]:
        """Lend blocks to load into; the caller has asked whether there is room."""
        self.loads[key] = self._pool.allocate(num_blocks)
        return self.loads[key]

    def end_load(self, key: Key, blocks: list[int], hashes: list[bytes]) -> bool:
        """Turn loaded blocks into cached ones; false if these are not lent."""
        if self.loads.get(key) != blocks:
            return False
        del self.loads[key]
        for block, digest, parent in zip(blocks, hashes, [b"", *hashes], strict=False):
            self._pool.publish(block, digest, parent)
        self._pool.free(blocks)
        return True

    def cancel(self, key: Key, writer: str | None) -> bool:
        """Take a reservation back; false if there is none."""
        reservation = self.expected.pop(key, None)
        if reservation is not None:
            self.give_back(reservation.blocks, writer)
        return reservation is not None

    def cancel_load(self, key: Key, writer: str | None) -> None:
        """Take blocks of a load back, if any."""
        blocks = self.loads.pop(key, None)
        if blocks is not None:
            self.give_back(blocks, writer)

    def give_back(self, blocks: list[int], writer: str | None) -> None:
        """Free blocks, or quarantine them while `writer` may still use them."""
        if writer is None:
            self._pool.free(blocks)
            return
        # Blocks that others use as well were only read by the transfer: it cannot harm them.
        own = [block for block in blocks if self._pool.num_reclaimable([block])]
        shared = [block for block in blocks if not self._pool.num_reclaimable([block])]
        self._pool.quarantine(own, writer)
        self._pool.free(shared)

    @property
    def num_choices(self) -> int:
        """Sequences that will start from reservations."""
        return sum(r.num_choices for r in self.expected.values())

    def blocks(self) -> list[int]:
        """Return all lent blocks."""
        out = [block for r in self.expected.values() for block in r.blocks]
        return out + [block for blocks in self.loads.values() for block in blocks]
