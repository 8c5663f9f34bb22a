"""Prompt lookup: what followed the last few ids when they occurred before, in prompt or answer.

Summaries, translations, code edits and loops repeat themselves. Of the earlier places that end in the same ids the one
that agrees longest (up to four ids) is taken, of equals the most recent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.sequence import Key
from engine.speculation.drafter import Wish

LONGEST = 4  # ids that are compared
SHORTEST = 2
_PLACES = 16  # earlier places looked at
_KEPT = 1024  # sequences


class _Index:
    """Where each pair of ids was last seen, and from there the place before; positions are of a pair's second id."""

    __slots__ = ("before", "context", "last")

    def __init__(self, context: list[int]) -> None:
        self.context = context
        self.last: dict[tuple[int, int], int] = {}
        self.before: list[int] = [-1]  # position to the one before with the same pair, -1 if there is none

    def extend(self, end: int) -> None:
        """Take in the pairs that end before `end`."""
        context, last, before = self.context, self.last, self.before
        for at in range(len(before), end):
            pair = (context[at - 1], context[at])
            before.append(last.get(pair, -1))
            last[pair] = at


class PromptLookup:
    """Guesses from the sequence's own ids; costs microseconds and no model."""

    def __init__(self) -> None:
        """Start with no sequence known."""
        self._known: OrderedDict[Key, _Index] = OrderedDict()

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """Return what followed the longest match; see the module."""
        return [self._guess(wish) for wish in wishes]

    def forget(self, key: Key) -> None:
        """Drop a sequence's index."""
        self._known.pop(key, None)

    def close(self) -> None:
        """Drop everything."""
        self._known.clear()

    def _guess(self, wish: Wish) -> list[int]:
        context, end = wish.context, len(wish.context)
        if end <= SHORTEST:
            return []
        index = self._known.get(wish.key)
        if index is None or index.context is not context:
            index = self._known[wish.key] = _Index(context)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        index.extend(end - 1)  # without the last pair: that is the one looked for
        best, agreed = -1, SHORTEST - 1
        at = index.last.get((context[-2], context[-1]), -1)
        for _ in range(_PLACES):
            if at < 0 or agreed == LONGEST:
                break
            same = SHORTEST
            while same < LONGEST and at >= same and context[at - same] == context[end - 1 - same]:
                same += 1
            if same > agreed:
                best, agreed = at, same
            at = index.before[at]
        if best < 0:
            return []
        out: list[int] = []
        for place in range(best + 1, best + 1 + wish.length):
            # Past the end the guess goes on with itself: a loop goes round again.
            out.append(context[place] if place < end else out[place - end])
        return out
