"""The host tier: leases, verification, eviction, quarantine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.block import chain_hashes, root_hash
from kvstore.eviction import LruPolicy
from kvstore.handoff import checksum
from kvstore.index import BlockIndex
from kvstore.pool import BlockPool
from kvstore.tiers import HostTier, Staging

NBYTES = 64
ROOT = root_hash("r")


def make_tier(directory: Path, num_blocks: int = 8) -> HostTier:
    """A tier over a small pool."""
    return HostTier(BlockPool.create(directory, "inst-kv", num_blocks, NBYTES, "l", "e1", "h"))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[HostTier]:
    """A tier of 8 blocks whose ledger balances at the end."""
    made = make_tier(tmp_path)
    yield made
    made.check_integrity()
    made.pool.close()


def chain(name: int, length: int) -> tuple[list[bytes], list[bytes]]:
    """Hashes and parents of a chain."""
    hashes = chain_hashes([name] * 16 * length, root=ROOT)
    return hashes, [ROOT, *hashes[:-1]]


def fill(tier: HostTier, staging: Staging, value: int) -> list[int]:
    """Write staging blocks the way a transfer does; returns the checksums."""
    sums = []
    for position, ref in zip(staging.positions, staging.refs, strict=True):
        block = tier.pool.view()[ref.index * NBYTES : (ref.index + 1) * NBYTES]
        block[:] = bytes([value + position]) * NBYTES
        sums.append(checksum(block))
    return sums


def store(tier: HostTier, name: int, length: int, now: float = 0.0) -> list[bytes]:
    """Store a chain; returns its hashes."""
    hashes, parents = chain(name, length)
    staging = tier.reserve(f"w{name}", hashes, parents, now, now + 10)
    tier.commit(f"w{name}", True, fill(tier, staging, name))
    return hashes


def test_what_was_stored_is_found_with_its_checksums(tier: HostTier) -> None:
    """A prefix is found as far as it is stored; it is pinned until released."""
    hashes = store(tier, 1, 3)
    longer, parents = chain(1, 5)

    found = tier.lookup("t", longer, parents, 0.0, 5.0)

    assert len(found.refs) == 3 and found.lease_until == 5.0 and tier.pool.check(found.refs)
    for ref, total in zip(found.refs, found.checksums, strict=True):
        assert checksum(tier.pool.view()[ref.index * NBYTES : (ref.index + 1) * NBYTES]) == total
    assert all(tier.verify(digest) for digest in hashes)
    assert tier.release("t") and not tier.release("t")


def test_nothing_is_found_before_the_commit_or_after_a_failed_one(tier: HostTier) -> None:
    """Staging is private; a writer that gives up, or brings too few checksums, leaves no trace."""
    hashes, parents = chain(1, 3)
    for ok, sums in ((False, [1, 2, 3]), (True, [1, 2])):
        staging = tier.reserve("w", hashes, parents, 0.0, 9.0)
        assert len(staging.refs) == 3
        assert tier.lookup("t", hashes, parents, 0.0, 5.0).refs == []

        assert tier.commit("w", ok, sums) == 0

        assert tier.lookup("t", hashes, parents, 0.0, 5.0).refs == []
        assert tier.pool.in_use == 0


def test_two_writers_of_one_chain_leave_one_entry_each(tier: HostTier) -> None:
    """Writers never share a block; the second commit finds the chain stored and gives its blocks back."""
    hashes, parents = chain(1, 3)
    one = tier.reserve("w1", hashes, parents, 0.0, 9.0)
    two = tier.reserve("w2", hashes, parents, 0.0, 9.0)
    assert not {r.index for r in one.refs} & {r.index for r in two.refs}

    counts = [tier.commit("w2", True, fill(tier, two, 1)), tier.commit("w1", True, fill(tier, one, 1))]

    assert counts == [3, 0] and tier.pool.in_use == 3
    assert tier.reserve("w3", hashes, parents, 0.0, 9.0) == Staging()


def test_only_what_is_missing_is_staged(tier: HostTier) -> None:
    """Stored hashes are skipped; positions refer to the list that was asked for."""
    store(tier, 1, 2)
    hashes, parents = chain(1, 4)

    assert tier.reserve("w", hashes, parents, 0.0, 9.0).positions == [2, 3]
    tier.commit("w", False)


def test_a_full_tier_evicts_the_least_recent_tail_and_never_what_is_pinned(tier: HostTier) -> None:
    """Pinned blocks stay; then the oldest chain loses its tail; what still does not fit is not staged."""
    pinned, old, recent = store(tier, 1, 2), store(tier, 2, 3), store(tier, 3, 3)
    tier.lookup("pin", pinned, [], 0.0, 99.0)
    tier.lookup("t", recent, [], 0.0, 99.0)
    tier.release("t")
    hashes, parents = chain(4, 1)

    tier.commit("w", True, fill(tier, tier.reserve("w", hashes, parents, 0.0, 9.0), 4))

    assert [tier.verify(h) for h in old] == [True, True, False]
    assert all(tier.verify(h) for h in [*pinned, *recent, *hashes])
    hashes, parents = chain(5, 20)
    assert len(tier.reserve("big", hashes, parents, 0.0, 9.0).refs) == 6
    assert all(tier.verify(h) for h in pinned)


def test_a_damaged_block_is_a_miss_from_then_on(tier: HostTier) -> None:
    """A reader that reports a bad checksum gets the block checked and dropped, and its chain ends there."""
    hashes = store(tier, 1, 3)
    found = tier.lookup("t", hashes, [], 0.0, 9.0)
    tier.pool.view()[found.refs[1].index * NBYTES] ^= 1

    assert tier.report_corrupt(hashes) == 1
    tier.check_integrity()
    tier.release("t")

    assert len(tier.lookup("u", hashes, [], 0.0, 9.0).refs) == 1
    assert tier.statistics()["corrupt_total"] == 1


def test_a_header_that_does_not_fit_the_chain_is_a_miss(tier: HostTier) -> None:
    """A block under the right hash but after another parent is never served."""
    hashes, parents = chain(1, 2)
    staging = tier.reserve("w", hashes, [parents[0], b"x" * 32], 0.0, 9.0)
    tier.commit("w", True, fill(tier, staging, 1))

    assert len(tier.lookup("t", hashes, parents, 0.0, 9.0).refs) == 1


def test_a_read_lease_ends_with_its_time(tier: HostTier) -> None:
    """After it, the blocks may be evicted and the release tells the reader that its copy is void."""
    hashes = store(tier, 1, 8)
    tier.lookup("t", hashes, [], 0.0, 5.0)
    other, parents = chain(2, 1)
    assert tier.reserve("w", other, parents, 0.0, 9.0).refs == []

    assert tier.expire(5.0) == []

    assert not tier.release("t")
    assert len(tier.reserve("w", other, parents, 6.0, 9.0).refs) == 1


def test_a_read_lease_grows_with_what_is_stored_meanwhile(tier: HostTier) -> None:
    """The blocks that follow are pinned under the same ticket; one release ends it all."""
    store(tier, 1, 2)
    hashes, parents = chain(1, 6)
    assert len(tier.lookup("t", hashes, parents, 0.0, 5.0).refs) == 2
    staging = tier.reserve("w", hashes, parents, 0.0, 9.0)
    tier.commit("w", True, fill(tier, staging, 1))

    found = tier.extend("t", 2, hashes[2:5], parents[2:5], 4.0, 5.0)

    assert len(found.refs) == 5 and found.lease_until == 9.0 and len(found.checksums) == 5
    assert tier.expire(8.0) == []
    tier.check_integrity()
    assert tier.release("t") and not tier.release("t")
    assert len(tier.extend("new", 0, hashes, parents, 0.0, 5.0).refs) == 6
    tier.release("new")


def test_a_lapsed_lease_does_not_grow(tier: HostTier) -> None:
    """A chain with a hole at its beginning would be worth nothing."""
    hashes = store(tier, 1, 4)
    _, parents = chain(1, 4)
    tier.lookup("t", hashes[:2], parents[:2], 0.0, 5.0)
    tier.expire(5.0)

    assert tier.extend("t", 2, hashes[2:], parents[2:], 5.0, 5.0).refs == []
    assert tier.extend("u", 0, [b"x" * 32], [b"y" * 32], 5.0, 5.0).refs == []
    assert tier.statistics()["reads"] == 0


def test_blocks_can_be_pinned_one_by_one(tier: HostTier) -> None:
    """Those that are stored; they cannot be evicted meanwhile."""
    one, two = store(tier, 1, 3), store(tier, 2, 5)

    headers = tier.pin("t", [two[4], b"x" * 32, one[0], two[4]], 0.0, 5.0)

    assert [h.hash for h in headers] == [two[4], one[0]]
    assert tier.pin("t", one, 0.0, 5.0) == []
    other, parents = chain(3, 8)
    assert len(tier.reserve("w", other, parents, 0.0, 9.0).refs) == 6
    assert two[4] in tier and one[0] in tier and one[1] not in tier
    tier.commit("w", False)
    assert tier.release("t")


def test_a_writer_may_bring_only_the_head_of_its_chain(tier: HostTier) -> None:
    """The rest is dropped; without saying so it brings nothing."""
    hashes, parents = chain(1, 4)
    sums = fill(tier, tier.reserve("w", hashes, parents, 0.0, 9.0), 1)
    assert tier.commit("w", True, sums[:2], head=True) == 2

    assert len(tier.lookup("t", hashes, parents, 0.0, 5.0).refs) == 2 and tier.pool.in_use == 2
    tier.release("t")
    tier.reserve("v", hashes, parents, 0.0, 9.0)
    assert tier.commit("v", True, [], head=True) == 0 and tier.pool.in_use == 2


def test_a_lapsed_writer_keeps_its_blocks_until_it_is_done(tier: HostTier) -> None:
    """They are neither stored nor reused; a late commit inserts nothing and frees them."""
    hashes, parents = chain(1, 8)
    tier.reserve("w", hashes, parents, 0.0, 5.0, writer="engine")

    assert tier.expire(4.9) == [] and tier.expire(5.0) == ["w"]
    tier.check_integrity()

    assert tier.pool.num_quarantined == 8 and tier.unconfirmed == {"w": "engine"}
    assert tier.reserve("w2", hashes, parents, 6.0, 9.0).refs == []
    assert tier.reserve("w", hashes, parents, 6.0, 9.0).refs == []
    assert tier.commit("w", True, [0] * 8) == 0
    assert tier.pool.num_free == 8 and tier.lookup("t", hashes, parents, 6.0, 9.0).refs == []


def test_a_writer_that_is_gone_gives_everything_back(tier: HostTier) -> None:
    """A confirmed exit ends open and lapsed write leases of that writer, not those of others."""
    for ticket, writer, until in (("a", "dead", 5.0), ("b", "dead", 50.0), ("c", "alive", 50.0)):
        hashes, parents = chain(ord(ticket), 2)
        tier.reserve(ticket, hashes, parents, 0.0, until, writer=writer)
    tier.expire(5.0)

    assert tier.writer_gone("dead") == 4

    assert tier.pool.in_use == 2 and tier.pool.num_quarantined == 0
    assert tier.commit("b", True, [0, 0]) == 0


def test_an_index_that_follows_the_tier_knows_what_it_stores(tier: HostTier) -> None:
    """Inserts and evictions come as numbered events; a dump gives the same picture."""
    index = BlockIndex()
    index.load(tier.dump())
    first = store(tier, 1, 5)
    second = store(tier, 2, 6)

    assert all(index.apply(event) for event in tier.events.collect())

    late = BlockIndex()
    late.load(tier.dump())
    for known in (index, late):
        assert known.longest_prefix(second) == {"e1": 6} and known.longest_prefix(first) == {"e1": 2}


def test_lru_takes_the_least_recent_that_can_go() -> None:
    """Touching saves, removing forgets, and nothing is returned if nothing can go."""
    policy = LruPolicy()
    for key in (b"a", b"b", b"c"):
        policy.insert(key)
    policy.touch(b"a")
    policy.touch(b"unknown")

    assert policy.victim(lambda key: True) == b"b"
    assert policy.victim(lambda key: key != b"b") == b"c"
    policy.remove(b"b")
    assert policy.victim(lambda key: key == b"b") is None


class Leases(RuleBasedStateMachine):
    """Random writers, readers, faults and time against one tier: what is served is always what was stored."""

    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.tier = make_tier(self.directory, 6)
        self.now = 0.0
        self.ticket = 0
        self.writes: dict[str, tuple[int, Staging]] = {}
        self.reads: dict[str, tuple[int, object]] = {}

    @rule(name=st.integers(1, 3), length=st.integers(1, 5), lease=st.integers(1, 4))
    def write(self, name: int, length: int, lease: int) -> None:
        """A writer stages a chain."""
        hashes, parents = chain(name, length)
        self.ticket += 1
        staging = self.tier.reserve(str(self.ticket), hashes, parents, self.now, self.now + lease)
        if staging.refs:
            self.writes[str(self.ticket)] = (name, staging)

    @rule(data=st.data(), ok=st.booleans())
    def commit(self, data: st.DataObject, ok: bool) -> None:
        """A writer ends, in time or late; its blocks are still its own to write."""
        if self.writes:
            ticket = data.draw(st.sampled_from(sorted(self.writes)))
            name, staging = self.writes.pop(ticket)
            self.tier.commit(ticket, ok, fill(self.tier, staging, name * 16))

    @rule(name=st.integers(1, 3), lease=st.integers(1, 4))
    def read(self, name: int, lease: int) -> None:
        """A reader sees the chain's own bytes, from its first block on."""
        hashes, parents = chain(name, 5)
        self.ticket += 1
        found = self.tier.lookup(str(self.ticket), hashes, parents, self.now, lease)
        for position, ref in enumerate(found.refs):
            data = bytes(self.tier.pool.view()[ref.index * NBYTES : (ref.index + 1) * NBYTES])
            assert data == bytes([name * 16 + position]) * NBYTES
        if found.refs:
            self.reads[str(self.ticket)] = (name, found)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A reader whose lease held to the end read right bytes."""
        if self.reads:
            ticket = data.draw(st.sampled_from(sorted(self.reads)))
            name, found = self.reads.pop(ticket)
            contents = [
                bytes(self.tier.pool.view()[r.index * NBYTES : (r.index + 1) * NBYTES])
                for r in found.refs  # type: ignore[attr-defined]
            ]
            if self.tier.release(ticket):
                assert contents == [bytes([name * 16 + p]) * NBYTES for p in range(len(contents))]

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds: int) -> None:
        """Leases end."""
        self.now += seconds
        self.tier.expire(self.now)

    @invariant()
    def balances(self) -> None:
        """The ledger balances."""
        self.tier.check_integrity()

    def teardown(self) -> None:
        """All leases over and all writers done, only stored blocks are in use."""
        for ticket in list(self.writes):
            self.tier.commit(ticket, False)
        self.tier.expire(1e9)
        self.tier.check_integrity()
        assert self.tier.pool.num_quarantined == 0
        assert self.tier.pool.in_use == self.tier.statistics()["stored"]
        self.tier.pool.close()


@pytest.mark.slow
def test_leases_never_serve_wrong_bytes_and_never_leak(tmp_path: Path) -> None:
    """In any order of events, readers get what was stored under that chain, and every block is accounted for."""
    Leases.directory = tmp_path
    run_state_machine_as_test(
        Leases,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_of_a_write_that_came_in_part_the_part_is_stored(tier: HostTier) -> None:
    """What follows a hole is found once the hole is filled, and only what is missing is asked for."""
    hashes, parents = chain(1, 5)
    sums = fill(tier, staging := tier.reserve("w", hashes, parents, 0.0, 10.0), 1)

    assert tier.commit_some("w", sums, [True, True, False, True, False]) == 3

    assert len(tier.lookup("r", hashes, parents, 0.0, 1.0).refs) == 2
    again = tier.reserve("w2", hashes, parents, 0.0, 10.0)
    assert again.positions == [2, 4] and len(staging.refs) == 5
    assert tier.commit("w2", True, fill(tier, again, 1)) == 2
    assert len(tier.lookup("r2", hashes, parents, 0.0, 1.0).refs) == 5


def test_a_part_of_a_write_that_fits_no_lease_stores_nothing(tier: HostTier) -> None:
    """Of another length, of nothing, or of a lease that is over, whose quarantine it ends."""
    hashes, parents = chain(1, 3)
    for ticket, came in (("long", [True] * 4), ("none", [False] * 3)):
        sums = fill(tier, tier.reserve(ticket, hashes, parents, 0.0, 10.0), 1)
        assert tier.commit_some(ticket, sums, came) == 0
    sums = fill(tier, tier.reserve("late", hashes, parents, 0.0, 1.0), 1)
    tier.expire(2.0)
    assert tier.pool.num_quarantined == 3
    assert tier.commit_some("late", sums, [True, True, False]) == 0

    assert tier.pool.num_free == tier.pool.num_blocks and tier.lookup("r", hashes, parents, 3.0, 1.0).refs == []
