"""When an engine offers computed blocks to its store. Pure.

An offer takes half a dozen messages, and a change that every follower of the store hears of, whatever it holds: beside
running streams a few blocks wait for more. Nobody waits for them meanwhile: they are in the engine's own pool, and
placement knows that.
"""

from __future__ import annotations

BATCH = 64  # blocks that are worth an offer of their own
DELAY_S = 0.5


class WritePace:
    """Collects what there is to offer.

    Args:
        batch: blocks that are offered at once.
        delay_s: seconds after which fewer are.
    """

    def __init__(self, batch: int = BATCH, delay_s: float = DELAY_S) -> None:
        self._batch, self._delay_s = batch, delay_s
        self._blocks = 0
        self._since: float | None = None
        self._now = False

    def computed(self, blocks: int, now: float, *, hurry: bool = False) -> None:
        """There are so many blocks more, at most; with `hurry` somebody counts on finding them soon."""
        self._blocks += blocks
        self._now |= hurry
        if self._since is None:
            self._since = now

    def due(self, now: float, *, busy: bool) -> bool:
        """Whether to offer now, and what comes from then on is counted anew; `busy` is an engine with work to do."""
        if self._since is None:
            return False
        if busy and not self._now and self._blocks < self._batch and now - self._since < self._delay_s:
            return False
        self._blocks, self._since, self._now = 0, None, False
        return True
