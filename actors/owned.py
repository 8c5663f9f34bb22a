"""What an owner knows of one request, and what it may want done: values of `actors.ownership`."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from actors.placement import Placement
from schemas import messages as m
from schemas.errors import HeadraceError
from schemas.record import Fence, Record
from schemas.subjects import Ref

# A request that loses one engine after another is placed anew at once so often in so long, and then once per pause.
RUSH = 4
RUSH_S = 10.0
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one actor."""

    to: Ref
    message: m.Message


@dataclass(frozen=True, slots=True)
class Anycast:
    """Send a message to any actor of a kind."""

    kind: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a message to every actor of a kind."""

    kind: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class Terminal:
    """Write the terminal frame of a request from here: no detokenizer holds it."""

    record: Record
    fence: Fence
    error: HeadraceError


@dataclass(frozen=True, slots=True)
class Accept:
    """Tell the client who owns its request now: nothing is written under a lower fence any more."""

    record: Record
    fence: Fence


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over: settle quota, write the log line, count."""

    record: Record
    outcome: str  # a finish reason, or the error's code
    finished: m.Finished | None
    failovers: int
    accepted_at: float
    timeline: dict[str, float]


@dataclass(frozen=True, slots=True)
class Failover:
    """Something that served the request is gone; counted by what and why."""

    request_id: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A move is over; `outcome` as in `Migrated`, or `lost` if an engine or the detokenizer died meanwhile."""

    request_id: str
    reason: str  # drain | balance
    outcome: str


Directive = Send | Anycast | Broadcast | Terminal | Accept | Ended | Failover | MoveEnded


@dataclass(frozen=True, slots=True)
class Offer:
    """A move that the source was asked for: where to, and the fence that the request has there."""

    to: Ref
    fence: Fence
    reason: str


class Stage(enum.Enum):
    """Whether a request is being served or only cleaned up."""

    OPEN = "open"
    CLOSING = "closing"


@dataclass(slots=True)
class Owned:
    """All that the owner knows of one request."""

    record: Record
    fence: Fence
    body: dict[str, Any]
    accepted_at: float  # monotonic
    deadline: float  # monotonic
    max_tokens: int | None
    stage: Stage = Stage.OPEN
    tokenized: bool = False
    detok: Ref | None = None
    opened: bool = False
    open_sent: bool = False  # the detokenizer may hold it
    detok_leaves: bool = False  # it drains: another one is to be found
    ever_dispatched: bool = False
    ids_current: bool = True  # whether `outputs` is what the detokenizer holds under this fence
    outputs: list[list[int]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    placement: Placement | None = None
    dispatched: bool = False
    started: bool = False  # decode runs it after a hand-off
    redirect: bool = False  # the engine must still be told of a new detokenizer
    probing: bool = False
    suspects: set[Ref] = field(default_factory=set)
    suspected: Ref | None = None  # the engine is silent, and nobody could take its work: if it speaks it keeps that
    again: deque[float] = field(default_factory=lambda: deque(maxlen=RUSH))  # when it was placed anew of late
    to_close: dict[Ref, m.Close] = field(default_factory=dict)
    next_send: float = 0.0
    closing_until: float = 0.0
    elsewhere: bool = False  # it is closed here because another owner serves it
    failovers: int = 0
    retry_at: float = 0.0
    late_at: float = 0.0  # Unix seconds: a first token after it breaks what its class was promised; 0: never
    error: HeadraceError | None = None  # given to the detokenizer to write
    adopted: bool = False  # from a dead owner: an engine that runs is told before its detokenizer
    claims: set[Ref] = field(default_factory=set)  # detokenizers that have not said yet whether they hold it
    hold_until: float = 0.0  # whoever holds something of an adopted request may speak up until then
    announce: bool = False  # the client has not heard of this owner yet
    offer: Offer | None = None  # it may run there under the offer's fence already
    offered: int = 0  # the highest n that was ever offered: never used again
    leaving: Ref | None = None  # the engine that drains, while the request runs there
    timeline: dict[str, float] = field(default_factory=dict)

    @property
    def engines(self) -> list[Ref]:
        """The engines that may hold work of it now."""
        if self.placement is None:
            return []
        engines = [self.placement.first] + ([self.placement.decode] if self.placement.decode else [])
        return engines if self.offer is None else [*engines, self.offer.to]

    def choose(self, detok: Ref | None) -> None:
        """Take another detokenizer, which has heard of nothing yet."""
        self.detok, self.opened, self.open_sent, self.detok_leaves = detok, False, False, False

    def again_at(self, now: float) -> float:
        """Note that it has lost an engine; returns when it may be placed anew (R7: re-dispatches are rate-limited)."""
        rush = len(self.again) == RUSH and now - self.again[0] < RUSH_S
        self.again.append(max(now, self.again[-1] + PAUSE_S) if rush else now)
        return self.again[-1]

    def next_fence(self) -> Fence:
        """Return the fence of the next try: above this one, and above all that were offered."""
        return Fence(self.fence.term, self.fence.owner, max(self.fence.n, self.offered) + 1)

    @property
    def runner(self) -> Ref | None:
        """The engine that makes, or will make, its items."""
        if self.placement is None:
            return None
        return self.placement.decode or self.placement.first

    def head(self) -> dict[str, Any]:
        """Return what all messages about it begin with, under the present fence."""
        return {
            "request_id": self.record.request_id,
            "fence": self.fence,
            "deadline": self.record.deadline,
            "traceparent": self.record.traceparent,
        }
