"""How well this node is: its event loop's lag and its connections. Only the well may judge others (R7)."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_LAG_S = 0.2
SETTLE_S = 1.0  # after a lag or a reconnect, what the node missed needs this long to arrive


@dataclass(slots=True)
class Vitals:
    """Pure: lag samples and `now` in, verdicts out."""

    settle_s: float = SETTLE_S
    lag_s: float = 0.0
    max_lag_s: float = 0.0
    _ill_until: float = field(default=0.0)
    _expected: float | None = None

    def tick(self, now: float, period_s: float) -> float:
        """Note that the periodic tick runs at `now`; returns how late it is in seconds."""
        self.lag_s = max(0.0, now - self._expected) if self._expected is not None else 0.0
        self.max_lag_s = max(self.max_lag_s, self.lag_s)
        self._expected = now + period_s
        if self.lag_s >= MAX_LAG_S:
            self._ill_until = now + self.settle_s
        return self.lag_s

    def lag_at(self, now: float) -> float:
        """Return the lag as seen from outside the loop: a tick that is overdue counts with its delay so far."""
        overdue = now - self._expected if self._expected is not None else 0.0
        return max(self.lag_s, overdue, 0.0)

    def well(self, now: float, connected_since: float | None) -> bool:
        """Whether silence of others may count; `connected_since` is nothing while the bus is down."""
        if connected_since is None or now - connected_since < self.settle_s:
            return False
        return now >= self._ill_until and self.lag_at(now) < MAX_LAG_S
