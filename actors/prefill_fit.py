"""The prefill cost of a replica, fitted to what its prefills took: pure, a few floats of state."""

from __future__ import annotations

import itertools
import math

from actors.ttft import PrefillCost

# Tokens at which the prior is believed before anything was measured.
_ANCHORS = (64, 512, 4096)
_PRIOR_WEIGHT = 0.05  # of one observation, per anchor
_SCALE = (1.0, 1e3, 1e6)  # units of the three terms, so that the equations are well conditioned


class PrefillFit:
    """Least squares of a + b·T + c·T², with no negative term, over observations that fade.

    Errors are relative to what was measured: short prompts count as much as long ones, and a prefill that took ten
    times as long because the machine was away pulls no harder than one that was a little off.
    """

    def __init__(self, prior: PrefillCost, *, memory: int = 500) -> None:
        """Start with a guess.

        Args:
            prior: believed until observations say otherwise.
            memory: observations after which one counts for a third.

        Raises:
            ValueError: if `memory` is not positive.
        """
        if memory <= 0:
            raise ValueError(f"a memory of {memory} observations")
        self._fade = math.exp(-1.0 / memory)
        self._left = [[0.0] * 3 for _ in range(3)]  # sum of x·xᵀ
        self._right = [0.0] * 3  # sum of x·1, as the errors are relative
        self._count = 0
        self._logs = self._weight = 0.0  # of lengths; how many observations are remembered
        self._cost: PrefillCost | None = prior
        for tokens in _ANCHORS:
            self._add(tokens, 0, max(prior.seconds(tokens), 1e-9), _PRIOR_WEIGHT)

    def observe(self, new: int, prefix: int, seconds: float) -> None:
        """A prefill of `new` tokens after `prefix` took so long; what cannot be (no tokens, no time) is ignored."""
        if new <= 0 or prefix < 0 or not math.isfinite(seconds) or seconds <= 0.0:
            return
        for row in self._left:
            row[:] = [value * self._fade for value in row]
        self._right = [value * self._fade for value in self._right]
        self._add(new, prefix, seconds, 1.0)
        self._logs, self._weight = self._logs * self._fade + math.log(new), self._weight * self._fade + 1.0
        self._count += 1
        self._cost = None

    @property
    def typical(self) -> float:
        """Tokens of a prompt such as most are here (the geometric mean); 0 before the first one.

        There the fit is sure. Where all prompts are about as long it is noise which of its terms they are due to.
        """
        return math.exp(self._logs / self._weight) if self._count else 0.0

    @property
    def cost(self) -> PrefillCost:
        """The fit so far."""
        if self._cost is None:
            a, b, c = (term / scale for term, scale in zip(self._solve(), _SCALE, strict=True))
            self._cost = PrefillCost(a, b, c)
        return self._cost

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        cost = self.cost
        terms = {"fixed_s": cost.fixed_s, "per_token_s": cost.per_token_s, "per_square_s": cost.per_square_s}
        return {"observations_total": self._count, **terms}

    def _add(self, new: int, prefix: int, seconds: float, weight: float) -> None:
        terms = (1.0, new / _SCALE[1], new * (new + 2 * prefix) / _SCALE[2])
        x = [term / seconds for term in terms]
        for i in range(3):
            self._right[i] += weight * x[i]
            for j in range(3):
                self._left[i][j] += weight * x[i] * x[j]

    def _solve(self) -> list[float]:
        """Return the best terms that are not negative: of all choices of terms that are zero, the best feasible one."""
        best, lowest = [0.0, 0.0, 0.0], math.inf
        for size in (3, 2, 1):
            for free in itertools.combinations(range(3), size):
                found = _linear([[self._left[i][j] for j in free] for i in free], [self._right[i] for i in free])
                if found is None or min(found) < 0.0:
                    continue
                terms = [0.0, 0.0, 0.0]
                for i, value in zip(free, found, strict=True):
                    terms[i] = value
                if size == 3:
                    return terms  # nothing had to be zero: no choice is better
                error = self._error(terms)
                if error < lowest:
                    best, lowest = terms, error
        return best

    def _error(self, terms: list[float]) -> float:
        """The sum of squares, less what no choice of terms changes."""
        quadratic = sum(terms[i] * self._left[i][j] * terms[j] for i in range(3) for j in range(3))
        return quadratic - 2.0 * sum(terms[i] * self._right[i] for i in range(3))


def _linear(left: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve by elimination with pivots; None if it is singular."""
    rows = [[*row, value] for row, value in zip(left, right, strict=True)]
    size, largest = len(rows), max(abs(value) for row in left for value in row)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) <= 1e-12 * largest:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [value - factor * top for value, top in zip(rows[row], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
