"""Where a prompt goes: ours and what others do, all with the same views and the same costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from actors.ttft import Choice, Costs, View, estimate, least_ttft


class Placement(Protocol):
    """Chooses a replica; costs serve the estimate of what the choice will take, whoever makes it."""

    def choose(self, views: Sequence[View], tokens: int, costs: Costs) -> Choice:
        """Return the choice among at least one view."""
        ...


class Random:
    """Any replica."""

    def __init__(self, seed: int) -> None:
        """Start a sequence of draws."""
        self._draw = random.Random(seed)

    def choose(self, views: Sequence[View], tokens: int, costs: Costs) -> Choice:
        """Draw one."""
        return estimate(self._draw.choice(views), tokens, costs)


class RoundRobin:
    """One replica after the other."""

    def __init__(self) -> None:
        """Start with the first."""
        self._next = 0

    def choose(self, views: Sequence[View], tokens: int, costs: Costs) -> Choice:
        """Take the next."""
        self._next += 1
        return estimate(views[(self._next - 1) % len(views)], tokens, costs)


class LeastLoad:
    """The replica that is idle soonest, in seconds: the strongest form of it, since it knows what each prompt costs."""

    def choose(self, views: Sequence[View], tokens: int, costs: Costs) -> Choice:
        """Take the shortest queue; ties go to whoever has more free blocks."""
        best = min(views, key=lambda view: (view.stale, view.queued_s, -view.free_blocks, view.name))
        return estimate(best, tokens, costs)


class LongestPrefix:
    """The replica that has most of the prompt; among equals the one that is idle soonest."""

    def choose(self, views: Sequence[View], tokens: int, costs: Costs) -> Choice:
        """Take the longest match, however long its queue."""
        best = min(views, key=lambda view: (view.stale, -view.stored_tokens, view.queued_s, view.name))
        return estimate(best, tokens, costs)


class LeastTtft:
    """Ours: the least estimated time to a first token; with `Costs.copy` also with blocks of other replicas."""

    def choose(self, views: Sequence[View], tokens: int, costs: Costs) -> Choice:
        """Take the least."""
        choice = least_ttft(views, tokens, costs)
        assert choice is not None
        return choice


def make(name: str, seed: int = 1) -> Placement:
    """Return a fresh placement by name.

    Raises:
        KeyError: if there is none of that name.
    """
    if name == "random":
        return Random(seed)
    makers: dict[str, type[RoundRobin | LeastLoad | LongestPrefix | LeastTtft]] = {
        "round-robin": RoundRobin,
        "least-load": LeastLoad,
        "longest-prefix": LongestPrefix,
        "ours": LeastTtft,
        "ours+copies": LeastTtft,
        "ours+ahead": LeastTtft,
        "ours+copies+ahead": LeastTtft,
    }
    return makers[name]()
