"""Whom to ask for admission, when to ask again, and whom to tell when the client has left. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.subjects import Ref

ACCEPT_WAIT_S = 0.3  # R11: silence for so long is answered by asking another
MAX_WAIT_S = 2.0  # later tries wait longer, so that slow actors are not buried in repetitions
ACCEPT_LIMIT_S = 5.0  # a request that nobody accepts within this is refused
ACCEPT_BY_S = 2.0  # how long a submission may lie in a mailbox

CANCEL_REPEAT_S = 0.2
CANCEL_LIMIT_S = 5.0


@dataclass(slots=True)
class Submission:
    """The tries to get one request accepted; each has a higher term than the one before."""

    started_at: float
    term: int = -1
    target: Ref | None = None
    asked: list[Ref] = field(default_factory=list)
    awaiting: bool = True
    wait_s: float = ACCEPT_WAIT_S
    retry_at: float = 0.0
    floor: int = 0  # acceptances of earlier terms came from an owner that is gone

    def choose(
        self,
        candidates: Sequence[Ref],
        turn: int,
        backup: Ref | None = None,
        *,
        near: frozenset[Ref] = frozenset(),
        busy: bool = False,
    ) -> Ref | None:
        """Return whom to ask next: one that was not asked, else one other than the last, else any.

        The first one after an owner's death is its `backup`, which holds the request already. A `near` one is asked
        first if this node is not `busy`, and otherwise only where there is no other.
        """
        first = self.target is None and not busy
        candidates = [c for c in candidates if (c in near) == first] or candidates
        if backup in candidates and backup != self.target and self.awaiting and self.wait_s == ACCEPT_WAIT_S:
            return backup
        fresh = [c for c in candidates if c not in self.asked]
        others = [c for c in candidates if c != self.target]
        pool = fresh or others or list(candidates)
        return pool[turn % len(pool)] if pool else None

    def sent(self, target: Ref, now: float) -> None:
        """Note a try."""
        if not self.awaiting:
            self.awaiting, self.wait_s = True, ACCEPT_WAIT_S
        self.term += 1
        self.target = target
        if target not in self.asked:
            self.asked.append(target)
        self.retry_at = now + self.wait_s
        self.wait_s = min(MAX_WAIT_S, 2 * self.wait_s)

    def accepted(self, term: int) -> None:
        """Note an acceptance; one of an earlier try ends the wait too, the fences decide who serves."""
        if self.floor <= term <= self.term:
            self.awaiting = False

    def lost(self, ref: Ref, owner: Ref | None, now: float) -> bool:
        """An actor is gone: whether another has to be asked now."""
        concerned = ref == self.target if self.awaiting else ref == owner
        if concerned:
            if not self.awaiting:
                self.floor = self.term + 1
            self.awaiting, self.retry_at, self.wait_s = True, now, ACCEPT_WAIT_S
        return concerned

    def postpone(self, now: float) -> None:
        """Begin the wait anew: this node itself was not well, so silence meant nothing."""
        self.retry_at = now + self.wait_s

    def due(self, now: float) -> bool:
        """Whether to ask again."""
        return self.awaiting and now >= self.retry_at

    def given_up(self, now: float) -> bool:
        """Whether nobody has accepted for too long; for requests that were never accepted."""
        return self.awaiting and now - self.started_at >= ACCEPT_LIMIT_S


@dataclass(slots=True)
class Cancelling:
    """A client has left: its owner is told until it answers."""

    pending: set[Ref]
    next_at: float
    until: float

    def due(self, now: float) -> bool:
        """Whether to repeat; moves the timer on."""
        if now < self.next_at:
            return False
        self.next_at = now + CANCEL_REPEAT_S
        return True

    def over(self, now: float) -> bool:
        """Whether everyone has answered, or it took too long."""
        return not self.pending or now >= self.until
