"""Three queues (S3-FIFO): new keys prove themselves in a small one, known ones live in the main one, ghosts remember.

After Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

MOST_USES = 3  # counted per key; more would keep a key for longer after its last use


class S3FifoPolicy:
    """A new key enters the small queue; at its end a used one moves to the main queue, an unused one goes.

    A key that comes back while it is remembered enters the main queue at once. There a key that was used since it last
    came to the end starts again with one use less. Memory: one entry per stored key and at most `capacity` less the
    small queue's share of ghosts.
    """

    def __init__(self, capacity: int, *, small: float = 0.5) -> None:
        """Start empty.

        Args:
            capacity: keys that the owner can store.
            small: share of the capacity for keys that are new. The paper has a tenth; the next turn of a conversation
                takes longer to come than a tenth lasts, as a replay shows (`bench.replay`).

        Raises:
            ValueError: if the capacity is not positive or the share not between 0 and 1.
        """
        if capacity <= 0 or not 0.0 < small < 1.0:
            raise ValueError(f"no queues of {capacity} keys with {small} of them new")
        self._small_target = max(1, int(capacity * small))
        self._max_ghosts = max(1, capacity - self._small_target)
        self._small: OrderedDict[bytes, int] = OrderedDict()  # key → uses, the oldest first
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._offered: bytes | None = None

    def insert(self, key: bytes) -> None:
        """A new key is small, one that is remembered is main."""
        if key in self._small or key in self._main:
            self.touch(key)
        elif key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touch(self, key: bytes) -> None:
        """Count a use; the order stays."""
        queue = self._small if key in self._small else self._main
        uses = queue.get(key)
        if uses is not None and uses < MOST_USES:
            queue[key] = uses + 1

    def remove(self, key: bytes) -> None:
        """Forget a key; one that was evicted from the small queue is remembered."""
        if self._small.pop(key, None) is None:
            self._main.pop(key, None)
        elif key == self._offered:
            self._ghosts[key] = None
            if len(self._ghosts) > self._max_ghosts:
                self._ghosts.popitem(last=False)
        if key == self._offered:
            self._offered = None

    def victim(self, can_go: Callable[[bytes], bool]) -> bytes | None:
        """Return the oldest unused key: of the small queue while that has more than its share, else of the main one."""
        if len(self._small) >= self._small_target:
            found = self._from_small(can_go)
            found = self._from_main(can_go) if found is None else found
        else:
            found = self._from_main(can_go)
            found = self._from_small(can_go) if found is None else found
            # What was used in the small queue has moved over, and may be all that can go.
            found = self._from_main(can_go) if found is None else found
        self._offered = found
        return found

    def _from_small(self, can_go: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(len(self._small)):
            key, uses = next(iter(self._small.items()))
            if uses > 0:
                del self._small[key]
                self._main[key] = 0
            elif can_go(key):
                return key
            else:
                self._small.move_to_end(key)
        return None

    def _from_main(self, can_go: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(len(self._main) * (MOST_USES + 1)):
            key, uses = next(iter(self._main.items()))
            if uses == 0 and can_go(key):
                return key
            self._main[key] = max(0, uses - 1)
            self._main.move_to_end(key)
        return None

    def statistics(self) -> dict[str, float]:
        """Return gauges by name."""
        small, main = len(self._small), len(self._main)
        return {"keys": small + main, "small": small, "main": main, "ghosts": len(self._ghosts)}
