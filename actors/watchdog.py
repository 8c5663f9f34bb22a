"""Whether an engine that has work gets anywhere: pure. Readiness means that a step succeeded lately."""

from __future__ import annotations

from dataclasses import dataclass

FLOOR_S = 30.0  # kernels may be compiled within a step, and other engines may have the cores
PATIENCE = 10.0  # times the longest step that is expected
LONGEST_TICK_S = 0.2  # more than that between two looks is this node's own pause, and says nothing of the engine


@dataclass(slots=True)
class Watchdog:
    """Counts the time in which there is work and no step ends.

    Args:
        limit_s: the most of that time, whatever the steps take.
        floor_s: the least, however short they are.
    """

    limit_s: float
    floor_s: float = FLOOR_S
    stuck_s: float = 0.0
    _steps: int = -1
    _looked_at: float = 0.0

    def limit(self, longest_s: float) -> float:
        """Return how long is too long where the longest step takes `longest_s`; 0: nobody knows yet."""
        return self.limit_s if longest_s <= 0.0 else min(self.limit_s, max(self.floor_s, PATIENCE * longest_s))

    def look(self, steps: int, busy: bool, now: float, longest_s: float = 0.0) -> bool:
        """Take a look; returns whether the engine is wedged.

        Args:
            steps: steps that have ended so far, failed ones included.
            busy: whether the engine has sequences to compute.
            now: monotonic seconds.
            longest_s: what the longest step is expected to take, 0 if nobody knows yet.
        """
        passed = min(now - self._looked_at, LONGEST_TICK_S) if self._steps >= 0 else 0.0
        self._looked_at = now
        if steps != self._steps or not busy:
            self._steps, self.stuck_s = steps, 0.0
        else:
            self.stuck_s += passed
        return self.stuck_s > self.limit(longest_s)
