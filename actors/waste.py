"""Work that was done for nothing: tokens computed for requests that did not come to their end here."""

from __future__ import annotations

from engine.live import Spent
from runtime.telemetry import Telemetry

# By the reason of a `Close`; one that is not here ends a request as it should.
CAUSES = {
    "cancel": "cancelled", "edge_gone": "cancelled", "drop": "cancelled", "slow_reader": "cancelled",
    "expire": "expired", "fenced": "redispatched", "refused": "failed", "error": "failed",
}  # fmt: skip


class Waste:
    """Counts tokens by phase and cause."""

    def __init__(self, telemetry: Telemetry) -> None:
        """Make the counter; all of its samples are on the page as zero before the first one."""
        self._tokens = telemetry.counter(
            "wasted_tokens_total", "Tokens computed for requests that were given up here", ("phase", "cause")
        )
        for cause in sorted(set(CAUSES.values())):
            self.add(Spent(), cause)

    def closed(self, spent: Spent, reason: str, *, brought: int = 0) -> None:
        """A request was closed for this reason; `brought`: tokens of its prompts that another engine handed over."""
        cause = CAUSES.get(reason)
        if cause is not None:
            self.add(spent, cause)
            if cause != "redispatched":  # who handed it over still has what it computed, for the next try
                self.add(Spent(prefill=brought), cause)

    def add(self, spent: Spent, cause: str) -> None:
        """So much was wasted."""
        self._tokens.labels("prefill", cause).inc(spent.prefill)
        self._tokens.labels("decode", cause).inc(spent.decode)
