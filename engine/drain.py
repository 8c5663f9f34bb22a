"""How fast an engine's queue drains: prompt tokens per second while any prompt waits or is being computed. Pure.

It holds whatever the queue waits for: the budget of steps, the pace of running streams, free places or free blocks.
"""

from __future__ import annotations

import math

MEMORY_S = 3.0  # what happened so long ago counts for about a third
LEAST_S = 0.05  # of time with a queue before a rate is told
FRESH_S = 5.0  # and how long it is told after that


class DrainRate:
    """Sums of tokens and seconds, the older the lighter."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._tokens = self._seconds = 0.0
        self._since: float | None = None  # the end of the last step, if a queue was left then
        self._last = -math.inf

    def step(self, prompt_tokens: int, started: float, ended: float, queued: bool) -> None:
        """A step is over.

        Args:
            prompt_tokens: of prompts that it computed.
            started: when it began, seconds.
            ended: and when it ended.
            queued: whether a prompt still waits, or is not complete.
        """
        if prompt_tokens or self._since is not None:
            seconds = ended - (self._since if self._since is not None else started)
            keep = math.exp(-max(0.0, seconds) / MEMORY_S)
            self._tokens = self._tokens * keep + prompt_tokens
            self._seconds = self._seconds * keep + seconds
            self._last = ended
        self._since = ended if queued else None

    def rate(self, now: float) -> float:
        """Return tokens per second; 0: not known, or not of late."""
        if self._seconds < LEAST_S or now - self._last > FRESH_S:
            return 0.0
        return self._tokens / self._seconds
