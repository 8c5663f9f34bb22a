"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class LruPolicy:
    """Least recently used first. Memory: one entry per stored key."""

    def __init__(self) -> None:
        """Start empty."""
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, key: bytes) -> None:
        """A new key is the most recent one."""
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: bytes) -> None:
        """A used key becomes the most recent one."""
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Forget a key."""
        self._order.pop(key, None)

    def victim(self, can_go: Callable[[bytes], bool]) -> bytes | None:
        """Return the least recently used key that can go."""
        return next((key for key in self._order if can_go(key)), None)

    def statistics(self) -> dict[str, float]:
        """Return gauges by name."""
        return {"keys": len(self._order), "ghosts": 0}
