"""Where blocks are stored: hints by hash, kept up to date by numbered events of each tier.

The index never lends anything; the tier's owner decides. A tier numbers its changes; whoever follows takes a dump with
the number of its last change, and from then on each next number. A missing number means that the dump must be taken
again, and until then the tier's entries are not served.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Op(enum.Enum):
    """What happened to a stored block."""

    ADD = "add"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Event:
    """Change number `number` of the tier with this epoch."""

    epoch: str
    number: int
    op: Op
    hash: bytes


@dataclass(frozen=True, slots=True)
class Dump:
    """All that a tier stores, as of its change `number`."""

    epoch: str
    number: int
    hashes: tuple[bytes, ...]


class EventLog:
    """A tier's side: numbers changes and keeps those that nobody has collected yet."""

    def __init__(self, epoch: str, max_pending: int = 65_536) -> None:
        """Start at number 0; more than `max_pending` uncollected events show to followers as a gap."""
        self.epoch = epoch
        self.number = 0
        self._pending: deque[Event] = deque(maxlen=max_pending)

    def record(self, op: Op, digest: bytes) -> None:
        """Number a change."""
        self.number += 1
        self._pending.append(Event(self.epoch, self.number, op, digest))

    def collect(self) -> list[Event]:
        """Return the events since the last call."""
        out = list(self._pending)
        self._pending.clear()
        return out


class _Source:
    __slots__ = ("early", "hashes", "number")

    def __init__(self) -> None:
        self.number: int | None = None  # of the last event applied; None until a dump is loaded
        self.early: dict[int, Event] = {}  # came before the dump, or after a gap
        self.hashes: OrderedDict[bytes, None] = OrderedDict()


class BlockIndex:
    """Hash to the epochs of the tiers that store it; bounded per tier."""

    def __init__(self, capacity: int = 1_000_000, max_early: int = 65_536) -> None:
        """Start empty.

        Args:
            capacity: hashes kept per tier; beyond it the oldest is forgotten, which is only a missed hint.
            max_early: events kept per tier while its dump is awaited; beyond it they are dropped (a later gap).
        """
        self._capacity = capacity
        self._max_early = max_early
        self._sources: dict[str, _Source] = {}
        self._counts = {"events": 0, "gaps": 0, "forgotten": 0, "stale": 0}

    def apply(self, event: Event) -> bool:
        """Take an event; false if the tier's dump is needed (again)."""
        source = self._sources.setdefault(event.epoch, _Source())
        if source.number is not None and event.number <= source.number:
            self._counts["stale"] += 1
            return True
        if source.number is None or event.number != source.number + 1:
            if source.number is not None:
                self._counts["gaps"] += 1
                source.number = None
                source.hashes.clear()
            if len(source.early) < self._max_early:
                source.early[event.number] = event
            return False
        self._take(source, event)
        return True

    def load(self, dump: Dump) -> bool:
        """Take a tier's dump, then the events that came early; false if there is a gap between the two."""
        source = self._sources.setdefault(dump.epoch, _Source())
        if source.number is not None and dump.number <= source.number:
            self._counts["stale"] += 1
            return True
        source.number = dump.number
        source.hashes = OrderedDict.fromkeys(dump.hashes)
        self._trim(source)
        early, source.early = source.early, {}
        whole = True
        for number in sorted(early):
            whole = self.apply(early[number])
        return whole

    def drop_source(self, epoch: str) -> int:
        """A tier is gone; returns how many hints went with it."""
        source = self._sources.pop(epoch, None)
        return 0 if source is None else len(source.hashes)

    def ready(self, epoch: str) -> bool:
        """Whether a tier's entries are complete."""
        source = self._sources.get(epoch)
        return source is not None and source.number is not None

    def locations(self, digest: bytes) -> list[str]:
        """Return the epochs of the tiers that store this block."""
        return [epoch for epoch, source in self._sources.items() if digest in source.hashes]

    def longest_prefix(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return, per tier, how many of the first hashes it stores; a hole ends a prefix."""
        out = {}
        for epoch, source in self._sources.items():
            length = _prefix(source.hashes, hashes)
            if length:
                out[epoch] = length
        return out

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        return {
            "sources": len(self._sources),
            "hashes": sum(len(source.hashes) for source in self._sources.values()),
            "early": sum(len(source.early) for source in self._sources.values()),
            **{f"{name}_total": count for name, count in self._counts.items()},
        }

    def _take(self, source: _Source, event: Event) -> None:
        source.number = event.number
        self._counts["events"] += 1
        match event.op:
            case Op.ADD:
                source.hashes[event.hash] = None
                self._trim(source)
            case Op.DROP:
                source.hashes.pop(event.hash, None)

    def _trim(self, source: _Source) -> None:
        while len(source.hashes) > self._capacity:
            source.hashes.popitem(last=False)
            self._counts["forgotten"] += 1


def _prefix(stored: Iterable[bytes] | OrderedDict[bytes, None], hashes: Sequence[bytes]) -> int:
    length = 0
    for digest in hashes:
        if digest not in stored:
            break
        length += 1
    return length
