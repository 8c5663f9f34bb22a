"""When a running request should change its engine although nothing is wrong: pure.

A move costs its request a pause of two steps, and both engines a copy of its blocks. It pays where somebody waits for a
place, at an engine whose slots or blocks are all taken, while another engine has nothing to do: the one that moves goes
on at once, and the one that waits starts now instead of when somebody ends. It does not pay for the sake of smaller
batches: engines of one machine share its cores, and two half-full ones are slower there than a full one. So without a
queue nothing moves, and neither does anything that lasts for less than `HOLD_S`: placement fills engines evenly, and
what ends makes room by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from schemas.subjects import Ref

HOLD_S = 1.0  # how long the one is full with a queue, and the other idle, before anything moves
EVERY_S = 0.25  # between two moves of one owner: the next one knows from heartbeats what the last one did
REST_S = 10.0  # no request moves twice within this
MAX_RESTING = 1024
SCARCE = 16  # a sixteenth of an engine's blocks is as good as none: running sequences grow into them


class Engine(Protocol):
    """A member, as far as this policy looks at it."""

    @property
    def ref(self) -> Ref: ...
    @property
    def load(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Move this request to that engine."""

    request_id: str
    to: Ref


@dataclass(slots=True)
class Rebalancer:
    """One owner's view; other owners see the same heartbeats and move their own requests."""

    _since: dict[tuple[Ref, Ref], float] = field(default_factory=dict)  # pairs that could do with a move
    _next_at: float = 0.0
    _look_at: float = 0.0
    _moved: dict[str, float] = field(default_factory=dict)

    def due(self, now: float) -> bool:
        """Whether it is time to look again; moves the timer on."""
        if now < self._look_at:
            return False
        self._look_at = now + EVERY_S
        return True

    def decide(
        self, engines: Sequence[Engine], runners: Callable[[], Sequence[tuple[str, Ref]]], now: float
    ) -> Rebalance | None:
        """Return a move that pays, if there is one.

        Args:
            engines: those that can run requests, as their last heartbeats say.
            runners: gives this owner's running requests, oldest first, and where they run.
            now: monotonic seconds.
        """
        full = [e.ref for e in engines if is_full(e.load)]
        idle = [e.ref for e in engines if is_idle(e.load)] if full else []
        pairs = [(source, to) for source in full for to in idle]
        self._since = {pair: self._since.get(pair, now) for pair in pairs}
        if now < self._next_at:
            return None
        lasting = sorted((since, pair) for pair, since in self._since.items() if now - since >= HOLD_S)
        for _, (source, to) in lasting:
            # The youngest has most of its answer to come, and least to copy.
            for request_id, at in reversed(runners()):
                if at == source and now - self._moved.get(request_id, -REST_S) >= REST_S:
                    self._remember(request_id, now)
                    return Rebalance(request_id, to)
        return None

    def _remember(self, request_id: str, now: float) -> None:
        self._next_at = now + EVERY_S
        self._moved[request_id] = now
        while len(self._moved) > MAX_RESTING:
            del self._moved[next(iter(self._moved))]


def is_full(load: Mapping[str, Any]) -> bool:
    """Whether somebody waits for a slot or for blocks of an engine; a prompt that waits for its turn is no reason."""
    if not load.get("waiting") or int(load.get("running", 0)) < 2:
        return False
    slots = int(load.get("running", 0)) >= int(load.get("max_running", 1 << 30))
    return slots or SCARCE * int(load.get("free_blocks", 1 << 30)) < int(load.get("total_blocks", 0))


def is_idle(load: Mapping[str, Any]) -> bool:
    """Whether an engine has nothing to do, and nothing on its way to it."""
    return "max_running" in load and not any(load.get(name) for name in ("running", "waiting", "held", "expected"))
