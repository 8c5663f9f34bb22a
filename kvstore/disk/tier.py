"""The disk tier: blocks in segment files that outlive their writers, verified whenever they are read.

Nothing here fails a request. A block that cannot be read, or is not what was asked for, is a miss; a batch that cannot
be written is dropped; the tier then is unhealthy, says why, and tries again after a pause. The one error that leaves
this class is `DiskBusy`, from `open`: a directory has one owner.

One thread may write while others read. Times are seconds on any one clock.
"""

from __future__ import annotations

import errno as codes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.disk.catalog import Catalog, Place, Segment
from kvstore.disk.files import PAGE, Files, Found, Lock
from kvstore.disk.policy import Health
from kvstore.disk.reader import Wanted, read_places
from kvstore.disk.segment import parse_name, segment_name, self_test, staging_name, write_segment
from kvstore.disk.stock import take_stock
from kvstore.errors import BadRecord, DiskBusy
from kvstore.eviction import EvictionPolicy, LruPolicy
from kvstore.handoff import checksum
from kvstore.index import Dump, EventLog
from kvstore.owners import Quotas, Share
from kvstore.record import HEADER_NBYTES, RecordHeader, pack, shelf_of
from schemas.tenants import SHARED

READ_LEASE_S = 10.0
NO_ROOM = (codes.ENOSPC, codes.EDQUOT, codes.EFBIG)
COUNTERS = (
    "hits misses inserted read_nbytes written_nbytes evicted corrupt rejected refused failed_writes failed_reads "
    "lapsed_reads recovered dropped leftovers probes"
).split()


@dataclass(frozen=True, slots=True)
class Block:
    """A block to be written: `checksum` is the xxh3_64 that `data` must have, known since the block was made."""

    hash: bytes
    parent: bytes
    num_tokens: int
    checksum: int
    data: memoryview
    owner: bytes = SHARED


class DiskTier:
    """Stored blocks of one layout in a directory that this object owns."""

    def __init__(
        self,
        directory: Path,
        *,
        layout: str,
        block_nbytes: int,
        epoch: str,
        max_nbytes: int,
        sync: bool = False,
        quotas: Quotas | None = None,
        verify: bool = True,
        policy: Callable[[], EvictionPolicy] = LruPolicy,
        files: Files | None = None,
        step: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Touch nothing yet; see `open`.

        Args:
            directory: made if it is not there.
            layout: of the blocks; the same text means that blocks can be copied.
            block_nbytes: bytes of one block.
            epoch: incarnation of the owner, up to 16 letters and digits.
            max_nbytes: most bytes on the disk, blocks of other layouts in the directory included.
            sync: wait for the disk before a segment counts as written. Without it a loss of power may lose blocks,
                never falsify one.
            quotas: most bytes of each owner, of `max_nbytes`.
            verify: false serves what was read as it is, for tests that must then find wrong bytes.
            policy: makes what decides which segment goes first.
            files: the operating system.
            step: told each step of a write by name, for tests that end the process there.
        """
        self.directory, self.block_nbytes = directory, block_nbytes
        self.shelf = shelf_of(layout, block_nbytes)
        self.folder = directory / f"{self.shelf.hex()}-{block_nbytes}"
        self.health = Health()
        self._stride = HEADER_NBYTES + block_nbytes
        self._epoch, self._max_nbytes, self._sync = epoch, max_nbytes, sync
        self._verify = verify
        self._make_policy = policy
        self._files = files if files is not None else Files()
        self._step = step
        self._lock = threading.Lock()  # the catalog and all below
        self._writing = threading.Lock()  # held by whoever changes files
        self._owner: Lock | None = None
        self.events = EventLog(epoch)
        self._quotas = quotas
        self._held: set[bytes] = set()
        self._catalog = self._new_catalog()
        self._foreign: list[tuple[Path, Found]] = []  # of other layouts, the oldest first
        self._number = 0
        self._counts = dict.fromkeys(COUNTERS, 0)

    # --- life --------------------------------------------------------------------------------------

    def open(self, now: float) -> bool:
        """Claim the directory, remove what dead writers left, find what is stored; returns whether all is well.

        Raises:
            DiskBusy: if another owner lives; nothing was changed then, and `probe` may be used to try again.
        """
        with self._writing:
            try:
                self._begin()
            except DiskBusy as exc:
                self._failed(exc, now)
                raise
            except (OSError, BadRecord) as exc:
                self._failed(exc, now)
        return self.health.ok

    def close(self) -> None:
        """Let the directory go. What is stored stays."""
        with self._writing, self._lock:
            if self._owner is not None:
                self._owner.release()
            self._owner = None
            self._catalog.clear()
            self._catalog = self._new_catalog()
            self._foreign = []

    def probe(self, now: float) -> bool:
        """If the tier is unhealthy and it is time: write, read and verify something; returns whether all is well."""
        with self._writing:
            if self.health.due(now):
                self._counts["probes"] += 1
                try:
                    self._begin()
                except (OSError, BadRecord, DiskBusy) as exc:
                    self._failed(exc, now)
        return self.health.ok

    def _begin(self) -> None:
        self._files.make_folder(self.folder)
        held = self._owner is not None and self._owner.holds()
        if not held:
            if self._owner is not None:
                self._owner.release()
                self._owner = None
            self._owner = Lock(self.directory, f"process {os.getpid()}, epoch {self._epoch}")
        if not held or self.health.errno not in NO_ROOM:
            self._take_stock()  # whatever was wrong, files may be gone
        self._self_test()
        self.health.passed()

    def _take_stock(self) -> None:
        """Find what is stored. Leftovers of dead writers and segments without a sound record go."""
        stock = take_stock(self._files, self.directory, self.folder, self.shelf, self.block_nbytes)
        self._number = max(self._number, stock.number)
        self._counts["leftovers"] += stock.leftovers
        with self._lock:
            self._catalog.clear()  # reads of it go on; their leases are its own
            self._catalog = self._new_catalog()
            self._foreign = stock.foreign
            # Of two copies the later one is better: it was written because the first was not.
            latest = {slot.header.hash: slot for scan in stock.scans for slot in scan.slots}
            for scan in stock.scans:
                # Whoever writes puts one owner's blocks into a segment.
                segment = Segment(scan.name, scan.charge, scan.slots[0].header.owner if scan.slots else SHARED)
                places = (
                    (s.header.hash, Place(segment, s.offset, s.header.parent, s.header.num_tokens, s.header.checksum))
                    for s in scan.slots
                    if latest[s.header.hash] is s
                )
                self._counts["recovered"] += self._catalog.add(segment, places)
                self._counts["dropped"] += scan.bad
        self._remove_doomed()

    def _self_test(self) -> None:
        """Write a record, read it back, compare every byte."""
        pattern = (self._epoch.encode() * (self.block_nbytes // max(1, len(self._epoch)) + 1))[: self.block_nbytes]
        header = self._header(b"\x00" * 32, b"\x00" * 32, 0, checksum(memoryview(pattern)))
        self._number += 2
        one, two = (self.folder / staging_name(self._number - i, self._epoch) for i in (1, 0))
        self_test(self._files, one, two, header + pattern, sync=self._sync)

    # --- writing -----------------------------------------------------------------------------------

    def write(self, blocks: Sequence[Block], now: float) -> int:
        """Store blocks that are not stored yet, as a segment for each owner; returns how many were inserted.

        A block whose data do not have its checksum is left out. Anything else that goes wrong stores none of a segment.
        """
        with self._writing:
            if self._owner is None or not self.health.ok:
                self._counts["refused"] += len(blocks)
                return 0
            wanted = {b.hash: b for b in blocks if b.hash not in self._catalog.records}
            whole = [b for b in wanted.values() if self._sound(b)]
            by_owner: dict[bytes, list[Block]] = {}
            for block in whole:
                by_owner.setdefault(block.owner, []).append(block)
            return sum(self._write_for(owner, theirs, now) for owner, theirs in by_owner.items())

    def _write_for(self, owner: bytes, blocks: list[Block], now: float) -> int:
        # Its beginning is worth most in a chain that is larger than all that may be stored.
        most = min(self._max_nbytes, self._catalog.owners.limit(owner) or self._max_nbytes)
        whole = blocks[: max(0, most - PAGE) // self._stride]
        nbytes = len(whole) * self._stride + PAGE
        if not whole or not self.health.ok or not self._within_quota(owner, nbytes) or not self._make_room(nbytes, now):
            self._counts["refused"] += len(blocks)
            return 0
        self._counts["refused"] += len(blocks) - len(whole)
        return self._write(whole, owner, now)

    def _write(self, blocks: list[Block], owner: bytes, now: float) -> int:
        self._number += 1
        name = segment_name(self._number, self._epoch)
        staging = self.folder / staging_name(self._number, self._epoch)
        records = [(self._header(b.hash, b.parent, b.num_tokens, b.checksum, owner), b.data) for b in blocks]
        try:
            charge = write_segment(self._files, staging, self.folder / name, records, sync=self._sync, step=self._step)
        except OSError as exc:
            self._counts["failed_writes"] += 1
            self._failed(exc, now)
            if exc.errno in NO_ROOM:
                self._give_way()
            return 0
        segment = Segment(name, charge, owner)
        places = (
            (b.hash, Place(segment, i * self._stride, b.parent, b.num_tokens, b.checksum)) for i, b in enumerate(blocks)
        )
        with self._lock:
            inserted = self._catalog.add(segment, places)
        self._step("inserted")
        self.health.proved()
        self._counts["inserted"] += inserted
        self._counts["written_nbytes"] += len(blocks) * self._stride
        return inserted

    def _sound(self, block: Block) -> bool:
        if len(block.data) == self.block_nbytes and checksum(block.data) == block.checksum:
            return True
        self._counts["rejected"] += 1
        return False

    def _header(self, digest: bytes, parent: bytes, num_tokens: int, total: int, owner: bytes = SHARED) -> bytes:
        return pack(RecordHeader(digest, parent, num_tokens, self.block_nbytes, total, self.shelf, self._epoch, owner))

    def _new_catalog(self) -> Catalog:
        return Catalog(self._make_policy(), self.events, self._quotas, self._held)

    # --- room --------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int, now: float) -> bool:
        """Remove other layouts' segments, then the least worthy of ours, until so many bytes fit under the cap."""
        self._remove_doomed()
        while self._used() + nbytes > self._max_nbytes:
            if self._foreign:
                try:
                    self._files.unlink(self._foreign[0][0])
                except OSError as exc:
                    self._failed(exc, now)
                    return False
                del self._foreign[0]
                continue
            if not self._evict():
                return False
        return True

    def _within_quota(self, owner: bytes, nbytes: int) -> bool:
        """Remove this owner's own segments until so many bytes more are within its quota."""
        self._remove_doomed()
        while (room := self._catalog.owners.room(owner)) is not None and room < nbytes:
            if not self._evict(owner):
                return False
        return True

    def _evict(self, owner: bytes | None = None) -> bool:
        with self._lock:
            victim = self._catalog.victim(owner)
            if victim is None:
                return False  # all that is left is being read
            self._counts["evicted"] += self._catalog.doom(victim)
        return self._remove_doomed() > 0

    def _give_way(self) -> None:
        """The disk is full of other things: a cache makes room, a segment at a time, for its own next try."""
        if not self._evict():
            self._remove_doomed()

    def _remove_doomed(self) -> int:
        removed = 0
        with self._lock:
            catalog, going = self._catalog, self._catalog.removable()
        for segment in going:
            try:
                self._files.unlink(self.folder / segment.name)
            except OSError:
                continue  # it still counts, and is tried again
            with self._lock:
                catalog.removed(segment)
            removed += 1
        return removed

    def _used(self) -> int:
        return self._catalog.in_use + sum(found.charge for _, found in self._foreign)

    # --- reading -----------------------------------------------------------------------------------

    def peek(self, hashes: Sequence[bytes], parents: Sequence[bytes]) -> int:
        """Return the length of the longest stored prefix; a hint, which changes nothing and waits for nobody."""
        return len(self._catalog.prefix(hashes, parents))

    def owners_of(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return whose each block is; `SHARED` for what is not stored."""
        places = [self._catalog.records.get(digest) for digest in hashes]
        return [SHARED if place is None else place.segment.owner for place in places]

    def hold(self, hashes: Iterable[bytes]) -> None:
        """Evict these blocks last, see `Catalog.hold`."""
        with self._lock:
            self._catalog.hold(hashes)

    def let_go(self, hashes: Iterable[bytes]) -> None:
        """These blocks are like any other again."""
        with self._lock:
            self._catalog.let_go(hashes)

    def shares(self) -> list[Share]:
        """What each owner's segments take from the disk, most bytes first; other layouts are nobody's."""
        with self._lock:
            return self._catalog.owners.shares()

    def __contains__(self, digest: object) -> bool:
        return digest in self._catalog.records

    def read(
        self, hashes: Sequence[bytes], parents: Sequence[bytes], into: Sequence[memoryview], now: float
    ) -> list[int]:
        """Copy the longest stored prefix into memory and verify it there; returns the checksum of each good block.

        What lies in `into` beyond the returned ones is not to be used. A block whose header is not what was asked for,
        or whose bytes do not have their checksum, is dropped, and the prefix ends before it.

        Args:
            hashes: of consecutive blocks of one chain.
            parents: the hash before each.
            into: where each block goes, `block_nbytes` each.
            now: the time; a read that outlasts its lease of 10 s (see `expire`) is void.
        """
        with self._lock:
            catalog = self._catalog
            places = catalog.prefix(hashes, parents)[: len(into)]
            lease = catalog.pin(places, now + READ_LEASE_S)
        wanted = [Wanted(h, p, data) for h, p, data in zip(hashes, places, into, strict=False)]
        outcome = read_places(self._files, self.folder, self.shelf, wanted, verify=self._verify)
        with self._lock:
            held = catalog.unpin(lease)
            if outcome.bad is not None and self._catalog is catalog:
                catalog.drop(wanted[outcome.bad].hash, wanted[outcome.bad].place)
        if outcome.bad is not None and outcome.error is None:
            self._counts["corrupt"] += 1
            self._blank(wanted[outcome.bad].place)
        if outcome.error is not None:
            self._counts["failed_reads"] += 1
            # What fails while something is known to be wrong does not put the next look at it off.
            if self.health.ok and self._catalog is catalog:
                self._failed(outcome.error, now)
        if not held and places:
            self._counts["lapsed_reads"] += 1
            outcome.checksums.clear()
        self._counts["hits"] += len(outcome.checksums)
        self._counts["misses"] += len(hashes) - len(outcome.checksums)
        self._counts["read_nbytes"] += len(outcome.checksums) * self._stride
        return outcome.checksums

    def _blank(self, place: Place) -> None:
        """Take a bad record out of its file, so that the next start does not find it again."""
        try:
            fd = self._files.open(self.folder / place.segment.name, write=True)
            try:
                self._files.write_at(fd, bytes(HEADER_NBYTES), place.offset)
            finally:
                self._files.close(fd)
        except OSError:
            pass  # it is forgotten here, and found out again if it is ever read again

    def forget(self, hashes: Iterable[bytes]) -> int:
        """Drop blocks; returns how many were stored."""
        with self._lock:
            found = [(h, self._catalog.records[h]) for h in hashes if h in self._catalog.records]
            return sum(self._catalog.drop(digest, place) for digest, place in found)

    def expire(self, now: float) -> int:
        """End the leases of reads that take too long, so that their files can go; returns how many."""
        with self._lock:
            return self._catalog.expire(now)

    def dump(self) -> Dump:
        """Return everything that is stored, for an index that joins."""
        with self._lock:
            records = self._catalog.records
            return Dump(self._epoch, self.events.number, tuple(records), tuple(p.parent for p in records.values()))

    # --- health and bookkeeping --------------------------------------------------------------------

    def _failed(self, exc: OSError | BadRecord | DiskBusy, now: float) -> None:
        """Take note; the reason names no path, since `/health` shows it to everybody."""
        match exc:
            case DiskBusy():
                self.health.fail(codes.EWOULDBLOCK, f"the directory belongs to {exc.owner or 'another process'}", now)
            case BadRecord():
                self.health.fail(codes.EIO, exc.reason, now)
            case _:
                self.health.fail(exc.errno, exc.strerror or "refused by the system", now)

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        catalog = self._catalog
        return {
            "records": len(catalog.records),
            "segments": len(catalog.segments),
            "reads": catalog.num_leases,
            "nbytes": catalog.in_use,
            "foreign_nbytes": sum(found.charge for _, found in self._foreign),
            "max_nbytes": self._max_nbytes,
            "unhealthy": 0 if self.health.ok else 1,
            "errno": self.health.errno,
            **{f"{name}_total": count for name, count in self._counts.items()},
        }

    def check_integrity(self) -> None:
        """Assert that the ledger balances and, where nothing is wrong with the directory, that its files are these."""
        with self._writing, self._lock:
            self._catalog.check_integrity()
            if self._owner is None or not self.health.ok:
                return
            ours = {f.name for f in self._files.list(self.folder) if parse_name(f.name) is not None}
            known = self._catalog.segments.keys() | self._catalog.doomed.keys()
            strange = {path.name for path, _ in self._foreign if path.parent == self.folder}
            assert ours == known | strange, "files and catalog disagree"
