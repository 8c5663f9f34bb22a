"""Every record is held by two admission actors (R2): which other one holds mine, and which of others' I hold. Pure.

As an owner: `begin` names a backup and what to send to it; `accepted` may be said once it has answered, or when nobody
answers in time. As a backup: what it holds waits for the owner's `Release`, for its death, or for D + 0.5 s (R4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.heirs import ranked
from schemas import messages as m
from schemas.record import Fence
from schemas.subjects import Ref

KEEP_WAIT_S = 0.1  # for a backup's answer, before another one is asked as well
# So long after it came a request is accepted, held or not. With the time between two ticks, and what the message takes,
# that is less than an edge waits: it would ask the backup, which may have the record by then, and would take it over.
ACCEPT_WITHIN_S = 0.15
KEEP_AGAIN_S = 1.0  # a request that was accepted without a backup looks for one this often
BACKUP_GRACE_S = 0.5  # the detokenizer ends a stream at its deadline, its owner at 0.3 s, its backup at 0.5 s (R4)
RELEASE_RESEND_S = 0.5
RELEASE_LIMIT_S = 15.0  # a frozen backup may wake until then
MAX_HELD = 8192  # records of others; beyond it the owner asks somebody else
MAX_HELD_NBYTES = 256 * 1024 * 1024  # of their texts, likewise
MAX_RELEASES = 8192  # what is beyond it is held until its deadline
PER_TICK = 64


@dataclass(slots=True)
class _Sought:
    """One of my requests that nobody else holds yet."""

    to: Ref | None
    next_at: float
    accept_at: float = 0.0
    accepted: bool = False
    asked: list[Ref] = field(default_factory=list)


@dataclass(slots=True)
class Held:
    """A record of another owner's."""

    keep: m.Keep
    owner: Ref
    deadline: float  # monotonic
    nbytes: int = 0
    finished: m.Finished | None = None  # its detokenizer has ended it, and its owner has not heard of it


@dataclass(frozen=True, slots=True)
class Due:
    """What a tick asks for: requests to be sent to a backup, and requests to be accepted without one."""

    keep: list[tuple[str, Ref]]
    accept: list[str]
    release: list[tuple[Ref, list[str]]]
    expired: list[Held]


class Keeping:
    """Both sides of one admission actor."""

    def __init__(self, me: Ref) -> None:
        self._me = me
        self._sought: dict[str, _Sought] = {}
        self._kept_by: dict[str, Ref] = {}
        self._releases: dict[tuple[str, Ref], tuple[float, float]] = {}  # when to repeat, and when to stop
        self.held: dict[str, Held] = {}
        self._held_nbytes = 0
        self._soonest = float("inf")  # no held record expires before this
        self.refused = 0
        self.without = 0  # requests that were accepted while nobody else held them

    def __len__(self) -> int:
        return len(self.held)

    # --- as an owner ----------------------------------------------------------------------------

    def begin(self, request_id: str, others: Sequence[Ref], now: float, *, accepted: bool = False) -> Ref | None:
        """Choose who holds a new request too; none if there is nobody, and it may be accepted at once."""
        order = ranked(request_id, (r for r in others if r != self._me))
        to = order[0] if order else None
        if to is None:
            self._sought[request_id] = _Sought(None, now + KEEP_AGAIN_S, accepted=True)
            self.without += not accepted
            return None
        self._sought[request_id] = _Sought(to, now + KEEP_WAIT_S, now + ACCEPT_WITHIN_S, accepted=accepted, asked=[to])
        return to

    def on_kept(self, msg: m.Kept, sender: Ref, now: float) -> bool:
        """Note that a record is held; true if it is time to say `accepted`."""
        sought = self._sought.get(msg.request_id)
        if sought is None or sender not in sought.asked:
            return False
        del self._sought[msg.request_id]
        self._kept_by[msg.request_id] = sender
        for other in sought.asked:
            if other != sender:
                self._release(msg.request_id, other, now)
        return not sought.accepted

    def waits(self, request_id: str) -> bool:
        """Whether `accepted` waits for a backup."""
        sought = self._sought.get(request_id)
        return sought is not None and not sought.accepted

    def backup_of(self, request_id: str) -> Ref | None:
        """Return who holds one of my requests."""
        return self._kept_by.get(request_id)

    def renew(self, request_id: str, now: float) -> None:
        """A request's fence or owner's word has changed: its backup is to be told, or another one found."""
        backup = self._kept_by.pop(request_id, None)
        if backup is not None:
            self._release(request_id, backup, now)  # unless it is the one that is asked again
        if request_id not in self._sought:
            self._sought[request_id] = _Sought(None, now, accepted=True)

    def ended(self, request_id: str, now: float) -> None:
        """One of my requests is over."""
        sought = self._sought.pop(request_id, None)
        backup = self._kept_by.pop(request_id, None)
        asked = sought.asked if sought is not None else []
        for ref in dict.fromkeys([*asked, backup] if backup is not None else asked):
            self._release(request_id, ref, now)

    def _release(self, request_id: str, ref: Ref, now: float) -> None:
        if len(self._releases) < MAX_RELEASES:
            self._releases[request_id, ref] = (now, now + RELEASE_LIMIT_S)

    def on_released(self, msg: m.Released, sender: Ref) -> None:
        """A backup has let these go."""
        for request_id in msg.request_ids:
            self._releases.pop((request_id, sender), None)

    # --- as a backup ----------------------------------------------------------------------------

    def on_keep(self, msg: m.Keep, owner: Ref, deadline: float) -> bool:
        """Hold a record; false if there is no room, or if a higher fence is known."""
        known = self.held.get(msg.request_id)
        if known is not None and known.keep.fence > msg.fence:
            return False
        nbytes = size(msg.body)
        if known is None and (len(self.held) >= MAX_HELD or self._held_nbytes + nbytes > MAX_HELD_NBYTES):
            self.refused += 1
            return False
        self.take(msg.request_id)
        self.held[msg.request_id] = Held(msg, owner, deadline, nbytes)
        self._held_nbytes += nbytes
        self._soonest = min(self._soonest, deadline + BACKUP_GRACE_S)
        return True

    def on_release(self, msg: m.Release, sender: Ref) -> None:
        """These requests have ended, or its sender owns them no more: what another owner has kept here stays."""
        for request_id in msg.request_ids:
            held = self.held.get(request_id)
            if held is not None and held.owner == sender:
                self.take(request_id)

    def take(self, request_id: str) -> Held | None:
        """Give up holding a record: it is mine from now on, or over."""
        held = self.held.pop(request_id, None)
        self._held_nbytes -= held.nbytes if held is not None else 0
        return held

    def of_owner(self, owner: Ref) -> list[Held]:
        """Return what is held for one owner."""
        return [h for h in self.held.values() if h.owner == owner]

    # --- both -----------------------------------------------------------------------------------

    def member_down(self, ref: Ref, reason: str, now: float) -> None:
        """An admission actor is gone or leaves: what it held for me has to be held by another."""
        for request_id in [r for r, backup in self._kept_by.items() if backup == ref]:
            self.renew(request_id, now)
        for sought in self._sought.values():
            if sought.to == ref:
                sought.next_at = now
        if reason == "exit":
            for key in [k for k in self._releases if k[1] == ref]:
                del self._releases[key]

    @property
    def seeks(self) -> bool:
        """Whether one of my requests is held by nobody else yet."""
        return bool(self._sought)

    def tick(self, others: Sequence[Ref], now: float) -> Due:
        """Say what is due."""
        keep: list[tuple[str, Ref]] = []
        accept: list[str] = []
        if self._sought:
            self._seek([r for r in others if r != self._me], now, keep, accept)
        release: dict[Ref, list[str]] = {}
        for request_id, to in keep:
            self._releases.pop((request_id, to), None)
        for key, (next_at, until) in list(self._releases.items()):
            if now >= until:
                del self._releases[key]
            elif now >= next_at:
                self._releases[key] = (now + RELEASE_RESEND_S, until)
                release.setdefault(key[1], []).append(key[0])
        return Due(keep, accept, list(release.items()), self._expire(now))

    def _expire(self, now: float) -> list[Held]:
        if now < self._soonest:
            return []
        expired = [h for h in self.held.values() if now >= h.deadline + BACKUP_GRACE_S]
        for h in expired:
            self.take(h.keep.request_id)
        self._soonest = min((h.deadline + BACKUP_GRACE_S for h in self.held.values()), default=float("inf"))
        return [h for h in expired if h.finished is None]

    def _go_without(self, request_id: str, sought: _Sought, accept: list[str]) -> None:
        sought.accepted = True
        self.without += 1
        accept.append(request_id)

    def _seek(self, others: list[Ref], now: float, keep: list[tuple[str, Ref]], accept: list[str]) -> None:
        for request_id, sought in self._sought.items():
            if not sought.accepted and now >= sought.accept_at:
                self._go_without(request_id, sought, accept)
            if now < sought.next_at or len(keep) >= PER_TICK:
                continue
            fresh = [r for r in ranked(request_id, others) if r not in sought.asked]
            if not sought.accepted and not fresh:
                self._go_without(request_id, sought, accept)
            if sought.accepted and not fresh:  # once more around
                for ref in sought.asked:
                    self._release(request_id, ref, now)
                sought.asked = []
                fresh = ranked(request_id, others)
            sought.to = fresh[0] if fresh else None
            sought.next_at = now + (KEEP_AGAIN_S if sought.accepted else KEEP_WAIT_S)
            if sought.to is not None:
                sought.asked.append(sought.to)
                keep.append((request_id, sought.to))


def size(value: object) -> int:
    """Return about how many bytes a body takes: its texts, and a little for everything else."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(size, value.values())) + 16 * len(value)
    if isinstance(value, list):
        return 8 * len(value) if value and isinstance(value[0], int) else sum(map(size, value)) + 16
    return 8


def above(fence: Fence, owner: str) -> Fence:
    """Return the fence under which another owner takes a request over."""
    return Fence(fence.term + 1, owner, 0)
