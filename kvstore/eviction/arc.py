"""Adaptive replacement (ARC): keys seen once and keys seen again, and ghosts of both that shift the share of each.

After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. There a miss evicts and
inserts in one step; here the owner evicts first, maybe several keys, and inserts later, so the share is adapted at the
insert.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class ArcPolicy:
    """Least recent first of those seen once, or of those seen again, whichever has more than its share.

    Memory: one entry per stored key and at most `capacity` ghosts: those of keys seen once fill what these leave of the
    capacity, those of keys seen again the rest.
    """

    def __init__(self, capacity: int) -> None:
        """Start empty.

        Args:
            capacity: keys that the owner can store.

        Raises:
            ValueError: if the capacity is not positive.
        """
        if capacity <= 0:
            raise ValueError(f"no lists of {capacity} keys")
        self._capacity = capacity
        self._share = 0.0  # of the capacity, in keys, for those seen once
        self._once: OrderedDict[bytes, None] = OrderedDict()  # the least recent first, as all of these
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._once_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._offered: bytes | None = None

    def insert(self, key: bytes) -> None:
        """A new key is seen once; one that is remembered is seen again, and its list was too small."""
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if key in self._once or key in self._again:
            self.touch(key)
        elif key in self._once_ghosts:
            self._share = min(self._capacity, self._share + max(1.0, again / once))
            del self._once_ghosts[key]
            self._again[key] = None
        elif key in self._again_ghosts:
            self._share = max(0.0, self._share - max(1.0, once / again))
            del self._again_ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None
            self._trim()

    def touch(self, key: bytes) -> None:
        """A used key is seen again, and the most recent of those."""
        if key in self._once:
            del self._once[key]
            self._again[key] = None
        elif key in self._again:
            self._again.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Forget a key; one that was evicted is remembered in the list of ghosts of its kind."""
        evicted = key == self._offered
        if evicted:
            self._offered = None
        if key in self._once:
            del self._once[key]
            if evicted:
                self._once_ghosts[key] = None
        elif key in self._again:
            del self._again[key]
            if evicted:
                self._again_ghosts[key] = None
        self._trim()

    def victim(self, can_go: Callable[[bytes], bool]) -> bytes | None:
        """Return the least recent key that can go of the list that has more than its share, or else of the other."""
        lists = (self._once, self._again) if len(self._once) > self._share else (self._again, self._once)
        found = next((key for keys in lists for key in keys if can_go(key)), None)
        self._offered = found
        return found

    def _trim(self) -> None:
        room = max(0, self._capacity - len(self._once))
        while len(self._once_ghosts) > room:
            self._once_ghosts.popitem(last=False)
        while len(self._once_ghosts) + len(self._again_ghosts) > self._capacity:
            (self._again_ghosts or self._once_ghosts).popitem(last=False)

    def statistics(self) -> dict[str, float]:
        """Return gauges by name; `share` is the number of keys that may be seen once."""
        return {
            "keys": len(self._once) + len(self._again),
            "once": len(self._once),
            "again": len(self._again),
            "share": self._share,
            "ghosts": len(self._once_ghosts) + len(self._again_ghosts),
        }
