"""What is done to a running store, in which order: pure, a function of the seed. And how counters of mortals add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from chaos.gremlin import draw

Kind = Literal["flip", "cut", "remove", "freeze", "kill", "full", "read-only", "vanish"]
# How often each comes, of all. Processes need their time to come back; files do not.
WEIGHTS: dict[Kind, int] = {
    "flip": 36, "cut": 14, "remove": 8, "freeze": 24, "kill": 7, "full": 4, "read-only": 4, "vanish": 3,
}  # fmt: skip
ON_FILES: tuple[Kind, ...] = ("flip", "cut", "remove")
ON_PROCESSES: tuple[Kind, ...] = ("freeze", "kill")
SHORT_S, LONG_S = (0.1, 0.9), (1.5, 2.5)
LONG_SHARE = 0.1  # of freezes: long enough to be suspected


@dataclass(frozen=True, slots=True)
class Strike:
    """One thing to do.

    Args:
        kind: what.
        victim: which of those that can be hit, as a share of their number: in [0, 1).
        place: where in a file, likewise.
        bit: which one of a byte.
        seconds: how long it lasts, where it has an end.
    """

    kind: Kind
    victim: float
    place: float
    bit: int
    seconds: float


def plan(seed: int, count: int) -> list[Strike]:
    """Return what to do; a longer plan of the same seed begins like a shorter one."""
    return [_strike(seed, at) for at in range(count)]


def _strike(seed: int, at: int) -> Strike:
    each = [kind for kind, weight in WEIGHTS.items() for _ in range(weight)]
    kind = each[int(draw(seed, at, "kind") * len(each))]
    low, high = LONG_S if draw(seed, at, "long") < LONG_SHARE else SHORT_S
    seconds = low + draw(seed, at, "seconds") * (high - low)
    if kind in ("full", "read-only"):
        seconds += 0.8  # long enough for a write to come
    return Strike(kind, draw(seed, at, "victim"), draw(seed, at, "place"), int(draw(seed, at, "bit") * 8), seconds)


def pick(share: float, names: list[str]) -> str | None:
    """Return one of several by a share in [0, 1)."""
    return names[int(share * len(names))] if names else None


def ripe(share: float, born: Mapping[str, float], now: float, least_s: float) -> str | None:
    """Return one of those that have lived long enough to be killed without being taken for a crash loop."""
    return pick(share, sorted(name for name, since in born.items() if now - since >= least_s))


@dataclass(slots=True)
class Growth:
    """Sums of counters that begin anew whenever their process does."""

    total: Counter[str] = field(default_factory=Counter)
    _last: dict[str, float] = field(default_factory=dict)

    def take(self, values: Mapping[str, float]) -> None:
        """Note what counters stand at now; one that is lower than before has begun anew."""
        for name, value in values.items():
            before = self._last.get(name, 0.0)
            self.total[name] += round(value - before if value >= before else value)
            self._last[name] = value
