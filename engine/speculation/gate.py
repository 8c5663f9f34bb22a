"""Who guesses, and how far: by what extra rows cost now, and by how often a sequence's guesses were right. Pure.

A guess is worth its chance times the time that an id takes otherwise; it costs what one more row adds to the step.
Both come from measurements: the cost model knows steps by size, each sequence remembers its hits. Where guessing does
not pay, it is tried again rarely, and in steps of many rows never: there a row more costs as much as its id is worth,
and what is left to win is less than the errors of the estimates. A purse bounds what errors of these estimates can
cost: it gains a hundredth of the time of all steps, and what guesses saved; it pays for guesses; empty, nobody
guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.costs import StepCosts, Work
from engine.sequence import Key

ALLOWANCE = 0.01  # of all step time
FIRST_PURSE_S = 0.012
MAX_PURSE_S = 0.2
CAUTION = 1.15  # what guesses cost is taken as so much more: of estimates the lucky ones get chosen
PACE = 2.0  # a step with guesses may take so many times a step without: ids that come in one lump are a pause before it
MARGIN = 0.02  # of a step: a smaller gain may be an error of the estimates
MOST_ROWS = 8  # of a step: the kernels compute eight rows at once, and more rows cost what they give
_KEEP = 0.85  # weight of a sequence's past at each new draft
_KEEP_ALL = 0.98  # the same for all sequences together
_PRIOR = 2.0  # guesses that the common rate counts for
_PROBE = 2  # ids of a probe
_FIRST_WAIT, _MAX_WAIT = 8, 256  # steps between probes


class Candidate(NamedTuple):
    """A sequence that decodes in this step, and how many ids it may guess."""

    key: Key
    limit: int


class _Record:
    """What is remembered of a sequence."""

    __slots__ = ("hits", "idle", "misses", "wait")

    def __init__(self) -> None:
        self.hits = self.misses = 0.0
        self.idle = 0  # steps since it guessed
        self.wait = _FIRST_WAIT


class Gate:
    """Decides lengths of guesses, and learns from what came of them."""

    def __init__(self, costs: StepCosts, max_draft: int) -> None:
        """Start with hope and a little in the purse.

        Args:
            costs: what steps take; others feed it.
            max_draft: most ids guessed per sequence and step.
        """
        self._costs = costs
        self._max_draft = max_draft
        self._records: dict[Key, _Record] = {}
        self._hits = self._misses = 1.0
        self._drafting_s = 0.0  # per guessed id
        self.purse_s = FIRST_PURSE_S

    def chance(self, key: Key) -> float:
        """Return the estimated chance that the next guess of a sequence is right."""
        common = self._hits / (self._hits + self._misses)
        record = self._records.get(key)
        if record is None:
            return common
        return (record.hits + _PRIOR * common) / (record.hits + record.misses + _PRIOR)

    def lengths(self, candidates: Sequence[Candidate], base: Work) -> dict[Key, int]:
        """Return how many ids which sequence should guess in a step that computes `base` without guesses."""
        step_s = self._costs.predict(base)
        if step_s is None or not candidates or self.purse_s <= 0.0 or base.tokens > MOST_ROWS:
            return {}
        value = step_s / base.tokens
        chances = {one.key: self.chance(one.key) for one in candidates}
        best, most = self._best(candidates, chances, base, step_s, value)
        if most > 0.0:
            return best
        return self._probe(candidates, base, value)

    def settle(
        self, guessed: Sequence[tuple[Key, int, int]], base: Work, guesses: Work, seconds: float, drafting_s: float
    ) -> None:
        """Learn from a step of decodes.

        Args:
            guessed: sequence, ids guessed, ids right.
            base: the step without guesses.
            guesses: what they added.
            seconds: time of the step.
            drafting_s: time it took to guess.
        """
        self.purse_s += ALLOWANCE * seconds
        total = sum(count for _, count, _ in guessed)
        if total:
            step_s = self._costs.predict(base) or 0.0
            # What the step really took counts where it is more: estimates may be wrong in the same way for long.
            extra_s = CAUTION * (self._costs.extra(base, guesses) or 0.0)
            cost = max(extra_s, min(seconds - step_s, step_s)) + drafting_s
            right = sum(hits for _, _, hits in guessed)
            self.purse_s += right * step_s / max(1, base.tokens) - cost
            self._drafting_s += 0.1 * (drafting_s / total - self._drafting_s)
        else:
            self.purse_s -= drafting_s
        self.purse_s = min(self.purse_s, MAX_PURSE_S)
        for key, count, hits in guessed:
            self._learn(key, count, hits)

    def nothing(self, keys: Sequence[Key]) -> None:
        """These were asked, and had no guess: they are asked again as after a probe."""
        for key in keys:
            self._records.setdefault(key, _Record()).idle = 0

    def skipped(self, keys: Sequence[Key]) -> None:
        """These decoded without a guess."""
        for key in keys:
            record = self._records.get(key)
            if record is not None:
                record.idle += 1

    def forget(self, key: Key) -> None:
        """A sequence is gone."""
        self._records.pop(key, None)

    def _learn(self, key: Key, count: int, hits: int) -> None:
        record = self._records.setdefault(key, _Record())
        missed = 1.0 if hits < count else 0.0
        record.hits = record.hits * _KEEP + hits
        record.misses = record.misses * _KEEP + missed
        self._hits = self._hits * _KEEP_ALL + hits
        self._misses = self._misses * _KEEP_ALL + missed
        record.idle = 0
        record.wait = min(_MAX_WAIT, record.wait * 2) if hits == 0 else _FIRST_WAIT

    def _best(
        self, candidates: Sequence[Candidate], chances: dict[Key, float], base: Work, step_s: float, value: float
    ) -> tuple[dict[Key, int], float]:
        """Return the lengths with the greatest expected gain, and that gain in seconds beyond the margin."""
        best: dict[Key, int] = {}
        most = 0.0
        length = self._max_draft
        while length:
            plan: dict[Key, int] = {}
            gain, price = 0.0, self._price(base, len(candidates) * length)
            for key, limit in candidates:
                # The next id is guessed as long as its chance, that all before it are right too, is worth its price.
                chance, worth, count = chances[key], value, 0
                while count < min(limit, length):
                    worth *= chance
                    if worth <= price:
                        break
                    gain += worth
                    count += 1
                if count:
                    plan[key] = count
            total = sum(plan.values())
            if plan and self._extra(base, total) <= (PACE - 1.0) * step_s:
                net = gain - total * self._price(base, total) - MARGIN * step_s
                if net > most:
                    best, most = plan, net
            length //= 2
        return best, most

    def _probe(self, candidates: Sequence[Candidate], base: Work, value: float) -> dict[Key, int]:
        """Return one sequence that should try again, if its turn has come and the purse can pay."""
        for key, limit in candidates:
            record = self._records.get(key)
            count = min(limit, _PROBE, self._max_draft)
            due = record is None or record.idle >= record.wait
            if due and count and count * self._price(base, count) < self.purse_s:
                return {key: count}
        return {}

    def _price(self, base: Work, count: int) -> float:
        """Return what one guess costs among `count`, in seconds."""
        return CAUTION * self._extra(base, count) / count + self._drafting_s

    def _extra(self, base: Work, count: int) -> float:
        """Return what `count` guesses add to a step, in seconds."""
        context = base.attended / base.tokens
        return self._costs.extra(base, Work(count, count * context)) or 0.0
