"""What is known of published traces, to check a replay against; and what a replay must show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.replay.trace import Trace

HIT_RATE_TOLERANCE = 0.02
BUSY_YET_STABLE = (0.8, 0.95)  # utilisation under least-load; beyond it queues grow without end and ratios mean nothing
COLLAPSE = 10.0  # times our mean


@dataclass(frozen=True, slots=True)
class Facts:
    """One published trace."""

    name: str
    lru: Mapping[str, float]  # token hit rate by capacity
    over_least_load: float | None = None  # how many times better than least-load ours must be, in mean TTFT


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and what it must be."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the figure is within its bounds; one that is no number is not."""
        low = self.least is None or self.value >= self.least
        return low and (self.most is None or self.value <= self.most)

    def row(self) -> dict[str, Any]:
        """Return the fields and the verdict."""
        return {**asdict(self), "met": self.met}


# By number of requests and of prompt tokens, so that a file is known whatever its name.
_KNOWN = {
    (12_031, 144_793_823): Facts(
        "Mooncake conversation",
        {"1M": 0.054, "3M": 0.139, "10M": 0.291, "unlimited": 0.374},
        over_least_load=1.7,
    ),
    (3_993, 61_194_628): Facts(
        "Mooncake synthetic",
        {"1M": 0.145, "3M": 0.315, "10M": 0.577, "unlimited": 0.651},
    ),
}


def facts_of(trace: Trace) -> Facts | None:
    """Return what is known of a trace, or None."""
    return _KNOWN.get((len(trace.arrivals), trace.input_tokens))


@dataclass(slots=True)
class Verdict:
    """Targets collected during a run."""

    targets: list[Target] = field(default_factory=list)

    @property
    def met(self) -> bool:
        """Whether none is missed."""
        return all(target.met for target in self.targets)
