"""Which blocks lie where on the disk, who reads them, and what the files take. No I/O, no threads, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.eviction import EvictionPolicy
from kvstore.index import EventLog, Op
from kvstore.owners import Owners, Quotas
from schemas.tenants import SHARED


@dataclass(slots=True, eq=False)
class Segment:
    """A file of records: what it takes from the disk, which blocks are found in it, how many reads go on."""

    name: str
    charge: int
    owner: bytes = SHARED
    hashes: set[bytes] = field(default_factory=set)
    pins: int = 0
    held: int = 0  # blocks that should not be evicted


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a block lies and what its header must say."""

    segment: Segment
    offset: int
    parent: bytes
    num_tokens: int
    checksum: int


@dataclass(slots=True)
class _Lease:
    segments: list[Segment]
    until: float


class Catalog:
    """The ledger of one folder. A segment is listed, or doomed (no record of it can be found, its file still lies)."""

    def __init__(
        self,
        policy: EvictionPolicy,
        events: EventLog,
        quotas: Quotas | None = None,
        held: set[bytes] | None = None,
    ) -> None:
        """Start empty.

        Args:
            policy: orders segments by name.
            events: told of each block that is found or forgotten.
            quotas: most bytes of each owner.
            held: blocks that should not be evicted; changed by `hold` and `let_go` alone.
        """
        self._held = held if held is not None else set()
        self._kept: dict[str, Segment] = {}  # with such blocks, so that they are in no order of eviction
        self.owners = Owners(quotas)
        self.records: dict[bytes, Place] = {}
        self.segments: dict[str, Segment] = {}
        self.doomed: dict[str, Segment] = {}
        self.allocated = 0  # bytes, ever
        self.freed = 0
        self._policy, self._events = policy, events
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 0

    @property
    def in_use(self) -> int:
        """Bytes that all files take, doomed ones included."""
        return self.allocated - self.freed

    @property
    def num_leases(self) -> int:
        """Reads that go on."""
        return len(self._leases)

    def add(self, segment: Segment, entries: Iterable[tuple[bytes, Place]]) -> int:
        """List a segment and those of its blocks that are not known yet; returns how many these are."""
        self.allocated += segment.charge
        self.owners.charge(segment.owner, segment.charge)
        self.segments[segment.name] = segment
        for digest, place in entries:
            if digest not in self.records:
                self.records[digest] = place
                segment.hashes.add(digest)
                self._events.record(Op.ADD, digest, place.parent)
        segment.held = sum(digest in self._held for digest in segment.hashes)
        self._rank(segment)
        inserted = len(segment.hashes)
        if inserted == 0:
            self.doom(segment)
        return inserted

    def prefix(self, hashes: Sequence[bytes], parents: Sequence[bytes]) -> list[Place]:
        """Return the places of the longest prefix that is stored after the right parents."""
        out = []
        for digest, parent in zip(hashes, parents, strict=False):
            place = self.records.get(digest)
            if place is None or place.parent != parent:
                break
            out.append(place)
        return out

    def drop(self, digest: bytes, place: Place) -> bool:
        """Forget a block, if it still lies there; a segment without any is doomed."""
        if self.records.get(digest) is not place:
            return False
        del self.records[digest]
        self._events.record(Op.DROP, digest)
        place.segment.hashes.discard(digest)
        if digest in self._held:
            self._less_held(place.segment)
        if not place.segment.hashes:
            self.doom(place.segment)
        return True

    def doom(self, segment: Segment) -> int:
        """Forget a whole segment; its file can go once nobody reads it. Returns how many blocks went with it."""
        if self.segments.pop(segment.name, None) is None:
            return 0
        gone, segment.hashes = segment.hashes, set()
        for digest in gone:
            del self.records[digest]
            self._events.record(Op.DROP, digest)
        self.doomed[segment.name] = segment
        self._unrank(segment)
        return len(gone)

    def victim(self, owner: bytes | None = None) -> Segment | None:
        """Return the segment, of this owner if one is named, that should go next among those that nobody reads.

        One with blocks that should not be evicted goes only where nothing else can: it never stops the disk.
        """

        def can_go(key: bytes) -> bool:
            return self.segments[key.decode()].pins == 0

        name = self._policy.victim(can_go) if owner is None else self.owners.victim(owner, can_go)
        if name is not None:
            return self.segments[name.decode()]
        return next((s for s in self._kept.values() if s.pins == 0 and owner in (None, s.owner)), None)

    # --- blocks that should stay -------------------------------------------------------------------

    def hold(self, hashes: Iterable[bytes]) -> None:
        """Evict the segments of these blocks last until `let_go`, also those that are written later."""
        for digest in hashes:
            if digest not in self._held:
                self._held.add(digest)
                if (place := self.records.get(digest)) is not None:
                    place.segment.held += 1
                    if place.segment.held == 1:
                        self._unrank(place.segment)
                        self._rank(place.segment)

    def let_go(self, hashes: Iterable[bytes]) -> None:
        """Whatever holds these blocks has ended."""
        for digest in hashes:
            if digest in self._held:
                self._held.discard(digest)
                if (place := self.records.get(digest)) is not None:
                    self._less_held(place.segment)

    def _less_held(self, segment: Segment) -> None:
        segment.held -= 1
        if segment.held == 0:
            self._unrank(segment)
            self._rank(segment)

    def _rank(self, segment: Segment) -> None:
        if segment.held:
            self._kept[segment.name] = segment
        else:
            self._policy.insert(segment.name.encode())
            self.owners.insert(segment.owner, segment.name.encode())

    def _unrank(self, segment: Segment) -> None:
        self._kept.pop(segment.name, None)
        self._policy.remove(segment.name.encode())
        self.owners.remove(segment.owner, segment.name.encode())

    def removable(self) -> list[Segment]:
        """Return the doomed segments that nobody reads (any more)."""
        return [segment for segment in self.doomed.values() if segment.pins == 0]

    def removed(self, segment: Segment) -> None:
        """The file of a doomed segment is gone."""
        del self.doomed[segment.name]
        self.freed += segment.charge
        self.owners.discharge(segment.owner, segment.charge)

    def clear(self) -> None:
        """Forget everything, as if no file were there (any more)."""
        for segment in list(self.segments.values()):
            self.doom(segment)

    # --- reads -------------------------------------------------------------------------------------

    def pin(self, places: Iterable[Place], until: float) -> int:
        """Keep the files of these places until `unpin`, or until a time; returns the lease's number."""
        segments = list({id(place.segment): place.segment for place in places}.values())
        for segment in segments:
            segment.pins += 1
        # The earliest is touched last: the beginning of a chain is worth more than its end.
        for segment in reversed(segments):
            self._policy.touch(segment.name.encode())
            self.owners.touch(segment.owner, segment.name.encode())
        self._next_lease += 1
        self._leases[self._next_lease] = _Lease(segments, until)
        return self._next_lease

    def unpin(self, lease: int) -> bool:
        """End a read; false if its lease was over, and then what was read must not be used."""
        held = self._leases.pop(lease, None)
        if held is None:
            return False
        for segment in held.segments:
            segment.pins -= 1
        return True

    def expire(self, now: float) -> int:
        """End leases that are over; returns how many."""
        late = [number for number, lease in self._leases.items() if lease.until <= now]
        for number in late:
            self.unpin(number)
        return len(late)

    def check_integrity(self) -> None:
        """Assert that records, segments, pins and bytes add up."""
        places = set()
        for digest, place in self.records.items():
            assert self.segments.get(place.segment.name) is place.segment, "a record lies in no listed segment"
            assert digest in place.segment.hashes, "a segment does not know its record"
            places.add((place.segment.name, place.offset))
        assert len(places) == len(self.records), "two hashes share a place"
        listed = [segment.hashes for segment in self.segments.values()]
        assert sum(map(len, listed)) == len(self.records), "records do not add up"
        assert all(listed), "a segment without a record is listed"
        assert not self.segments.keys() & self.doomed.keys(), "a segment is listed and doomed"
        everything = [*self.segments.values(), *self.doomed.values()]
        assert sum(segment.charge for segment in everything) == self.in_use, "allocated − freed is not in use"
        assert self.owners.total_nbytes == self.in_use, "owners do not add up"
        free = {name: segment for name, segment in self.segments.items() if not segment.held}
        self.owners.check_integrity({name.encode(): segment.owner for name, segment in free.items()})
        assert self.segments.keys() - free.keys() == self._kept.keys(), "a segment is in the wrong order"
        for segment in self.segments.values():
            assert segment.held == sum(digest in self._held for digest in segment.hashes), "held blocks do not add up"
        pins: dict[int, int] = {}
        for lease in self._leases.values():
            for segment in lease.segments:
                pins[id(segment)] = pins.get(id(segment), 0) + 1
        assert all(segment.pins == pins.get(id(segment), 0) for segment in everything), "pins do not add up"
