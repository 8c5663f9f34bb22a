"""Whether an engine that has work gets anywhere: pure. Readiness means that a step succeeded lately."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_TICK_S = 0.2  # more than that between two looks is this node's own pause, and says nothing of the engine


@dataclass(slots=True)
class Watchdog:
    """Counts the time in which there is work and no step ends.

    Args:
        limit_s: of that time.
    """

    limit_s: float
    stuck_s: float = 0.0
    _steps: int = -1
    _looked_at: float = 0.0

    def look(self, steps: int, busy: bool, now: float) -> bool:
        """Take a look; returns whether the engine is wedged.

        Args:
            steps: steps that have ended so far, failed ones included.
            busy: whether the engine has sequences to compute.
            now: monotonic seconds.
        """
        passed = min(now - self._looked_at, LONGEST_TICK_S) if self._steps >= 0 else 0.0
        self._looked_at = now
        if steps != self._steps or not busy:
            self._steps, self.stuck_s = steps, 0.0
        else:
            self.stuck_s += passed
        return self.stuck_s > self.limit_s
