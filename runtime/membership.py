"""Who is alive, by heartbeats and exit notices: a pure view, and the thin driver that feeds it from the bus."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.bus import Bus, BusMessage, Subscription
from runtime.clock import Clock
from schemas.codec import DecodeError, decode
from schemas.messages import ExitNotice, Heartbeat
from schemas.subjects import EXIT, HEARTBEATS, Ref

_log = logging.getLogger("headrace.membership")

SILENCE_S = 1.2
DEAF_S = 0.75  # three heartbeats, and less than the silence that makes others suspect
FORGET_S = 60.0  # how long the dead are remembered, so that their late heartbeats revive nobody
MAX_SKEW_S = 0.2
SKEWED = "this clock is"  # how the reason of an actor begins that has not failed but whose clock is wrong
SKEW_SAMPLES = 16
SKEW_LEAST = 4  # heartbeats: a single one may come late, as those of a whole fleet that starts do
MAX_MEMBERS = 4096
MAX_DEAD = 16_384  # remembered; the one that died first is forgotten before its time


@dataclass(frozen=True, slots=True)
class Member:
    """One incarnation of one actor, as last heard."""

    ref: Ref
    node: str
    host: str
    pid: int
    state: str  # starting | ready | draining | failed
    load: dict[str, Any]
    last_heard: float  # monotonic, on this node
    silent: bool = False
    exited: bool = False
    reason: str = ""
    seq: int = 0
    loop_lag_s: float = 0.0
    skewed: bool = False  # its clock is more than 200 ms from the median
    private: bool = False  # it works for its own node alone
    computing: tuple[str, ...] = ()  # requests of the step in which its process crashed

    @property
    def up(self) -> bool:
        """Whether it may be sent to."""
        return not self.silent and not self.exited


@dataclass(frozen=True, slots=True)
class Down:
    """An incarnation is gone: `exit` (confirmed), `silent` (suspected) or `superseded` (its id has a new epoch)."""

    ref: Ref
    reason: str


@dataclass(frozen=True, slots=True)
class Changed:
    """A member appeared, changed its state, or speaks again after a silence."""

    ref: Ref
    state: str


Event = Down | Changed


@dataclass(slots=True)
class MembershipView:
    """Pure state of membership: heartbeats, notices and `now` in, events out.

    Silence counts only while `check` is told that this node itself is well; otherwise every timer restarts (R7).
    """

    silence_s: float = SILENCE_S
    forget_s: float = FORGET_S
    _members: dict[Ref, Member] = field(default_factory=dict)
    _current: dict[tuple[str, str], Ref] = field(default_factory=dict)
    _dead: dict[Ref, float] = field(default_factory=dict)
    _offsets: dict[str, deque[float]] = field(default_factory=dict)
    _known: dict[str, float] = field(default_factory=dict)  # the offset of each node that was heard often enough
    _median: float = 0.0  # of those
    _stamps: dict[str, float] = field(default_factory=dict)  # of each node's last sample: its actors' beats share one
    _well_since: float = 0.0
    refused: int = 0

    def heard(self, beat: Heartbeat, now: float, wall: float, *, timely: bool = True) -> list[Event]:
        """Take a heartbeat; one that waited here before it was looked at (not `timely`) tells nothing of clocks."""
        ref = beat.ref
        if ref in self._dead:
            return []
        old = self._members.get(ref)
        if old is None and len(self._members) >= MAX_MEMBERS:
            self.refused += 1
            return []
        if old is not None and beat.seq < old.seq:
            return []
        if timely and self._stamps.get(beat.node) != beat.sent_at:
            self._stamps[beat.node] = beat.sent_at
            self._sample(beat.node, beat.sent_at - wall)
        member = Member(
            ref, beat.node, beat.host, beat.pid, beat.state, beat.load, now,
            reason=beat.reason, seq=beat.seq, loop_lag_s=beat.loop_lag_s,
            skewed=abs(self.skew(beat.node)) > MAX_SKEW_S, private=beat.private,
        )  # fmt: skip
        self._members[ref] = member
        if old is not None:
            return [Changed(ref, beat.state)] if old.silent or old.state != beat.state else []
        events: list[Event] = []
        previous = self._current.get((ref.kind, ref.id))
        self._current[ref.kind, ref.id] = ref
        if previous is not None:
            events += self._bury(previous, "superseded", now)
        events.append(Changed(ref, beat.state))
        return events

    def exited(self, notice: ExitNotice, now: float) -> list[Event]:
        """Take a supervisor's word that a node has ended; covers members of that node and pid that it did not name."""
        refs = dict.fromkeys(notice.refs)
        for member in self._members.values():
            if member.node == notice.node and member.pid == notice.pid:
                refs[member.ref] = None
        events: list[Event] = []
        for ref in refs:
            events += self._bury(ref, "exit", now, tuple(notice.computing))
        return events

    def check(self, now: float, well: bool) -> list[Event]:
        """Find who has been silent too long; `well` says whether this node may judge."""
        if not well:
            self._well_since = now
            return []
        events: list[Event] = []
        for ref, member in self._members.items():
            heard = member.last_heard if member.last_heard > self._well_since else self._well_since
            if now - heard > self.silence_s and member.up:
                events.append(Down(ref, "silent"))
        for event in events:
            self._members[event.ref] = replace(self._members[event.ref], silent=True)
        self._forget(now)
        return events

    def _bury(self, ref: Ref, reason: str, now: float, computing: tuple[str, ...] = ()) -> list[Event]:
        if ref in self._dead and (ref not in self._members or reason != "exit" or self._members[ref].exited):
            return []
        self._dead[ref] = now
        if len(self._dead) > MAX_DEAD:
            oldest = next(iter(self._dead))
            del self._dead[oldest]
            self._remove(oldest)
        member = self._members.get(ref)
        if member is not None:
            if reason == "exit":
                self._members[ref] = replace(member, exited=True, computing=computing)
            else:
                self._members[ref] = replace(member, silent=True)
        return [Down(ref, reason)]

    def _sample(self, node: str, offset: float) -> None:
        """Take a sample of a node's clock; the median is renewed only where the node's offset changes."""
        samples = self._offsets.setdefault(node, deque(maxlen=SKEW_SAMPLES))
        samples.append(offset)
        if len(samples) >= SKEW_LEAST and (fastest := max(samples)) != self._known.get(node):
            self._known[node] = fastest
            self._median = statistics.median(self._known.values())

    def _forget(self, now: float) -> None:
        for ref in [r for r, since in self._dead.items() if now - since > self.forget_s]:
            del self._dead[ref]
            self._remove(ref)
        lost = [m.ref for m in self._members.values() if m.silent and now - m.last_heard > 5 * self.forget_s]
        for ref in lost:
            self._remove(ref)

    def _remove(self, ref: Ref) -> None:
        member = self._members.pop(ref, None)
        if self._current.get((ref.kind, ref.id)) == ref:
            del self._current[ref.kind, ref.id]
        if member is not None and all(m.node != member.node for m in self._members.values()):
            self._offsets.pop(member.node, None)
            self._stamps.pop(member.node, None)
            if self._known.pop(member.node, None) is not None:
                self._median = statistics.median(self._known.values()) if self._known else 0.0

    # --- questions -------------------------------------------------------------------------------------

    def members(
        self, kind: str | None = None, *, states: Iterable[str] = ("ready",), asker: str = ""
    ) -> list[Member]:
        """Return who is up, in one of `states` and with a right clock, ordered by address.

        Of one kind, those are left out that work for another node than the `asker` alone.
        """
        wanted = frozenset(states)
        found = [
            m for m in self._members.values()
            if m.up and not m.skewed and m.state in wanted
            and (kind is None or (m.ref.kind == kind and (not m.private or m.node == asker)))
        ]  # fmt: skip
        return sorted(found, key=lambda m: m.ref)

    def all(self) -> list[Member]:
        """Return everyone that is remembered, the silent and the dead included."""
        return sorted(self._members.values(), key=lambda m: m.ref)

    def get(self, ref: Ref) -> Member | None:
        """Return what is known of an incarnation."""
        return self._members.get(ref)

    def is_up(self, ref: Ref) -> bool:
        """Whether an incarnation was heard and is neither silent nor dead."""
        member = self._members.get(ref)
        return member is not None and member.up

    def offset(self, node: str) -> float:
        """Return how far a node's clock is ahead of ours in seconds, the quickest of its last beats counting."""
        samples = self._offsets.get(node)
        return max(samples) if samples else 0.0

    def skew(self, node: str) -> float:
        """Return how far a node's clock is from the median of all; 0 while fewer than three nodes are known."""
        return self._known[node] - self._median if node in self._known and len(self._known) >= 3 else 0.0

    def own_skew(self) -> float:
        """Return how far our own clock is ahead of the median of all; 0 while fewer than three nodes are known."""
        return -self._median if len(self._known) >= 3 else 0.0


DownListener = Callable[[Ref, str], None]
ChangedListener = Callable[[Ref, str], None]


class Membership:
    """Feeds a `MembershipView` from the bus and tells listeners; `check` is to be called every 50 to 200 ms.

    `node` is this node's name, if it beats itself: whoever does not hear its own heart hears nobody's.
    """

    def __init__(
        self, clock: Clock, well: Callable[[], bool] = lambda: True, *, silence_s: float = SILENCE_S, node: str = ""
    ) -> None:
        self.view = MembershipView(silence_s=silence_s)
        self._node = node
        self._own_beat_at: float | None = None
        self._clock = clock
        self._well = well
        self._down: list[DownListener] = []
        self._changed: list[ChangedListener] = []
        self._subscriptions: list[Subscription] = []
        self.malformed = 0

    def listen(self, *, down: DownListener | None = None, changed: ChangedListener | None = None) -> None:
        """Call these for every event from now on."""
        if down is not None:
            self._down.append(down)
        if changed is not None:
            self._changed.append(changed)

    async def start(self, bus: Bus) -> None:
        """Listen to heartbeats and exit notices."""
        self._subscriptions = [
            await bus.subscribe(EXIT, self.handle),
            await bus.subscribe(HEARTBEATS, self.handle),
        ]

    async def stop(self) -> None:
        """Listen no more."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions = []

    def handle(self, message: BusMessage) -> None:
        """Take a heartbeat or an exit notice from the bus."""
        try:
            body, _ = decode(message.payload)
        except DecodeError as exc:
            self.malformed += 1
            if self.malformed == 1:
                _log.warning("malformed message on %s: %s", message.subject, exc)
            return
        if isinstance(body, Heartbeat):
            self.heard(body)
        elif isinstance(body, ExitNotice):
            self._tell(self.view.exited(body, self._clock.now()))

    def heard(self, beat: Heartbeat) -> None:
        """Take a heartbeat."""
        if beat.node == self._node:
            self._own_beat_at = self._clock.now()
        self._tell(self.view.heard(beat, self._clock.now(), self._clock.wall(), timely=self._well()))

    @property
    def deaf(self) -> bool:
        """Whether this node's own heartbeats do not come back: it may be cut off from a bus that looks connected."""
        return self._own_beat_at is not None and self._clock.now() - self._own_beat_at > DEAF_S

    def check(self) -> None:
        """Look for the silent."""
        self._tell(self.view.check(self._clock.now(), self._well()))

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            listeners = self._down if isinstance(event, Down) else self._changed
            what = event.reason if isinstance(event, Down) else event.state
            for listener in listeners:
                try:
                    listener(event.ref, what)
                except Exception as exc:
                    _log.error("a membership listener failed: %r", exc, exc_info=exc)

    def members(self, kind: str | None = None, *, states: Iterable[str] = ("ready",)) -> list[Member]:
        """Return who is up and in one of `states`, ordered by address; of one kind, whom this node may choose."""
        return self.view.members(kind, states=states, asker=self._node)

    def get(self, ref: Ref) -> Member | None:
        """Return what is known of an incarnation."""
        return self.view.get(ref)

    def is_up(self, ref: Ref) -> bool:
        """Whether an incarnation was heard and is neither silent nor dead."""
        return self.view.is_up(ref)
