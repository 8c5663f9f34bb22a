"""What the core asks of something that guesses ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.sequence import Key


class Wish(NamedTuple):
    """Guess up to `length` ids that follow `context` (all ids of a sequence so far; the list grows between calls)."""

    key: Key
    context: list[int]
    length: int


class Drafter(Protocol):
    """Guesses. A wrong guess costs time, never a wrong answer."""

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """Return for each wish the guessed ids, at most as many as wished; none is fine."""
        ...

    def forget(self, key: Key) -> None:
        """Drop what is kept of a sequence, if anything."""
        ...

    def close(self) -> None:
        """Let go of all memory."""
        ...
