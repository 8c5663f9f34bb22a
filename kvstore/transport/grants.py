"""What this host serves to others: the blocks of a ticket, for as long as their owner lends them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schemas.messages import BlockRef, PoolHandle

MAX_GRANTS = 4096


@dataclass(slots=True, eq=False)
class Grant:
    """Blocks of one pool; generations by index. The owner keeps them until `until`, seconds of the clock here."""

    pool: PoolHandle
    generations: dict[int, int]
    until: float

    def covers(self, indices: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether all these blocks are lent under these generations."""
        mine = self.generations
        return all(mine.get(index) == wanted for index, wanted in zip(indices, generations, strict=True))


class Grants:
    """Grants by ticket, for the loop that is told of them and the threads that serve.

    A full table takes no new ones: whoever comes with their tickets gets nothing, which is a miss.
    """

    def __init__(self, now: Callable[[], float], *, capacity: int = MAX_GRANTS) -> None:
        """Start empty; `now` is called from any thread."""
        self._now, self._capacity = now, capacity
        self._grants: dict[str, Grant] = {}
        self._changed = threading.Condition()
        self.refused = 0

    def __len__(self) -> int:
        return len(self._grants)

    def give(self, ticket: str, pool: PoolHandle, blocks: Sequence[BlockRef], until: float) -> bool:
        """Serve these blocks from now on; false if the table is full. The same blocks again renew the grant."""
        grant = Grant(pool, {ref.index: ref.generation for ref in blocks}, until)
        with self._changed:
            known = self._grants.get(ticket)
            if known is not None and (known.pool, known.generations) == (pool, grant.generations):
                known.until = until  # who is being served goes on
                return True
            if ticket not in self._grants and len(self._grants) >= self._capacity:
                self.refused += 1
                return False
            self._grants[ticket] = grant
            self._changed.notify_all()
            return True

    def revoke(self, ticket: str) -> None:
        """Serve them no longer."""
        with self._changed:
            self._grants.pop(ticket, None)

    def drop_pool(self, epoch: str) -> None:
        """The owner of a pool is gone."""
        with self._changed:
            self._grants = {t: g for t, g in self._grants.items() if g.pool.epoch != epoch}

    def expire(self) -> None:
        """Forget what is over."""
        now = self._now()
        with self._changed:
            self._grants = {t: g for t, g in self._grants.items() if g.until > now}

    def wait(self, ticket: str, limit_s: float) -> Grant | None:
        """Return a ticket's grant; one that is not known may still be on its way for so long."""
        with self._changed:
            self._changed.wait_for(lambda: ticket in self._grants, limit_s)
            return self._grants.get(ticket)

    def holds(self, ticket: str, grant: Grant) -> bool:
        """Whether this very grant is still in force."""
        return self._grants.get(ticket) is grant and self._now() < grant.until
