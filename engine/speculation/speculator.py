"""Speculation at work: candidates from the core's step, lengths from the gate, guesses from the drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from engine.costs import StepCosts, Work, total_work
from engine.plan import Row, Sampled
from engine.sequence import Key
from engine.speculation.drafter import Drafter, Wish
from engine.speculation.gate import Candidate, Gate

MAX_DRAFT = 8


class Speculator:
    """Asks for guesses before a step and learns from it afterwards."""

    def __init__(
        self, drafter: Drafter, costs: StepCosts, now: Callable[[], float], max_draft: int = MAX_DRAFT
    ) -> None:
        """Set what guesses, and how far at most.

        Raises:
            ValueError: if `max_draft` is not between 1 and 8.
        """
        if not 0 < max_draft <= MAX_DRAFT:
            raise ValueError(f"between 1 and {MAX_DRAFT} ids can be guessed, not {max_draft}")
        self.max_draft = max_draft
        self.gate = Gate(costs, max_draft)
        self._drafter = drafter
        self._now = now
        self._drafting_s = 0.0

    def propose(self, wishes: Sequence[Wish], base: Work) -> dict[Key, list[int]]:
        """Return guesses for some of those that decode in a step.

        Args:
            wishes: sequences, and how many ids each may guess.
            base: the step without guesses.
        """
        self._drafting_s = 0.0
        lengths = self.gate.lengths([Candidate(wish.key, wish.length) for wish in wishes if wish.length > 0], base)
        asked = [wish._replace(length=lengths[wish.key]) for wish in wishes if wish.key in lengths]
        if not asked:
            return {}
        started = self._now()
        guesses = self._drafter.propose(asked)
        self._drafting_s = self._now() - started
        self.gate.nothing([wish.key for wish, ids in zip(asked, guesses, strict=True) if not ids])
        return {wish.key: ids[: wish.length] for wish, ids in zip(asked, guesses, strict=True) if ids}

    def settle(self, rows: Sequence[Row], sampled: Sequence[Sampled], seconds: float) -> tuple[int, int]:
        """Learn from a step of decodes; returns how many ids were guessed, and how many were right."""
        guessed: list[tuple[Key, int, int]] = []
        plain: list[Key] = []
        num_ids = Counter(one.key for one in sampled if one.error is None)
        for row in rows:
            if row.draft:
                guessed.append((row.key, len(row.draft), max(0, num_ids[row.key] - 1)))
            else:
                plain.append(row.key)
        # Steps of decodes alone come here: one known id, then the guesses.
        base = total_work((row.start, 1) for row in rows)
        extra = total_work((row.start + 1, len(row.draft)) for row in rows if row.draft)
        self.gate.settle(guessed, base, extra, seconds, self._drafting_s)
        self.gate.skipped(plain)
        return sum(count for _, count, _ in guessed), sum(hits for _, _, hits in guessed)

    def forget(self, key: Key) -> None:
        """A sequence is gone, or has lost its place."""
        self.gate.forget(key)
        self._drafter.forget(key)

    def close(self) -> None:
        """Let go of the drafter's memory."""
        self._drafter.close()
