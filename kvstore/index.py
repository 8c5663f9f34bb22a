"""Where blocks are stored: hints by hash, kept up to date by numbered events of each tier.

The index never lends anything; the tier's owner decides. A tier numbers its changes; whoever follows takes a dump with
the number of its last change, and from then on each next number. A missing number means that the dump must be taken
again, and until then the tier's entries are not served.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.runs import StoredRuns


class Op(enum.Enum):
    """What happened to a stored block."""

    ADD = "add"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Event:
    """Change number `number` of the tier with this epoch; `parent` is the hash before an added block, if known."""

    epoch: str
    number: int
    op: Op
    hash: bytes
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class Dump:
    """All that a tier stores, as of its change `number`; `parents` are the hashes before them, or nothing."""

    epoch: str
    number: int
    hashes: tuple[bytes, ...]
    parents: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """What starting from a tier's stored prefix would take; `source` is empty for computing everything."""

    source: str
    tier: str
    num_blocks: int
    seconds: float


class EventLog:
    """A tier's side: numbers changes and keeps those that nobody has collected yet."""

    def __init__(self, epoch: str, max_pending: int = 65_536) -> None:
        """Start at number 0; more than `max_pending` uncollected events show to followers as a gap."""
        self.epoch = epoch
        self.number = 0
        self._pending: deque[Event] = deque(maxlen=max_pending)

    def __len__(self) -> int:
        """How many events nobody has collected."""
        return len(self._pending)

    def record(self, op: Op, digest: bytes, parent: bytes = b"") -> None:
        """Number a change."""
        self.number += 1
        self._pending.append(Event(self.epoch, self.number, op, digest, parent))

    def collect(self, limit: int | None = None) -> list[Event]:
        """Return the events since the last call, at most `limit`."""
        count = len(self._pending) if limit is None else min(limit, len(self._pending))
        return [self._pending.popleft() for _ in range(count)]


class _Source:
    __slots__ = ("early", "number", "runs", "tier")

    def __init__(self, capacity: int) -> None:
        self.tier = ""
        self.number: int | None = None  # of the last event applied; None until a dump is loaded
        self.early: dict[int, Event] = {}  # came before the dump, or after a gap
        self.runs = StoredRuns(capacity)


class BlockIndex:
    """Hash to the epochs of the tiers that store it; bounded per tier."""

    def __init__(self, capacity: int = 1_000_000, max_early: int = 65_536) -> None:
        """Start empty.

        Args:
            capacity: hashes kept per tier; beyond it the oldest is forgotten, which is only a missed hint.
            max_early: events kept per tier while its dump is awaited; beyond it they are dropped (a later gap).
        """
        self.capacity = capacity
        self._max_early = max_early
        self._sources: dict[str, _Source] = {}
        self._counts = {"events": 0, "gaps": 0, "stale": 0}
        self._forgotten = 0  # by sources that are gone

    def apply(self, event: Event) -> bool:
        """Take an event; false if the tier's dump is needed (again)."""
        source = self._source(event.epoch)
        if source.number is not None and event.number <= source.number:
            self._counts["stale"] += 1
            return True
        if source.number is None or event.number != source.number + 1:
            self._lose(source)
            if len(source.early) < self._max_early:
                source.early[event.number] = event
            return False
        source.number = event.number
        self._counts["events"] += 1
        match event.op:
            case Op.ADD:
                source.runs.add(event.hash, event.parent)
            case Op.DROP:
                source.runs.drop(event.hash)
        return True

    def load(self, dump: Dump) -> bool:
        """Take a tier's dump, then the events that came early; false if there is a gap between the two."""
        runs = StoredRuns(self.capacity)
        for digest, parent in zip(dump.hashes, dump.parents or [b""] * len(dump.hashes), strict=True):
            runs.add(digest, parent)
        return self.install(dump.epoch, dump.number, runs)

    def install(self, epoch: str, number: int, runs: StoredRuns, *, tier: str = "host") -> bool:
        """Take a dump that came in pages, like `load`; `runs` belongs to the index from now on."""
        source = self._source(epoch)
        if source.number is not None and number <= source.number:
            self._counts["stale"] += 1
            return True
        self._forgotten += source.runs.forgotten
        source.number, source.runs, source.tier = number, runs, tier
        early, source.early = source.early, {}
        whole = True
        for at in sorted(early):
            whole = self.apply(early[at])
        return whole

    def lose(self, epoch: str) -> None:
        """Events of this tier are known to be missing: serve nothing of it until the next dump."""
        if epoch in self._sources:
            self._lose(self._sources[epoch])

    def drop_source(self, epoch: str) -> int:
        """A tier is gone; returns how many hints went with it."""
        source = self._sources.pop(epoch, None)
        if source is None:
            return 0
        self._forgotten += source.runs.forgotten
        return len(source.runs)

    def ready(self, epoch: str) -> bool:
        """Whether a tier's entries are complete."""
        return self.number(epoch) is not None

    def number(self, epoch: str) -> int | None:
        """Number of the last change known of a tier; nothing while its dump is needed."""
        source = self._sources.get(epoch)
        return None if source is None else source.number

    def locations(self, digest: bytes) -> list[str]:
        """Return the epochs of the tiers that store this block."""
        return [epoch for epoch, source in self._sources.items() if digest in source.runs]

    def longest_prefix(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return, per tier, how many of the first hashes it stores; a hole ends a prefix."""
        out = {}
        for epoch, source in self._sources.items():
            length = source.runs.prefix(hashes)
            if length:
                out[epoch] = length
        return out

    def joint_prefix(self, epochs: Iterable[str], hashes: Sequence[bytes]) -> int:
        """Return how many of the first hashes these tiers store between them."""
        runs = [self._sources[epoch].runs for epoch in epochs if epoch in self._sources]
        length, step = 0, 1
        while step and length < len(hashes):
            step = max((each.prefix(hashes, length) for each in runs), default=0)
            length += step
        return length

    def offers(
        self, hashes: Sequence[bytes], load_s: Mapping[str, float], prefill_s: Callable[[int], float]
    ) -> list[Offer]:
        """Return what each way to a prompt's KV would take, the quickest first; computing all of it is one.

        Args:
            hashes: of the prompt's blocks.
            load_s: seconds to load one block, by kind of tier; tiers of other kinds are left out.
            prefill_s: seconds to compute what follows the first so many blocks.
        """
        out = [Offer("", "", 0, prefill_s(0))]
        for epoch, source in self._sources.items():
            length = source.runs.prefix(hashes) if source.tier in load_s else 0
            if length:
                out.append(Offer(epoch, source.tier, length, length * load_s[source.tier] + prefill_s(length)))
        return sorted(out, key=lambda offer: (offer.seconds, -offer.num_blocks, offer.source))

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        sources = self._sources.values()
        return {
            "sources": len(self._sources),
            "hashes": sum(len(source.runs) for source in sources),
            "runs": sum(source.runs.num_runs for source in sources),
            "early": sum(len(source.early) for source in sources),
            "forgotten_total": self._forgotten + sum(source.runs.forgotten for source in sources),
            **{f"{name}_total": count for name, count in self._counts.items()},
        }

    def _source(self, epoch: str) -> _Source:
        source = self._sources.get(epoch)
        if source is None:
            source = self._sources[epoch] = _Source(self.capacity)
        return source

    def _lose(self, source: _Source) -> None:
        if source.number is not None:
            self._counts["gaps"] += 1
            self._forgotten += source.runs.forgotten
            source.number, source.runs = None, StoredRuns(self.capacity)
