"""What prompts took to compute, for the estimates of those who send them: pure bookkeeping of one engine's steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.plan import Row
from engine.sequence import Key, Sequence


class Prefill(NamedTuple):
    """A prompt that was computed here from its first token on: so many tokens behind a stored prefix, in `seconds`."""

    num_tokens: int
    num_cached: int
    seconds: float


class Prefills:
    """Sums, per prompt, its share of the time of each step that it took part in. Bounded by the sequences that run."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._spent: dict[Key, float] = {}
        self._done: list[Prefill] = []

    def add(self, rows: Iterable[Row], seconds: float) -> None:
        """A step took so long; each prompt in it is charged by its share of the tokens."""
        rows = list(rows)
        prompts = [row for row in rows if row.start < row.prompt_len]
        if prompts:
            total = sum(len(row.ids) for row in rows)
            for row in prompts:
                self._spent[row.key] = self._spent.get(row.key, 0.0) + seconds * len(row.ids) / total

    def complete(self, seq: Sequence) -> None:
        """A prompt is computed. One that was preempted, or came with outputs, tells nothing of prompts."""
        seconds = self._spent.pop(seq.key, 0.0)
        if seconds > 0.0 and seq.num_preempted == 0 and len(seq.outputs) <= 1:
            self._done.append(Prefill(len(seq.prompt_ids) - seq.num_cached, seq.num_cached, seconds))

    def forget(self, key: Key) -> None:
        """A sequence is gone."""
        self._spent.pop(key, None)

    def take(self) -> list[Prefill]:
        """Return what was completed since the last call."""
        done, self._done = self._done, []
        return done
