"""What a transformer computes in a step: runs of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Run(Protocol):
    """Consecutive tokens `[start, start + len(ids))` of one sequence whose positions from 0 lie in `blocks`."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...
