"""What every eviction policy does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders stored keys by their worth. Keys are block hashes.

    The owner stores and evicts; a policy only ranks. It asks `victim`, drops that key and says `remove`: a key that is
    removed after it was the last victim counts as evicted, any other as deleted, which is nothing to remember. Every
    call takes constant time on average, `victim` besides that a look at each key in its way that cannot go.
    """

    def insert(self, key: bytes) -> None:
        """A new key is stored; a key that is stored already is touched."""
        ...

    def touch(self, key: bytes) -> None:
        """A stored key was used; others are ignored."""
        ...

    def remove(self, key: bytes) -> None:
        """A key is gone; one that is not stored is ignored."""
        ...

    def victim(self, can_go: Callable[[bytes], bool]) -> bytes | None:
        """Return the key that should go next among those that can, None only if none can; it stays until removed."""
        ...

    def statistics(self) -> dict[str, float]:
        """Return gauges by name: `keys` stored and `ghosts` remembered at least."""
        ...
