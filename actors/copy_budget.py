"""How much may be copied ahead of demand: pure."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
MOST_NOTED = 2048  # copies in a window; more are refused


class CopyBudget:
    """Bytes of copies in any minute, and of those under way."""

    def __init__(self, *, per_minute: int, in_flight: int) -> None:
        """Nothing has been copied yet."""
        self._per_minute, self._most = per_minute, in_flight
        self._noted: deque[tuple[float, int]] = deque()
        self._spent = self._flying = 0

    def left(self, now: float) -> int:
        """Return how many bytes may begin to be copied now."""
        while self._noted and now - self._noted[0][0] >= WINDOW_S:
            self._spent -= self._noted.popleft()[1]
        if len(self._noted) >= MOST_NOTED:
            return 0
        return max(0, min(self._per_minute - self._spent, self._most - self._flying))

    def begin(self, nbytes: int, now: float) -> None:
        """Count a copy that begins; one that fails counts all the same, for its bytes may have travelled."""
        assert nbytes <= self.left(now), "more is copied than may be"
        self._noted.append((now, nbytes))
        self._spent += nbytes
        self._flying += nbytes

    def end(self, nbytes: int) -> None:
        """A copy is over, whatever came of it."""
        self._flying -= nbytes
        assert self._flying >= 0, "a copy ended twice"
