"""How long each replica is busy: its last report, and what was sent there since. Pure; seconds of any one clock."""

from __future__ import annotations

from collections import deque

MAX_RECENT = 1024  # sends remembered per replica; the oldest of more count only until the next report


class Backlog:
    """One sender's view of the work that waits at each replica.

    Reports are as old as a heartbeat. Without what was sent since, all that arrive between two heartbeats go to one
    replica: the one that was idle.
    """

    def __init__(self, *, transit_s: float = 0.0, keep_s: float = 2.0) -> None:
        """Start empty.

        Args:
            transit_s: what was sent so shortly before a report is not in it: it was still on its way.
            keep_s: how old a report may be when it arrives; older sends are forgotten.
        """
        self._transit_s = transit_s
        self._keep_s = keep_s + transit_s
        self._until: dict[str, float] = {}
        self._recent: dict[str, deque[tuple[float, float]]] = {}

    def heard(self, name: str, queued_s: float, taken: float) -> None:
        """A replica reports that it had `queued_s` of work at the time `taken`."""
        until = taken + queued_s
        for at, seconds in self._recent.get(name, ()):
            if at > taken - self._transit_s:
                until = max(until, at) + seconds
        self._until[name] = until

    def sent(self, name: str, seconds: float, now: float) -> None:
        """Work of about so many seconds was sent to a replica."""
        self._until[name] = max(self._until.get(name, now), now) + seconds
        recent = self._recent.setdefault(name, deque(maxlen=MAX_RECENT))
        while recent and recent[0][0] < now - self._keep_s:
            recent.popleft()
        recent.append((now, seconds))

    def queued_s(self, name: str, now: float) -> float:
        """Return how long work that is sent now would wait."""
        return max(0.0, self._until.get(name, now) - now)

    def forget(self, name: str) -> None:
        """A replica is gone."""
        self._until.pop(name, None)
        self._recent.pop(name, None)

    def statistics(self) -> dict[str, float]:
        """Return gauges by name."""
        return {"replicas": len(self._until), "recent": sum(len(recent) for recent in self._recent.values())}
