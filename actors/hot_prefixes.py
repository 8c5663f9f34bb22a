"""Which prefixes are hot, and whether one is worth a copy on another host before somebody asks for it there: pure.

A prompt's stored prefix is counted at a few lengths, so that what many prompts share (a system prompt, say) is found
whatever follows it. Counts halve every `HALF_LIFE_S`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.ttft import Choice, Costs, View, estimate

HALF_LIFE_S = 30.0
LEAST_ASKS = 6.0  # of late, as counts decay: five in quick succession are not hot yet
MOST_COUNTED = 8192  # two megabytes; the least recently asked for is forgotten
LEAST_GAIN_S = 0.002  # two ticks of a tie: less does not change where a prompt goes
# Blocks of a chain at which it is counted, four to a doubling: of what is shared at least four fifths are copied.
STAGES = tuple(n for n in range(2, 1025) if n < 8 or n % (1 << n.bit_length() - 3) == 0)


class HotPrefixes:
    """Decaying counts of chains of block hashes by the last hash of each stage."""

    def __init__(
        self, *, half_life_s: float = HALF_LIFE_S, most: int = MOST_COUNTED, stages: Sequence[int] = STAGES
    ) -> None:
        """Start empty; `stages` are lengths in blocks, ascending."""
        self._half_life_s, self._most, self._stages = half_life_s, most, stages
        self._asked: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # count as of a time

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, hashes: Sequence[bytes], now: float) -> None:
        """Count a prompt whose stored prefix these are."""
        for blocks in self._stages:
            if blocks > len(hashes):
                break
            key = hashes[blocks - 1]
            self._asked[key] = (self._count(key, now) + 1.0, now)
            self._asked.move_to_end(key)
        while len(self._asked) > self._most:
            self._asked.popitem(last=False)

    def hottest(self, hashes: Sequence[bytes], now: float, *, senders: int = 1) -> tuple[int, float]:
        """Return how many blocks of a chain are hot, and how often they were asked for of late; (0, 0.0) if none is.

        Args:
            hashes: the chain.
            now: seconds on the caller's clock.
            senders: among how many counters like this one the requests are spread evenly.
        """
        for blocks in reversed(self._stages):
            if blocks <= len(hashes):
                asks = senders * self._count(hashes[blocks - 1], now)
                if asks >= LEAST_ASKS:
                    return blocks, asks
        return 0, 0.0

    def _count(self, key: bytes, now: float) -> float:
        count, at = self._asked.get(key, (0.0, now))
        return count * math.exp2(-(now - at) / self._half_life_s)


@dataclass(frozen=True, slots=True)
class Place:
    """A host that could serve a hot prefix, seen by its engine that is soonest, as things are now.

    `copy_s` is what bringing the prefix into its store would take, in the background; infinite if it cannot be brought.
    """

    name: str
    view: View
    copy_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Copy:
    """A prefix is to be copied to the store of a host, where a prompt with it would then begin sooner by `gain_s`."""

    to: str
    gain_s: float


def worth_copying(tokens: int, places: Sequence[Place], asks: float, costs: Costs) -> Copy | None:
    """Return where to copy a hot prefix to, if anywhere.

    A copy pays where the next prompt would go for it: the first token would come sooner there than from anywhere as
    things are, be it from a holder behind its queue, by a fetch once it is asked for, or computed. So there is none
    while a holder is idle. What it saves those who will ask, as often as of late, must be more than its copying takes.

    Args:
        tokens: of the prefix.
        places: the hosts; one place has nobody to copy to.
        asks: how often the prefix was asked for of late.
        costs: the cost model of places whose views bring none.
    """
    if len(places) < 2:
        return None
    as_it_is = min(_choice(place.view, tokens, costs).ttft_s for place in places)
    best: Copy | None = None
    for place in places:
        view = place.view
        if view.stale or not math.isfinite(place.copy_s) or (view.memory_tokens or view.stored_tokens) >= tokens:
            continue
        copied = replace(view, stored_tokens=tokens, memory_tokens=tokens, far_tokens=0)
        gain_s = as_it_is - _choice(copied, tokens, costs).ttft_s
        pays = gain_s >= LEAST_GAIN_S and gain_s * asks > place.copy_s
        if pays and (best is None or gain_s > best.gain_s):
            best = Copy(place.name, gain_s)
    return best


def _choice(view: View, tokens: int, costs: Costs) -> Choice:
    """What the prefix and one token more take."""
    return estimate(view, tokens + 1, costs)
