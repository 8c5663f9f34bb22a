"""Blocks of preempted sequences, kept in host memory until there is room again.

A preempted sequence computes its KV again, or gets a copy back: whichever the measured pace of copies and the cost
model say is quicker. The area has a cap; what does not fit is computed again. One thread owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.sequence import Key

_FIRST_PACE = 1e-9  # seconds per byte, before any copy was measured
_LEARN = 0.3  # weight of a new measurement


class Parked(NamedTuple):
    """What is kept of one sequence: a slot per block, and how many tokens they hold from position 0."""

    slots: list[int]
    num_tokens: int


class Parking:
    """A bounded slab of block-sized slots; memory is touched only as slots are used."""

    def __init__(self, max_bytes: int, block_nbytes: int, now: Callable[[], float]) -> None:
        """Set the cap.

        Args:
            max_bytes: of memory; 0 parks nothing.
            block_nbytes: bytes of a block.
            now: monotonic seconds, to measure copies.
        """
        self.num_slots = max_bytes // block_nbytes
        self._size = block_nbytes
        self._now = now
        self._slab: memoryview | None = None
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._parked: dict[Key, Parked] = {}
        self._pace = _FIRST_PACE

    def can_park(self, num_blocks: int) -> bool:
        """Whether there is room for so many blocks."""
        return 0 < num_blocks <= len(self._free)

    def seconds(self, num_blocks: int) -> float:
        """Return how long it takes to copy blocks out and, later, back."""
        return 2 * num_blocks * self._size * self._pace

    def park(self, key: Key, pool: memoryview, blocks: Sequence[int], num_tokens: int) -> int:
        """Copy blocks out of the pool; the caller has asked whether there is room. Returns bytes copied."""
        assert key not in self._parked
        if self._slab is None:
            self._slab = memoryview(bytearray(self.num_slots * self._size))
        slots = [self._free.pop() for _ in blocks]
        self._copy(pool, blocks, self._slab, slots)
        self._parked[key] = Parked(slots, num_tokens)
        return len(slots) * self._size

    def num_tokens(self, key: Key) -> int:
        """Return how many tokens of a sequence are parked, from position 0 on."""
        parked = self._parked.get(key)
        return 0 if parked is None else parked.num_tokens

    def restore(self, key: Key, pool: memoryview, blocks: Sequence[int], have: int) -> None:
        """Copy blocks back, but the first `have`, whose content is there, and free their slots.

        Args:
            key: a parked sequence.
            pool: where to.
            blocks: the sequence's blocks, at least as many as are parked.
            have: how many of the first ones are filled already.
        """
        parked = self._parked.pop(key)
        assert self._slab is not None and len(blocks) >= len(parked.slots)
        self._copy(self._slab, parked.slots[have:], pool, blocks[have : len(parked.slots)])
        self._free += parked.slots

    def drop(self, key: Key) -> None:
        """Forget a sequence, if anything is parked of it."""
        parked = self._parked.pop(key, None)
        if parked is not None:
            self._free += parked.slots

    @property
    def nbytes(self) -> int:
        """Bytes parked now."""
        return (self.num_slots - len(self._free)) * self._size

    def check_integrity(self) -> None:
        """Assert that each slot is free or belongs to one sequence."""
        slots = sorted([*self._free, *(slot for parked in self._parked.values() for slot in parked.slots)])
        assert slots == list(range(self.num_slots)), "a parking slot is lost or taken twice"

    @property
    def keys(self) -> set[Key]:
        """Sequences of which something is parked."""
        return set(self._parked)

    def _copy(self, source: memoryview, froms: Sequence[int], dest: memoryview, tos: Sequence[int]) -> None:
        size, started = self._size, self._now()
        for one, other in zip(froms, tos, strict=True):
            dest[other * size : (other + 1) * size] = source[one * size : (one + 1) * size]
        took = self._now() - started
        if took > 0 and froms:
            self._pace += _LEARN * (took / (len(froms) * size) - self._pace)
