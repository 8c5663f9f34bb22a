"""Finds few faults that still break a promise: takes parts of a failing storm away for as long as it fails. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def minimise(parts: Sequence[T], fails: Callable[[tuple[T, ...]], bool], *, most_runs: int = 60) -> tuple[T, ...]:
    """Return a part of `parts` with which `fails` still holds; its order is kept.

    Halves, quarters and so on are left out in turn (delta debugging, Zeller 1999), until nothing more can be, or the
    number of runs is used up.

    Args:
        parts: with all of them it fails.
        fails: runs it with some of them.
        most_runs: how often `fails` may be called.
    """
    kept, chunks, runs = tuple(parts), 2, 0
    while kept and runs < most_runs:
        size = -(-len(kept) // chunks)
        for at in range(0, len(kept), size):
            rest = kept[:at] + kept[at + size :]
            runs += 1
            if fails(rest):
                kept, chunks = rest, max(2, chunks - 1)
                break
            if runs >= most_runs:
                break
        else:
            if size == 1:
                break
            chunks = min(len(kept), 2 * chunks)
    return kept
