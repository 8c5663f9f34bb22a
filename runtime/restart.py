"""When to start a dead child again: pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How patient a supervisor is with a child."""

    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    healthy_after_s: float = 10.0  # a child that lived so long starts the count anew
    crash_loop: int = 5  # exits within `crash_window_s` that make a crash loop
    crash_window_s: float = 60.0
    crash_delay_s: float = 30.0
    asked_after_s: float = 1.0  # a child that lived so long and ends with 0 was asked to leave: no failure


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again in `delay_s`; `crash_loop` says that it keeps dying and is tried only now and then."""

    delay_s: float
    crash_loop: bool


@dataclass(slots=True)
class RestartPolicy:
    """State of one child: exponential backoff with jitter, forgiven after a healthy life, slow in a crash loop."""

    limits: RestartLimits = field(default_factory=RestartLimits)
    failures: int = 0
    crash_loop: bool = False
    _exits: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def exited(self, now: float, lived_s: float, jitter: float, *, code: int = 1) -> Restart:
        """Decide after an exit.

        Args:
            now: monotonic seconds.
            lived_s: how long the child has lived.
            jitter: uniform in [0, 1); spreads the delay over its second half.
            code: the exit code; with 0 a child leaves that was asked to, as in a rolling restart: it comes back at
                once, and that is not held against it.
        """
        limits = self.limits
        if code == 0 and lived_s >= limits.asked_after_s:
            return Restart(limits.first_delay_s * (0.5 + 0.5 * jitter), self.crash_loop)
        if lived_s >= limits.healthy_after_s:
            self.failures = 0
            self._exits.clear()
        self._exits.append(now)
        while self._exits and now - self._exits[0] > limits.crash_window_s:
            self._exits.popleft()
        self.crash_loop = len(self._exits) >= limits.crash_loop
        base = min(limits.first_delay_s * 2.0**self.failures, limits.max_delay_s)
        self.failures += 1
        if self.crash_loop:
            base = limits.crash_delay_s
        return Restart(base * (0.5 + 0.5 * jitter), self.crash_loop)
