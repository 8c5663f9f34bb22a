"""Whether times tell two kinds of requests apart: a rank test, pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SUSPICIOUS = 1e-3  # chances below it are not taken for chance: one honest run in a thousand fails


@dataclass(frozen=True, slots=True)
class Telling:
    """What somebody who sees one time of each kind learns.

    Args:
        sooner: how often the first kind's is the smaller one; 0.5 where times tell nothing.
        chance: of a difference at least as large between times that tell nothing.
    """

    sooner: float
    chance: float

    @property
    def tells(self) -> bool:
        """Whether this is more than chance."""
        return self.chance < SUSPICIOUS


def compare(one: Sequence[float], two: Sequence[float]) -> Telling:
    """Compare two samples by the ranks of their values (Mann and Whitney's U, normal approximation, ties corrected).

    Raises:
        ValueError: with fewer than eight values on a side; the approximation is none then.
    """
    m, n = len(one), len(two)
    if min(m, n) < 8:
        raise ValueError(f"{m} and {n} values: at least 8 of each are needed")
    ordered = sorted([(value, True) for value in one] + [(value, False) for value in two])
    ranks = ties = 0.0  # the sum of the first kind's ranks
    at = 0
    while at < len(ordered):
        end = at
        while end < len(ordered) and ordered[end][0] == ordered[at][0]:
            end += 1
        count = end - at
        ranks += (at + 1 + end) / 2 * sum(first for _, first in ordered[at:end])
        ties += count**3 - count
        at = end
    larger = ranks - m * (m + 1) / 2  # pairs in which the first kind's is the larger one, equal ones by half
    total = m + n
    variance = m * n / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0.0:
        return Telling(0.5, 1.0)
    z = max(0.0, abs(larger - m * n / 2) - 0.5) / math.sqrt(variance)
    return Telling(1 - larger / (m * n), math.erfc(z / math.sqrt(2)))
