"""Which blocks of the host tier are written to disk, and when: a bounded queue behind an admission rule. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from kvstore.disk.policy import SecondTouch

BATCH = 64
DELAY_S = 0.5  # a segment of few blocks costs as much to open as one of many
KEEP_S = 5.0  # a block that is announced but not stored yet
MAX_QUEUED = 4096


class WriteBehind:
    """Blocks wait here until there are enough for a segment, or the first has waited long enough.

    Beyond `max_queued` a block is not queued: it is not on the disk then, which is only a miss.
    """

    def __init__(
        self,
        admission: SecondTouch | None,
        *,
        batch: int = BATCH,
        delay_s: float = DELAY_S,
        keep_s: float = KEEP_S,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """Start empty; without an admission rule every block is worth a place."""
        self._admission = admission
        self._batch, self._delay_s, self._keep_s, self._max = batch, delay_s, keep_s, max_queued
        self._queue: OrderedDict[bytes, float] = OrderedDict()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._queue)

    def touch(self, hashes: Iterable[bytes], now: float, written: Container[bytes]) -> None:
        """These blocks were stored or used; those that are worth it and not written yet are queued."""
        for digest in hashes:
            if digest in written or digest in self._queue:
                continue
            if self._admission is not None and not self._admission.touch(digest):
                continue
            if len(self._queue) >= self._max:
                self.dropped += 1
                continue
            self._queue[digest] = now

    def push(self, hashes: Iterable[bytes], now: float, written: Container[bytes]) -> None:
        """Queue all of these, whatever the rule and the bound: the memory that holds them is about to go."""
        for digest in hashes:
            if digest not in written:
                self._queue.setdefault(digest, now)

    def take(self, now: float, stored: Container[bytes], *, hurry: bool = False) -> list[bytes]:
        """Return the blocks of the next segment, or none while it is worth waiting for more.

        Blocks that are not `stored` (yet) go to the end of the queue, and are forgotten after a while.
        """
        if not self._queue:
            return []
        waited = now - next(iter(self._queue.values()))
        if not hurry and len(self._queue) < self._batch and waited < self._delay_s:
            return []
        out: list[bytes] = []
        for _ in range(len(self._queue)):
            digest, since = self._queue.popitem(last=False)
            if digest in stored:
                out.append(digest)
                if len(out) == self._batch:
                    break
            elif not hurry and now - since < self._keep_s:
                self._queue[digest] = since
        return out
