"""Campaigns: the host tier in real shared memory: its blocks, its leases, its writers and readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from chaos.kv.faulty import fill, small_place
from chaos.kv.model import HOST, LAYOUT, NBYTES, Chain, Ground, Tally, chain, content
from kvstore.errors import KvError
from kvstore.eviction import LruPolicy
from kvstore.handoff import checksum, copy_blocks
from kvstore.pool import BlockPool
from kvstore.tiers import Found, HostTier, Staging

LENGTH = 4
NUM_BLOCKS = 16
LEASE_S = 5.0


@dataclass(slots=True)
class Store:
    """A host tier, and the pool of an engine that writes to it and reads from it."""

    tier: HostTier
    engine: BlockPool
    tickets: int = field(default=0)

    def ticket(self) -> str:
        """Return a name that was not used before."""
        self.tickets += 1
        return f"t{self.tickets}"


@contextmanager
def stored(ground: Ground, *chains: Chain, lru: bool = False) -> Iterator[Store]:
    """Yield a store with some chains in it; by least use, if wished, so that it is known who goes first."""
    pool = BlockPool.create(ground.memory, "chaos-kv", NUM_BLOCKS, NBYTES, LAYOUT, "kv", HOST)
    tier = HostTier(pool, policy=LruPolicy() if lru else None)
    engine = BlockPool.create(ground.memory, "chaos-engine", NUM_BLOCKS, NBYTES, LAYOUT, "en", HOST)
    store = Store(tier, engine)
    try:
        for of in chains:
            put(store, of)
        yield store
    finally:
        tier.pool.close()
        engine.close()


def put(store: Store, of: Chain, now: float = 0.0) -> int:
    """Store a chain as an engine does; returns how many blocks were inserted."""
    ticket = store.ticket()
    staging = store.tier.reserve(ticket, of.hashes, of.parents, now, now + LEASE_S)
    return store.tier.commit(ticket, True, write(store.tier, of, staging))


def write(tier: HostTier, of: Chain, staging: Staging) -> list[int]:
    """Fill staging blocks with what belongs there; returns their checksums."""
    sums = []
    for position, ref in zip(staging.positions, staging.refs, strict=True):
        block = tier.pool.view()[ref.index * NBYTES : (ref.index + 1) * NBYTES]
        block[:] = content(of.hashes[position])
        sums.append(checksum(block))
    return sums


def whole(sums: list[int], expected: list[int]) -> bool:
    """Whether a copy is what was stored: what a reader asks before it uses a block."""
    return sums == expected


def take(
    store: Store, of: Chain, found: Found, tally: Tally, *, should_stop: Callable[[], bool] = lambda: False
) -> int:
    """Copy pinned blocks into the engine's pool and use them if they are whole; returns how many were used."""
    lent = store.engine.allocate(2 * len(found.refs))
    mine = lent[::2]  # no two are adjacent: each is a piece of its own, and `should_stop` is asked before it
    try:
        refs = store.engine.refs(mine)
        sums = copy_blocks(store.tier.pool, found.refs, store.engine, refs, should_stop=should_stop)
        if not whole(sums, found.checksums):
            store.tier.report_corrupt(of.hashes[: len(found.refs)])
            return 0
        for digest, block in zip(of.hashes, mine, strict=False):
            tally.compare(digest, store.engine.view()[block * NBYTES : (block + 1) * NBYTES], "host")
        return len(mine)
    except KvError:
        return 0
    finally:
        store.engine.free(lent)


def get(store: Store, of: Chain, tally: Tally, now: float = 0.0) -> int:
    """Look a chain up, copy it, use it if it is whole; returns how many blocks were used."""
    ticket = store.ticket()
    found = store.tier.lookup(ticket, of.hashes, of.parents, now, LEASE_S)
    came = take(store, of, found, tally) if found.refs else 0
    store.tier.release(ticket)
    return came


def settle(store: Store, tally: Tally) -> None:
    """Check both ledgers, with nothing held."""
    tally.balance(store.tier, store.tier.pool, store.engine)
    tally.expect(store.engine.in_use == 0, "an engine holds blocks that it does not use")
    stored_ = store.tier.statistics()["stored"]
    tally.expect(store.tier.pool.in_use == stored_, f"{store.tier.pool.in_use} blocks in use, {stored_} stored")


def flips(ground: Ground, tally: Tally, rounds: int) -> None:
    """A bit of a stored block changes in shared memory: the copy is not whole, the block goes, others stay."""
    rng, kind = ground.rng, "bit flip in shared memory"
    for round_ in range(rounds):
        of, other, at = chain(2 * round_, LENGTH), chain(2 * round_ + 1, LENGTH), rng.randrange(LENGTH)
        with stored(ground, of, other) as store:
            ticket = store.ticket()
            (header,) = store.tier.pin(ticket, [of.hashes[at]], 0.0, LEASE_S)
            store.tier.release(ticket)
            store.tier.pool.view()[header.block * NBYTES + rng.randrange(NBYTES)] ^= 1 << rng.randrange(8)
            came = get(store, of, tally)
            tally.fault(kind, effective=came < LENGTH)
            tally.expect(get(store, of, tally) == at, f"{kind}: what is before it is not used")
            tally.expect(get(store, other, tally) == LENGTH, f"{kind}: another chain is gone")
            settle(store, tally)
            put(store, of)
            tally.expect(get(store, of, tally) == LENGTH, f"{kind}: no good copy takes its place")
            settle(store, tally)


def writers(ground: Ground, tally: Tally, rounds: int) -> None:
    """Two writers of one chain; one of them gives up, commits after its lease or twice, or is gone."""
    for round_ in range(rounds):
        of = chain(round_, LENGTH)
        with stored(ground) as store:
            tier, one, two = store.tier, store.ticket(), store.ticket()
            first = tier.reserve(one, of.hashes, of.parents, 0.0, LEASE_S, writer="a")
            second = tier.reserve(two, of.hashes, of.parents, 0.0, 2 * LEASE_S, writer="b")
            apart = not {r.index for r in first.refs} & {r.index for r in second.refs}
            tally.expect(apart, "two writers of one chain: they share a block")
            for index in (r.index for r in first.refs):
                tier.pool.view()[index * NBYTES : (index + 1) * NBYTES] = b"\xee" * NBYTES  # half done, so to speak
            tally.expect(get(store, of, tally) == 0, "two writers of one chain: staging is seen")
            sums = write(tier, of, second)
            kind, struck = spoil(store, of, one, first, round_ % 4)
            tally.fault(kind, effective=struck)
            inserted = tier.commit(two, True, sums)
            tally.expect(inserted == (0 if round_ % 4 == 3 else LENGTH), f"{kind}: the other one stores {inserted}")
            tally.expect(get(store, of, tally) == LENGTH, f"{kind}: the chain is not there")
            settle(store, tally)


def spoil(store: Store, of: Chain, ticket: str, staging: Staging, how: int) -> tuple[str, bool]:
    """End a write lease of the writer `a` in some other way than it should; returns which, and whether it showed."""
    tier = store.tier
    match how:
        case 0:
            return "a writer that gives up", tier.commit(ticket, False) == 0
        case 1:
            late = tier.expire(LEASE_S + 0.1) == [ticket] and tier.pool.num_quarantined == LENGTH
            return "a commit after its lease", late and tier.commit(ticket, True, write(tier, of, staging)) == 0
        case 2:
            return "a writer that is gone", tier.writer_gone("a") == LENGTH
        case _:
            sums = write(tier, of, staging)
            twice = tier.commit(ticket, True, sums) == LENGTH and tier.commit(ticket, True, sums) == 0
            return "a commit that comes twice", twice


def readers(ground: Ground, tally: Tally, rounds: int) -> None:
    """A reader's lease ends in the middle of its copy, and its blocks are evicted and written by others."""
    kind = "a lease that ends within a copy"
    for round_ in range(rounds):
        of, moment = chain(round_, LENGTH), ground.rng.randrange(LENGTH)
        flood = [chain(1_000_000 + 8 * round_ + extra, LENGTH) for extra in range(6)]
        with stored(ground, of, lru=True) as store:
            tier, ticket = store.tier, store.ticket()
            found = tier.lookup(ticket, of.hashes, of.parents, 0.0, LEASE_S)

            def strike(store: Store = store, flood: list[Chain] = flood) -> bool:
                store.tier.expire(LEASE_S + 1.0)
                for other in flood:
                    put(store, other, 10.0)
                return False

            came = take(store, of, found, tally, should_stop=at_piece(moment, strike))
            stale = not tier.pool.check(found.refs)
            tally.fault(kind, effective=stale and came == 0)
            tally.expect(not tier.release(ticket), f"{kind}: it is still held")
            settle(store, tally)
            for other in (of, *flood):
                get(store, other, tally, 20.0)
            settle(store, tally)


def at_piece(piece: int, what: Callable[[], bool]) -> Callable[[], bool]:
    """Return a `should_stop` that does something before the given piece of a copy, and answers what that returns."""
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return what() if asked == piece + 1 else False

    return should_stop


def generations(ground: Ground, tally: Tally, rounds: int) -> None:
    """References to blocks that were given to others since: they are known to be stale, and nothing of them is used."""
    kind = "stale generation"
    for round_ in range(rounds):
        of = chain(round_, LENGTH)
        with stored(ground, of, lru=True) as store:
            tier, ticket = store.tier, store.ticket()
            found = tier.lookup(ticket, of.hashes, of.parents, 0.0, LEASE_S)
            tally.expect(tier.pool.check(found.refs), f"{kind}: it is stale at once")
            tier.release(ticket)
            for extra in range(6):
                put(store, chain(2_000_000 + 8 * round_ + extra, LENGTH), 1.0)
            stale = not tier.pool.check(found.refs)
            came = take(store, of, found, tally)
            tally.fault(kind, effective=stale and came == 0)
            tally.expect(came == 0 or not stale, f"{kind}: what lies there is used")
            settle(store, tally)


def full_memory(ground: Ground, tally: Tally, rounds: int) -> None:
    """Shared memory is full when a pool is made: it is refused, nothing is left, and the next try succeeds."""
    kind, place = "full shared memory", ground.disk / "small-memory"
    with small_place(place, 256 * 1024) as mounted:
        if not mounted:
            tally.skipped[kind] = "mounting is not allowed here"
            return
        for round_ in range(rounds):
            fill(place / "hog")
            try:
                BlockPool.create(place, "chaos-kv", NUM_BLOCKS, NBYTES, LAYOUT, f"e{round_}", HOST).close()
                refused = False
            except OSError:
                refused = True
            tally.fault(kind, effective=refused)
            left = [path.name for path in place.iterdir() if path.name != "hog"]
            tally.expect(left == [], f"{kind}: {left} is left")
            (place / "hog").unlink()
            pool = BlockPool.create(place, "chaos-kv", NUM_BLOCKS, NBYTES, LAYOUT, f"f{round_}", HOST)
            pool.free(pool.allocate(NUM_BLOCKS))
            tally.balance(pool)
            pool.close()
