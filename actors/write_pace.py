"""When an engine offers computed blocks to its store. Pure.

An offer takes half a dozen messages, and a change that every follower of the store hears of, whatever it holds, and a
copy takes time from running streams. So beside those a few blocks wait for more, and blocks of requests that still run
wait longest: nothing can push them out of the engine's own pool meanwhile, and placement knows what is there.
"""

from __future__ import annotations

import math

BATCH = 64  # blocks that are worth an offer of their own
ENDED_S = 0.5  # after the end of a request its blocks make room for others
RUNNING_S = 3.0  # from then on a death of the engine costs more than the prompt's place in the store


class WritePace:
    """Collects what there is to offer.

    Args:
        batch: blocks of ended requests that are offered at once.
        ended_s: seconds after which fewer are.
        running_s: seconds after which the prompts of running requests are.
    """

    def __init__(self, batch: int = BATCH, ended_s: float = ENDED_S, running_s: float = RUNNING_S) -> None:
        self._batch, self._ended_s, self._running_s = batch, ended_s, running_s
        self._blocks = 0
        self._at = math.inf

    def computed(self, now: float) -> None:
        """Prompts are complete, and their answers have begun."""
        self._at = min(self._at, now + self._running_s)

    def ended(self, blocks: int, now: float) -> None:
        """Requests have ended or were handed on, with so many blocks at most."""
        self._blocks += blocks
        self._at = min(self._at, now + self._ended_s)

    def hurry(self, now: float) -> None:
        """Somebody counts on finding what was computed."""
        self._at = min(self._at, now)

    def due(self, now: float, *, busy: bool) -> bool:
        """Whether to offer now, and what comes from then on is counted anew; `busy` is an engine with work to do."""
        if math.isinf(self._at) or (busy and self._blocks < self._batch and now < self._at):
            return False
        self._blocks, self._at = 0, math.inf
        return True
