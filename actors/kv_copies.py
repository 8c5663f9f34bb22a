"""What a store is to copy from other hosts ahead of demand: a short queue under a budget, pure.

A prefix is copied in parts, one at a time, so that a fetch on demand never waits behind more than one part.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from actors.copy_budget import CopyBudget
from schemas import messages as m
from schemas.subjects import Ref

PART_S = 0.1  # of the way that one part takes
PART_NBYTES = 32 << 20  # and the most bytes of one, which are all that is under way
MOST_WANTED = 8  # prefixes in the queue; more are refused
WANTED_S = 30.0  # then somebody has asked for it, or it is not hot any more
LEAST_BLOCKS = 2


@dataclass(slots=True, eq=False)
class Wanted:
    """A prefix to be copied, as a lookup that nobody waits for, and how much of it was here before the last part."""

    lookup: m.KvLookup
    until: float
    held: int = -1
    begun: bool = False


class Copies:
    """The queue of one store.

    Args:
        per_minute: most bytes that are copied in any minute; 0: nothing is copied ahead of demand.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._budget = CopyBudget(per_minute=per_minute, in_flight=PART_NBYTES)
        self._queue: deque[Wanted] = deque()
        self._counts = dict.fromkeys("copies copied copied_bytes copies_refused copies_failed".split(), 0)

    def add(self, msg: m.KvPrefetch, ref: Ref, now: float) -> None:
        """A prefix is hot; one that waits already is not added again."""
        if not msg.hashes or len(msg.hashes) != len(msg.parents):
            return
        if any(wanted.lookup.hashes[-1] == msg.hashes[-1] for wanted in self._queue):
            return
        if len(self._queue) >= MOST_WANTED or self._budget.left(now) == 0:
            self._counts["copies_refused"] += 1
            return
        lookup = m.KvLookup(ticket="", hashes=msg.hashes, parents=msg.parents, reply=ref, owner=msg.owner)
        self._queue.append(Wanted(lookup, now + WANTED_S))

    def first(self, now: float) -> Wanted | None:
        """Return what is to be copied now."""
        while self._queue and now >= self._queue[0].until:
            self._queue.popleft()
            self._counts["copies_failed"] += 1
        return self._queue[0] if self._queue else None

    def part(self, wanted: Wanted, held: int, block_nbytes: int, now: float) -> int:
        """Return how many blocks of a prefix may come next, or drop it: it is here, got stuck, or is over the cap.

        Args:
            wanted: the first of the queue.
            held: how many of its blocks are here.
            block_nbytes: of each.
        """
        if held >= len(wanted.lookup.hashes):
            self._queue.popleft()
            return 0
        if held <= wanted.held:
            return self.drop(wanted)
        wanted.held = held
        count = min(len(wanted.lookup.hashes) - held, self._budget.left(now) // block_nbytes)
        if count < LEAST_BLOCKS:
            self._queue.popleft()
            self._counts["copies_refused"] += 1
            return 0
        return count

    def drop(self, wanted: Wanted) -> int:
        """Nobody has it, or there is no room for it here; returns 0."""
        self._queue.remove(wanted)
        self._counts["copies_failed"] += 1
        return 0

    def begin(self, wanted: Wanted, nbytes: int, now: float) -> None:
        """A part is on its way."""
        self._budget.begin(nbytes, now)
        self._counts["copies"] += not wanted.begun
        wanted.begun = True

    def came(self, blocks: int, nbytes: int) -> None:
        """So much of a part is here."""
        self._counts["copied"] += blocks
        self._counts["copied_bytes"] += nbytes

    def end(self, wanted: Wanted, nbytes: int, *, failed: bool) -> None:
        """A part is over; what failed is not tried again."""
        self._budget.end(nbytes)
        if failed and wanted in self._queue:
            self.drop(wanted)

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        return {**{f"{name}_total": count for name, count in self._counts.items()}, "copies_waiting": len(self._queue)}
