"""The host tier: blocks in this host's memory that outlive the engines which computed them.

Writing: `reserve` lends private staging blocks, somebody copies into them, `commit` inserts them with their header.
Reading: `lookup` pins the longest stored prefix, somebody copies from it and compares checksums, `release` unpins.
Both are leases with an end. A read lease that lapses is simply over (the reader's checksums guard it); a write lease
that lapses puts its blocks into quarantine until the writer is known to be done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

from kvstore.block import BLOCK_TOKENS
from kvstore.eviction import EvictionPolicy, S3FifoPolicy
from kvstore.handoff import checksum
from kvstore.index import Dump, EventLog, Op
from kvstore.owners import Owners, Quotas
from kvstore.pool import BlockPool
from schemas.messages import BlockRef
from schemas.tenants import SHARED

MAX_LEASES = 1024
COUNTERS = (
    "hits misses inserted evicted evicted_quota corrupt aborted lapsed_writes lapsed_reads refused over_quota"
).split()


@dataclass(slots=True)
class Header:
    """What is known of a stored block, checked at each use."""

    hash: bytes
    parent: bytes
    num_tokens: int
    checksum: int
    epoch: str
    block: int
    generation: int
    owner: bytes = SHARED
    head: bytes = b""  # the first block of its chain that was stored when it came
    depth: int = 1  # blocks from there to this one
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Staging:
    """Staging blocks for the hashes at `positions` of the request's list."""

    positions: list[int] = field(default_factory=list)
    refs: list[BlockRef] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Found:
    """The longest stored prefix: blocks pinned until `lease_until`, and the checksums a copy must show."""

    refs: list[BlockRef] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    lease_until: float = 0.0


@dataclass(slots=True)
class _Write:
    hashes: list[bytes]
    parents: list[bytes]
    blocks: list[int]
    owners: list[bytes]
    until: float
    writer: str


@dataclass(slots=True)
class _Read:
    headers: list[Header]
    until: float


class HostTier:
    """Stored blocks of one owner, over a pool of their own. Times are seconds on any one clock."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        policy: EvictionPolicy | None = None,
        max_leases: int = MAX_LEASES,
        quotas: Quotas | None = None,
    ) -> None:
        """Start empty over a pool that nobody else allocates from; `quotas` are the most bytes of each owner."""
        self.pool = pool
        self.epoch = pool.handle().epoch
        self.events = EventLog(self.epoch)
        self._policy: EvictionPolicy = policy if policy is not None else S3FifoPolicy(pool.num_blocks)
        self._max_leases = max_leases
        self.owners = Owners(quotas)
        self._held: set[bytes] = set()  # not to be evicted, stored or not
        self._stored: dict[bytes, Header] = {}
        self._writes: dict[str, _Write] = {}
        self._reads: dict[str, _Read] = {}
        self._lapsed: dict[str, _Write] = {}  # by quarantined ticket
        self._counts = dict.fromkeys(COUNTERS, 0)

    # --- writing -----------------------------------------------------------------------------------

    def reserve(
        self,
        ticket: str,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        now: float,
        deadline: float,
        *,
        writer: str = "",
        owners: Sequence[bytes] = (),
    ) -> Staging:
        """Lend staging blocks for those hashes that are not stored; fewer, or none, when the tier is full.

        An owner at its quota first loses what of its own goes next, and never pushes out anything of another's for
        what is beyond it.

        Two writers of one hash get different blocks; whoever commits first is stored. A known ticket gets the same
        answer again only by its first call: a repetition is refused with an empty one.

        Args:
            ticket: names the lease.
            hashes: of consecutive blocks of one chain.
            parents: the hash before each.
            now: the time.
            deadline: end of the lease.
            writer: who will write, for `writer_gone`.
            owners: whose each block is; `SHARED` where the list ends.
        """
        known = ticket in self._writes or ticket in self._lapsed
        if known or len(self._writes) >= self._max_leases or len(hashes) != len(parents) or deadline <= now:
            self._counts["refused"] += 1
            return Staging()
        wanted = []
        for position, digest in enumerate(hashes):
            header = self._stored.get(digest)
            if header is not None:
                self._touch(header)
            else:
                wanted.append(position)
        # A chain is useful from its head on, so a full tier drops the tail of the wish.
        whose = [*owners[: len(hashes)], *[SHARED] * (len(hashes) - len(owners))]
        keep = set(hashes)
        wanted = self._within_quotas(wanted, whose, keep)
        wanted = wanted[: self._make_room(len(wanted), keep)]
        if not wanted:
            return Staging()
        blocks = self.pool.allocate(len(wanted))
        charged = [whose[i] for i in wanted]
        for owner in charged:
            self.owners.charge(owner, self.pool.block_nbytes)
        self._writes[ticket] = _Write(
            [hashes[i] for i in wanted], [parents[i] for i in wanted], blocks, charged, deadline, writer
        )
        return Staging(wanted, self.pool.refs(blocks))

    def commit(self, ticket: str, ok: bool = True, checksums: Sequence[int] = (), *, head: bool = False) -> int:
        """End a write lease: insert its blocks, or drop them when not `ok`; returns how many were inserted.

        With `head`, fewer checksums than blocks insert the first ones and drop the others. A commit after the lease has
        lapsed inserts nothing and ends the quarantine: the writer is done.
        """
        if ticket in self._lapsed:
            self.absolve(ticket)
            return 0
        write = self._writes.pop(ticket, None)
        if write is None:
            return 0
        if head and ok and 0 < len(checksums) < len(write.blocks):
            self._free(write.blocks[len(checksums) :], write.owners[len(checksums) :])
            for part in (write.hashes, write.parents, write.blocks, write.owners):
                del part[len(checksums) :]
        if not ok or len(checksums) != len(write.blocks):
            self._counts["aborted"] += 1
            self._free(write.blocks, write.owners)
            return 0
        inserted = 0
        refs = self.pool.refs(write.blocks)
        for digest, parent, ref, total, owner in zip(
            write.hashes, write.parents, refs, checksums, write.owners, strict=True
        ):
            if digest in self._stored:
                self._free([ref.index], [owner])  # another writer was first
                continue
            before = self._stored.get(parent)
            first, depth = (digest, 1) if before is None else (before.head, before.depth + 1)
            self._stored[digest] = Header(
                digest, parent, BLOCK_TOKENS, total, self.epoch, ref.index, ref.generation, owner, first, depth
            )
            self.events.record(Op.ADD, digest, parent)
            inserted += 1
        # The head of a chain is touched last, so that its tail is evicted before it.
        for digest in reversed(write.hashes):
            self._rank(self._stored[digest])
        self._counts["inserted"] += inserted
        return inserted

    def commit_some(self, ticket: str, checksums: Sequence[int], came: Sequence[bool]) -> int:
        """End a write lease of which only some blocks were written: insert these, drop the others.

        Args:
            ticket: names the lease.
            checksums: of each of its blocks; those of blocks that are dropped are not looked at.
            came: which blocks were written, each of them verified. With another number of them nothing is inserted.

        Returns:
            How many were inserted. Those behind one that is missing are found once it is stored.
        """
        write = self._writes.get(ticket)
        if write is None or not len(checksums) == len(came) == len(write.blocks):
            return self.commit(ticket, ok=False)
        lost = [i for i, there in enumerate(came) if not there]
        self._free([write.blocks[i] for i in lost], [write.owners[i] for i in lost])
        write.hashes, write.parents = list(compress(write.hashes, came)), list(compress(write.parents, came))
        write.blocks, write.owners = list(compress(write.blocks, came)), list(compress(write.owners, came))
        return self.commit(ticket, bool(write.blocks), list(compress(checksums, came)))

    def absolve(self, ticket: str) -> int:
        """The writer of a lapsed lease is done: free its blocks."""
        write = self._lapsed.pop(ticket, None)
        for owner in () if write is None else write.owners:
            self.owners.discharge(owner, self.pool.block_nbytes)
        return self.pool.absolve(ticket)

    def writer_gone(self, writer: str) -> int:
        """A writer's exit is confirmed: drop all its leases; returns how many blocks came back."""
        freed = 0
        for ticket in [t for t, w in self._writes.items() if w.writer == writer]:
            write = self._writes.pop(ticket)
            self._free(write.blocks, write.owners)
            freed += len(write.blocks)
        for ticket in [t for t, w in self._lapsed.items() if w.writer == writer]:
            freed += self.absolve(ticket)
        return freed

    # --- reading -----------------------------------------------------------------------------------

    def lookup(
        self, ticket: str, hashes: Sequence[bytes], parents: Sequence[bytes], now: float, lease_s: float
    ) -> Found:
        """Pin the longest stored prefix whose headers fit the chain.

        Args:
            ticket: names the lease; a ticket in use gets an empty answer.
            hashes: of consecutive blocks of one chain.
            parents: the hash before each; when absent only the chain among `hashes` is checked.
            now: the time.
            lease_s: how long the blocks stay pinned.
        """
        if ticket in self._reads or len(self._reads) >= self._max_leases:
            self._counts["refused"] += 1
            return Found()
        headers = self._follow(hashes, parents)
        self._counts["hits"] += len(headers)
        self._counts["misses"] += len(hashes) - len(headers)
        if not headers:
            return Found()
        return self._pinned(ticket, headers, now + lease_s)

    def extend(
        self,
        ticket: str,
        held: int,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        now: float,
        lease_s: float,
    ) -> Found:
        """Pin more of a chain under a read lease and renew it; returns all that is pinned then.

        Args:
            ticket: names the lease.
            held: how many blocks it has, 0 for a new one. If it has not (any more), nothing is pinned.
            hashes: of the blocks that follow.
            parents: the hash before each.
            now: the time.
            lease_s: how long all of them stay pinned from now on.
        """
        read = self._reads.get(ticket)
        if held != (0 if read is None else len(read.headers)):
            return Found()
        if read is None and len(self._reads) >= self._max_leases:
            return Found()
        more = self._follow(hashes, parents)
        if read is None and not more:
            return Found()
        before = [] if read is None else read.headers
        return self._pinned(ticket, more, now + lease_s, before=before)

    def extend_or_release(
        self,
        ticket: str,
        held: int,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        now: float,
        lease_s: float,
    ) -> Found:
        """Like `extend`; where nothing is pinned then, what was held is given back."""
        found = self.extend(ticket, held, hashes, parents, now, lease_s)
        if held and not found.refs:
            self.release(ticket)
        return found

    def pin(self, ticket: str, hashes: Sequence[bytes], now: float, lease_s: float) -> list[Header]:
        """Pin those of these blocks that are stored, whatever chains they belong to; it is no use of them."""
        if ticket in self._reads or len(self._reads) >= self._max_leases:
            return []
        headers = [self._stored[digest] for digest in dict.fromkeys(hashes) if digest in self._stored]
        for header in headers:
            header.pins += 1
        if headers:
            self._reads[ticket] = _Read(headers, now + lease_s)
        return headers

    def __contains__(self, digest: object) -> bool:
        return digest in self._stored

    def prefix(self, digest: bytes) -> Header | None:
        """Return what is known of a stored block, None if it is not stored; it is no use of it."""
        return self._stored.get(digest)

    def _follow(self, hashes: Sequence[bytes], parents: Sequence[bytes]) -> list[Header]:
        """Return the headers of the longest stored prefix; one that does not fit the chain is dropped."""
        headers: list[Header] = []
        for position, digest in enumerate(hashes):
            header = self._stored.get(digest)
            if header is None:
                break
            wanted = parents[position] if position < len(parents) else (hashes[position - 1] if position else None)
            if not self._sound(header, digest) or (wanted is not None and header.parent != wanted):
                self._condemn(digest)
                break
            headers.append(header)
        return headers

    def _pinned(self, ticket: str, headers: list[Header], until: float, before: Sequence[Header] = ()) -> Found:
        for header in headers:
            header.pins += 1
        for header in reversed(headers):
            self._touch(header)
        everything = [*before, *headers]
        self._reads[ticket] = _Read(everything, until)
        refs = self.pool.refs([header.block for header in everything])
        return Found(refs, [header.checksum for header in everything], until)

    def release(self, ticket: str) -> bool:
        """End a read lease; false if there is none (any more), and then what was read must not be used."""
        read = self._reads.pop(ticket, None)
        if read is None:
            return False
        for header in read.headers:
            header.pins -= 1
            if header.pins == 0 and self._stored.get(header.hash) is not header:
                self._free([header.block], [header.owner])  # was condemned while it was being read
        return True

    def reading(self, ticket: str) -> bool:
        """Whether this read lease is in force."""
        return ticket in self._reads

    def verify(self, digest: bytes) -> bool:
        """Whether a block is stored with the bytes that its header promises; one that is not goes."""
        header = self._stored.get(digest)
        if header is None:
            return False
        size = self.pool.block_nbytes
        data = self.pool.view()[header.block * size : (header.block + 1) * size]
        if self._sound(header, digest) and checksum(data) == header.checksum:
            return True
        self._condemn(digest)
        return False

    def report_corrupt(self, hashes: Sequence[bytes]) -> int:
        """A reader's copy did not match: check these blocks and drop the bad ones; returns how many."""
        return sum(1 for digest in hashes if digest in self._stored and not self.verify(digest))

    # --- pins --------------------------------------------------------------------------------------

    def hold(self, hashes: Iterable[bytes]) -> None:
        """Keep these blocks from being evicted until `let_go`, those too that are stored later.

        They leave the order of eviction, so that looking for a victim takes no longer for them.
        """
        for digest in hashes:
            self._held.add(digest)
            if digest in self._stored:
                self._policy.remove(digest)
                self.owners.remove(self._stored[digest].owner, digest)

    def let_go(self, hashes: Sequence[bytes]) -> None:
        """These blocks may be evicted again; in the order they are as if new."""
        self._held.difference_update(hashes)
        for digest in reversed(hashes):
            if digest in self._stored:
                self._rank(self._stored[digest])

    def _rank(self, header: Header) -> None:
        if header.hash not in self._held:
            self._policy.insert(header.hash)
            self.owners.insert(header.owner, header.hash)

    # --- time --------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[str]:
        """End leases that are over; returns the tickets of writers that must confirm that they are done."""
        for ticket in [t for t, r in self._reads.items() if r.until <= now]:
            self.release(ticket)
            self._counts["lapsed_reads"] += 1
        late = [t for t, w in self._writes.items() if w.until <= now]
        for ticket in late:
            write = self._writes.pop(ticket)
            self.pool.quarantine(write.blocks, ticket)
            self._lapsed[ticket] = write
            self._counts["lapsed_writes"] += 1
        return late

    # --- questions ---------------------------------------------------------------------------------

    def dump(self) -> Dump:
        """Return everything that is stored, for an index that joins."""
        parents = tuple(header.parent for header in self._stored.values())
        return Dump(self.epoch, self.events.number, tuple(self._stored), parents)

    @property
    def unconfirmed(self) -> dict[str, str]:
        """Lapsed write leases by ticket, with their writers."""
        return {ticket: write.writer for ticket, write in self._lapsed.items()}

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        return {
            "stored": len(self._stored),
            "held": len(self._held),
            "writes": len(self._writes),
            "reads": len(self._reads),
            "unconfirmed": len(self._lapsed),
            **{f"{name}_total": count for name, count in self._counts.items()},
            **self.pool.statistics(),
        }

    def check_integrity(self) -> None:
        """Assert that every block in use is stored, staged, or still read after it was condemned."""
        self.pool.check_integrity()
        stored = {header.block for header in self._stored.values()}
        staged = {block for write in self._writes.values() for block in write.blocks}
        read = {header.block for lease in self._reads.values() for header in lease.headers}
        assert len(stored) == len(self._stored), "two hashes share a block"
        assert not stored & staged, "a staged block is stored"
        assert len(stored | staged | read) == self.pool.in_use, "a block in use belongs to nobody"
        pins: dict[int, int] = {}
        for lease in self._reads.values():
            for header in lease.headers:
                pins[id(header)] = pins.get(id(header), 0) + 1
        assert all(header.pins == pins.get(id(header), 0) for header in self._stored.values()), "pins do not add up"
        held = (self.pool.in_use + self.pool.num_quarantined) * self.pool.block_nbytes
        assert self.owners.total_nbytes == held, "owners do not add up"
        self.owners.check_integrity({h.hash: h.owner for h in self._stored.values() if h.hash not in self._held})

    # --- parts -------------------------------------------------------------------------------------

    def _sound(self, header: Header, digest: bytes) -> bool:
        whole = header.hash == digest and header.num_tokens == BLOCK_TOKENS and header.epoch == self.epoch
        return whole and self.pool.is_lent(header.block, header.generation)

    def _within_quotas(self, wanted: list[int], whose: list[bytes], keep: set[bytes]) -> list[int]:
        """Return what of a wish its owners may have, once their own blocks have gone for it: its head, of each."""
        size = self.pool.block_nbytes
        counts = Counter(whose[i] for i in wanted)
        for owner, count in counts.items():
            while (room := self.owners.room(owner)) is not None and room < count * size:
                victim = self.owners.victim(owner, lambda key: key not in keep and self._stored[key].pins == 0)
                if victim is None:
                    counts[owner] = max(0, room // size)
                    break
                self._drop(victim)
                self._counts["evicted_quota"] += 1
        out = []
        for i in wanted:
            if counts[whose[i]] > 0:
                counts[whose[i]] -= 1
                out.append(i)
        self._counts["over_quota"] += len(wanted) - len(out)
        return out

    def _touch(self, header: Header) -> None:
        self._policy.touch(header.hash)
        if self.owners.ranked:  # each block of each lookup comes here before a first token
            self.owners.touch(header.owner, header.hash)

    def _free(self, blocks: Sequence[int], owners: Sequence[bytes]) -> None:
        self.pool.free(blocks)
        for owner in owners:
            self.owners.discharge(owner, self.pool.block_nbytes)

    def _make_room(self, wanted: int, keep: set[bytes]) -> int:
        """Evict until `wanted` blocks can be had, or nothing more can go; returns how many can be had."""
        while not self.pool.can_allocate(wanted):
            victim = self._policy.victim(lambda key: key not in keep and self._stored[key].pins == 0)
            if victim is None:
                break
            self._drop(victim)
            self._counts["evicted"] += 1
        return min(wanted, self.pool.num_free)

    def _condemn(self, digest: bytes) -> None:
        self._counts["corrupt"] += 1
        self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        header = self._stored.pop(digest)
        self._policy.remove(digest)
        self.owners.remove(header.owner, digest)
        self.events.record(Op.DROP, digest)
        if header.pins == 0:
            self._free([header.block], [header.owner])
