"""Copies of hot prefixes ahead of demand in a replayed fleet: the policy of the running system, with a fleet's views.

A copy takes the way between two replicas for as long as it has bytes, and neither of them: as when a transfer actor
makes it. It is there when it ends, and known to the sender a heartbeat later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.copy_budget import CopyBudget
from actors.hot_prefixes import STAGES, HotPrefixes, Place, worth_copying
from actors.replication import AGAIN_S
from actors.ttft import Costs, LoadCost, View
from bench.replay.trace import BLOCK_TOKENS

SHARE = 0.05  # of what one way carries in a minute, for all copies to one replica


@dataclass(frozen=True, slots=True)
class Ordered:
    """Copy the prompt's first blocks to a replica; they are there after so many seconds."""

    to: str
    blocks: int
    seconds: float


class Ahead:
    """Decides for one sender."""

    def __init__(self, names: Sequence[str], copy: LoadCost) -> None:
        """Nothing is hot yet."""
        per_minute = int(SHARE * 60.0 * copy.bytes_per_s)
        self._hot = HotPrefixes(stages=(1, *STAGES))  # blocks of a trace are as long as 32 of ours
        self._copy = copy
        self._budgets = {name: CopyBudget(per_minute=per_minute, in_flight=per_minute) for name in names}
        self._told: dict[tuple[bytes, str], float] = {}
        self.refused = 0

    def placed(self, hashes: Sequence[bytes], views: Sequence[View], costs: Costs, now: float) -> Ordered | None:
        """Count a prompt that was placed with these views; return a copy that is to be made now, if any."""
        stored = max(view.stored_tokens for view in views)
        known = hashes[: stored // BLOCK_TOKENS]
        self._hot.ask(known, now)
        blocks, asks = self._hot.hottest(known, now)
        if blocks == 0:
            return None
        tokens, key = blocks * BLOCK_TOKENS, known[blocks - 1]
        places = [self._place(view, tokens, key, now, on_demand=costs.copy is not None) for view in views]
        copy = worth_copying(tokens, places, asks, replace(costs, copy=None))
        if copy is None:
            return None
        self._told[key, copy.to] = now
        missing = tokens - next(view.stored_tokens for view in views if view.name == copy.to)
        nbytes, budget = int(missing * self._copy.bytes_per_token), self._budgets[copy.to]
        if nbytes > budget.left(now):
            self.refused += 1
            return None
        budget.begin(nbytes, now)
        budget.end(nbytes)
        return Ordered(copy.to, blocks, self._copy.seconds(missing))

    def _place(self, view: View, tokens: int, key: bytes, now: float, *, on_demand: bool) -> Place:
        has = min(view.stored_tokens, tokens)
        takes_s = self._copy.seconds(tokens - has)
        there = replace(view, stored_tokens=has)
        if on_demand and has < tokens:
            there = replace(there, far_tokens=tokens, far_s=takes_s)
        told = now - self._told.get((key, view.name), -math.inf) < AGAIN_S
        return Place(view.name, there, math.inf if told else takes_s)


def is_ahead(placement: str) -> bool:
    """Whether a placement's name asks for copies ahead of demand."""
    return placement.endswith("ahead")
