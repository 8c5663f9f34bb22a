"""Decides whom to hurt and when: pure and seeded, from the progress that clients observe."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

TAIL = 10  # a fault in a sequence's last tokens proves little
MARGIN = 4  # tokens that may be under way between engine and client


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one running stream has come, as its client sees it."""

    request_id: str
    done: int
    total: int

    @property
    def in_window(self) -> bool:
        """Whether it is past its first and before its last ten tokens."""
        return self.done >= 1 and self.total - self.done > TAIL


@dataclass(frozen=True, slots=True)
class Strike:
    """Hurt this actor now; `streams` are the requests in the window that it was serving."""

    victim: str
    streams: tuple[str, ...]


def draw(seed: int, *purpose: object) -> float:
    """Return a number in [0, 1) that depends on the seed and the purpose alone."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    (value,) = struct.unpack("<Q", digest)
    return float(value) / 2**64


@dataclass(frozen=True, slots=True)
class Gremlin:
    """One gremlin per round: its moment and its choice of victim follow from `seed` and `round_`."""

    seed: int
    round_: int

    def moment(self, total: int) -> int:
        """Return the token at which to strike, between the first and the last ten (with a margin)."""
        last = max(1, total - TAIL - MARGIN - 1)
        return 1 + int(draw(self.seed, self.round_, "moment") * last)

    def decide(self, progress: list[Progress], serving: Mapping[str, frozenset[str]]) -> Strike | None:
        """Strike once an actor serves a stream that has reached the moment and is still in the window.

        Args:
            progress: every running stream.
            serving: request ids that each possible victim holds, by actor.

        Returns:
            The strike, or nothing as long as the moment has not come or nobody serves such a stream.
        """
        ripe = {p.request_id for p in progress if p.in_window and p.done >= self.moment(p.total)}
        able = {p.request_id for p in progress if p.in_window and p.total - p.done > TAIL + MARGIN}
        candidates = sorted(a for a, held in serving.items() if held & ripe & able)
        if not candidates:
            return None
        victim = candidates[int(draw(self.seed, self.round_, "victim") * len(candidates))]
        return Strike(victim, tuple(sorted(serving[victim] & {p.request_id for p in progress if p.in_window})))

    def decide_upstream(
        self, progress: list[Progress], pending: frozenset[str], serving: Mapping[str, frozenset[str]]
    ) -> Strike | None:
        """Strike an actor that works before the first token: it holds a pending request while streams run.

        Args:
            progress: the running streams, at least one of which must be in the window.
            pending: ids of requests that were accepted and have no item yet.
            serving: request ids that each possible victim holds, by actor.
        """
        running = tuple(sorted(p.request_id for p in progress if p.in_window))
        candidates = sorted(a for a, held in serving.items() if held & pending)
        if not running or not candidates:
            return None
        return Strike(candidates[int(draw(self.seed, self.round_, "victim") * len(candidates))], running)
