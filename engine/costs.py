"""What a step takes: a model fitted to measured steps, and what follows from it. Pure.

seconds = a + b·tokens + c·attended, where `attended` sums, over the tokens of a step, the context that each looks at.
Least squares with relative errors, fitted online. Steps are kept apart by size and forgotten within their size alone:
an hour of decoding must not make the engine forget what a prompt costs. What the line misses (kernels change with the
size of a batch) is a factor per size, learnt as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

LEAST_CHUNK = 8  # tokens of prompts that a step takes whatever the pace, so that prompts progress
GRAIN = 4  # chunks are multiples of it: the kernels take rows by fours
STRETCH = 1.8  # a step with a prompt's chunk may take so many times a step without
CROWD = 1.25  # and up to so much more again in a crowd of prompts
LENGTHEN = 1.125  # a step with one tenant's prompt may take so many times as long with those of others beside it
SHORT_RATE = 0.85  # of the best rate of prompts that shorter steps must still reach
SHORTEST = 16  # tokens of such steps
_KEEP = 0.95  # weight of the past at each new step of a size
_REFIT = 8  # steps between fits, once there are a few
_RIDGE = 1e-6
_SCALE = (1.0, 1 / 64, 1 / 65536)  # of the three features, so that the sums have like magnitudes
_MAX_FACTOR = 4.0


class Work(NamedTuple):
    """The size of a step: tokens, and the sum of their context lengths."""

    tokens: int
    attended: float

    def plus(self, other: Work) -> Work:
        """Return both together."""
        return Work(self.tokens + other.tokens, self.attended + other.attended)


def run_work(start: int, count: int) -> Work:
    """Return the work of `count` tokens from position `start` on."""
    return Work(count, count * (start + (count + 1) / 2))


def total_work(runs: Iterable[tuple[int, int]]) -> Work:
    """Return the work of a step: for each run of tokens its first position and its length."""
    tokens, attended = 0, 0.0
    for start, count in runs:
        tokens += count
        attended += count * (start + (count + 1) / 2)
    return Work(tokens, attended)


class _Size:
    """What is remembered of steps of about one size: weighted sums, and the factor to the fitted line."""

    __slots__ = ("factor", "seen", "sums", "targets")

    def __init__(self) -> None:
        self.sums = [0.0] * 6  # upper triangle of the sum of x·xᵀ
        self.targets = [0.0] * 3
        self.factor = 1.0
        self.seen = 0


class StepCosts:
    """Learns from measured steps what a step of another size would take."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._sizes: dict[int, _Size] = {}
        self._weights = (0.0, 0.0, 0.0)
        self._seen = 0
        self._stale = 0
        self._largest = 0

    @property
    def known(self) -> bool:
        """Whether steps of at least two sizes were measured: before that a line is a guess."""
        return len(self._sizes) > 1

    def observe(self, work: Work, seconds: float) -> None:
        """Take a measured step; a duration that is not positive says nothing."""
        if seconds <= 0.0 or work.tokens <= 0 or not math.isfinite(seconds):
            return
        size = self._sizes.setdefault(_size_of(work.tokens), _Size())
        x = _features(work)
        weight = 1.0 / (seconds * seconds)
        at = 0
        for i in range(3):
            for j in range(i, 3):
                size.sums[at] = size.sums[at] * _KEEP + weight * x[i] * x[j]
                at += 1
            size.targets[i] = size.targets[i] * _KEEP + weight * x[i] * seconds
        self._seen += 1
        self._stale += 1
        self._largest = max(self._largest, work.tokens)
        if self._stale >= _REFIT or self._seen <= 4 * _REFIT:
            self._fit()
        line = self._line(work)
        if line > 0.0:
            ratio = min(max(seconds / line, 1 / _MAX_FACTOR), _MAX_FACTOR)
            size.seen += 1
            size.factor += max(2 * (1 - _KEEP), 1 / size.seen) * (ratio - size.factor)

    def predict(self, work: Work) -> float | None:
        """Return the seconds of a step, or None before anything is known."""
        if not self.known:
            return None
        number = _size_of(work.tokens)
        size = self._sizes.get(number)
        if size is None:
            # What the nearest size is off the line, this one probably is as well.
            size = self._sizes[min(self._sizes, key=lambda other: abs(other - number))]
        return self._line(work) * size.factor

    def extra(self, base: Work, more: Work) -> float | None:
        """Return what `more` adds to a step, in seconds; never negative."""
        before, after = self.predict(base), self.predict(base.plus(more))
        return None if before is None or after is None else max(0.0, after - before)

    def prefill_s(self, num_tokens: int, chunk: int) -> float | None:
        """Return the seconds to compute a context of `num_tokens` from nothing, in chunks."""
        total, start = 0.0, 0
        while start < num_tokens:
            count = min(chunk, num_tokens - start)
            one = self.predict(run_work(start, count))
            if one is None:
                return None
            total += one
            start += count
        return total

    def longest_s(self, tokens: int, max_context: int) -> float | None:
        """Return the seconds of the longest step of at most `tokens`, at the end of the longest context.

        None before a step of half that size was measured: the line is trusted up to twice the largest one.
        """
        if 2 * self._largest < tokens:
            return None
        return self.predict(run_work(max(0, max_context - tokens), tokens))

    def prompt_tokens(
        self, decodes: Work, joining: int, start: int, limit: int, *, most_s: float | None = None
    ) -> int:
        """Return how many prompt tokens a step may take beside running decodes, so that their pace holds.

        The pace is that of the decodes as they will be once those who join decode beside them: what a step takes on
        the way there may be `STRETCH` times that, and up to about twice as much the more those who wait for their
        first token outnumber those who wait for their next. Without decodes, or where steps take no time, there is no
        pace.

        Args:
            decodes: tokens of the decodes in this step and their context.
            joining: sequences whose prompts wait or are being computed.
            start: position at which the first prompt goes on.
            limit: most tokens to return.
            most_s: what a step may take, in place of that pace.

        Returns:
            A multiple of 4 (or `limit`), at least 8, so that prompts progress.
        """
        if decodes.tokens == 0 or limit <= LEAST_CHUNK or not self._seen:
            return limit
        if most_s is None:
            later = decodes.attended * (1 + joining / decodes.tokens)
            pace = self.predict(Work(decodes.tokens + joining, later))
            if pace is None:
                return LEAST_CHUNK
            crowd = joining / (decodes.tokens + joining) if joining > 0 else 0.0
            most_s = STRETCH * (1.0 + CROWD * crowd * crowd) * pace
        # The line is trusted up to twice the largest step that was measured.
        count = min(limit, max(2 * LEAST_CHUNK, 2 * self._largest))
        while count > LEAST_CHUNK:
            took = self.predict(decodes.plus(run_work(start, count)))
            if took is not None and took <= most_s:
                return count
            # Coarse where there is much, so that a plan stays cheap.
            grain = GRAIN if count <= 16 * GRAIN else 4 * GRAIN
            count = (count - 1) // grain * grain
        return min(LEAST_CHUNK, limit)

    def beside(self, tokens: int, limit: int) -> int:
        """Return how many more tokens of prompts, at most `limit`, hardly lengthen a step that computes so many."""
        alone = self.predict(run_work(0, tokens))
        if alone is None:
            return limit
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            took = self.predict(run_work(0, tokens + middle))
            low, high = (middle, high) if took is not None and took <= LENGTHEN * alone else (low, middle - 1)
        return low

    def short_chunk(self, decodes: Work, limit: int) -> int:
        """Return the least tokens of prompts, at most `limit`, at which a step computes them almost at the best rate.

        Whoever comes during a step waits for its end, and steps that are longer than that gain nobody anything.
        """
        if not self.known:
            return limit
        counts = [limit]
        while counts[-1] >= 2 * SHORTEST:
            counts.append(counts[-1] // 2)
        took = [self.predict(decodes.plus(run_work(0, count))) for count in counts]
        rates = [count / one if one else 0.0 for count, one in zip(counts, took, strict=True)]
        return min(count for count, rate in zip(counts, rates, strict=True) if rate >= SHORT_RATE * max(rates))

    def statistics(self) -> dict[str, float]:
        """Return the fitted line: seconds per step, per token, and per token and position."""
        a, b, c = (w * scale for w, scale in zip(self._weights, _SCALE, strict=True))
        return {"step_fixed_s": a, "step_token_s": b, "step_attended_s": c}

    def _line(self, work: Work) -> float:
        x, w = _features(work), self._weights
        return w[0] * x[0] + w[1] * x[1] + w[2] * x[2]

    def _fit(self) -> None:
        self._stale = 0
        sums, targets = [0.0] * 6, [0.0] * 3
        for size in self._sizes.values():
            for at in range(6):
                sums[at] += size.sums[at]
            for at in range(3):
                targets[at] += size.targets[at]
        self._weights = _solve(sums, targets)


def _size_of(tokens: int) -> int:
    """Number the sizes: each up to 32 tokens (kernels change from one to the next), then four per doubling."""
    return tokens if tokens <= 32 else 33 + int(4 * math.log2(tokens / 32))


def _features(work: Work) -> tuple[float, float, float]:
    return (1.0, work.tokens * _SCALE[1], work.attended * _SCALE[2])


def _solve(sums: list[float], targets: list[float]) -> tuple[float, float, float]:
    """Least squares without negative weights: a negative one is taken out and the rest solved again."""
    full = [[0.0] * 3 for _ in range(3)]
    at = 0
    for i in range(3):
        for j in range(i, 3):
            full[i][j] = full[j][i] = sums[at]
            at += 1
    used = [0, 1, 2]
    while used:
        found = _gauss([[full[i][j] for j in used] for i in used], [targets[i] for i in used])
        worst = min(range(len(used)), key=lambda k: found[k])
        if found[worst] >= 0.0:
            out = [0.0, 0.0, 0.0]
            for k, i in enumerate(used):
                out[i] = found[k]
            return out[0], out[1], out[2]
        del used[worst]
    return 0.0, 0.0, 0.0


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric system with a little weight on the diagonal (features may be proportional)."""
    n = len(right)
    rows = [[*matrix[i], right[i]] for i in range(n)]
    for i in range(n):
        rows[i][i] += _RIDGE * matrix[i][i] + 1e-300
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if rows[i][i] == 0.0:
            continue
        for r in range(n):
            if r != i:
                share = rows[r][i] / rows[i][i]
                rows[r] = [x - share * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [rows[i][n] / rows[i][i] if rows[i][i] != 0.0 else 0.0 for i in range(n)]
