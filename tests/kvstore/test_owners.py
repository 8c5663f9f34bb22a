"""Quotas per owner: what an owner has, what of its own goes for more, and that nobody else pays for it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from disk_cases import PLENTY, blocks, make, served

from kvstore.disk.files import PAGE
from kvstore.disk.tier import DiskTier
from kvstore.owners import Owners, Quotas, Share
from kvstore.pool import BlockPool
from kvstore.tiers import HostTier
from schemas.tenants import SHARED, owner_of

A, B, C = (owner_of(name) for name in "abc")
BLOCK = 64  # bytes of a block in host memory here


def host(directory: Path, *, num_blocks: int = 16, default: int = 0, own: dict[bytes, int] | None = None) -> HostTier:
    """A tier whose limits are given in blocks."""
    quotas = Quotas(default * BLOCK, {owner: blocks * BLOCK for owner, blocks in (own or {}).items()})
    return HostTier(BlockPool.create(directory, "inst-kv", num_blocks, BLOCK, "l", "e1", "h"), quotas=quotas)


def names(owner: bytes, first: int, count: int) -> list[bytes]:
    """Hashes of an owner's chain."""
    return [owner + i.to_bytes(24, "little") for i in range(first, first + count)]


def store(tier: HostTier, owner: bytes, first: int, count: int, now: float = 0.0) -> int:
    """Write blocks of a chain; returns how many were stored."""
    hashes = names(owner, first, count)
    parents = [b"root" * 8, *hashes][:count]
    ticket = f"{owner.hex()}.{first}"
    staging = tier.reserve(ticket, hashes, parents, now, now + 9, owners=[owner] * count)
    return tier.commit(ticket, True, [7] * len(staging.refs))


def held(tier: HostTier) -> dict[bytes, int]:
    """Blocks by owner."""
    return {row.owner: row.nbytes // BLOCK for row in tier.owners.shares()}


def test_at_its_quota_an_owner_loses_its_own_oldest(tmp_path: Path) -> None:
    """Another owner's older blocks stay."""
    tier = host(tmp_path, default=6)
    store(tier, B, 0, 5)
    store(tier, A, 0, 3)
    store(tier, A, 10, 3)

    assert store(tier, A, 20, 2) == 2

    assert held(tier) == {A: 6, B: 5}
    assert [digest in tier for digest in names(A, 0, 3)] == [True, False, False]  # the tail of the oldest chain
    assert all(digest in tier for digest in (*names(A, 10, 3), *names(A, 20, 2), *names(B, 0, 5)))
    assert tier.statistics()["evicted_quota_total"] == 2
    tier.check_integrity()


def test_a_wish_beyond_the_quota_gets_its_head(tmp_path: Path) -> None:
    """A chain that is longer than the quota is stored as far as it goes, in a full tier too."""
    tier = host(tmp_path, num_blocks=8, own={A: 3})
    assert store(tier, B, 0, 8) == 8  # no limit

    assert store(tier, A, 0, 5) == 3

    assert held(tier) == {A: 3, B: 5}  # A is within its quota; it took what the tier's order gave up
    assert store(tier, A, 10, 5) == 3 and held(tier) == {A: 3, B: 5}
    assert [digest in tier for digest in names(A, 10, 5)] == [True] * 3 + [False] * 2
    tier.check_integrity()


def test_blocks_that_are_read_or_belong_to_the_wish_do_not_go_for_it(tmp_path: Path) -> None:
    """What is left of the quota is what may be had."""
    tier = host(tmp_path, default=4)
    store(tier, A, 0, 4)
    found = tier.lookup("r", names(A, 0, 3), [], 0.0, 5.0)
    assert len(found.refs) == 3

    assert store(tier, A, 10, 3) == 1
    tier.release("r")
    assert store(tier, A, 10, 3) == 2 and held(tier) == {A: 4}
    hashes = names(A, 10, 6)
    staging = tier.reserve("w", hashes, [b"root" * 8, *hashes[:5]], 0.0, 9.0, owners=[A] * 6)

    assert staging.positions == [3]  # the three before it are stored and are kept for it
    tier.commit("w", False)
    tier.check_integrity()


def test_staged_and_lapsed_blocks_count(tmp_path: Path) -> None:
    """Until a writer is known to be done its blocks are its owner's."""
    tier = host(tmp_path, default=4)
    hashes = names(A, 0, 3)
    tier.reserve("w", hashes, [b"root" * 8, *hashes[:2]], 0.0, 5.0, writer="x", owners=[A] * 3)
    assert held(tier) == {A: 3}

    assert store(tier, A, 10, 4) == 1
    tier.expire(6.0)
    assert held(tier) == {A: 4} and tier.pool.num_quarantined == 3
    tier.check_integrity()

    tier.absolve("w")
    assert held(tier) == {A: 1}
    tier.check_integrity()


def test_one_batch_may_be_of_several_owners(tmp_path: Path) -> None:
    """Each has its own limit; what names no owner is everybody's."""
    tier = host(tmp_path, own={A: 1, SHARED: 2})
    hashes = [*names(A, 0, 3), *names(B, 0, 3), *names(C, 0, 3)]
    parents = [b"root" * 8, *hashes[:8]]

    staging = tier.reserve("w", hashes, parents, 0.0, 9.0, owners=[A] * 3 + [B] * 3)

    assert staging.positions == [0, 3, 4, 5, 6, 7]
    assert tier.commit("w", True, [1] * 6) == 6
    assert held(tier) == {A: 1, B: 3, SHARED: 2}
    tier.check_integrity()


def test_many_owners_at_their_quotas_stay_there(tmp_path: Path) -> None:
    """Scenario: random writes, reads, lapses and damage by five owners, two of them with limits of their own."""
    limits = {A: 3, B: 7}
    tier = host(tmp_path, num_blocks=24, default=5, own=limits)
    owners = [A, B, C, owner_of("d"), SHARED]
    dice = random.Random(5)
    for step in range(3000):
        owner, now = dice.choice(owners), float(step)
        first = dice.randrange(6) * 10
        match dice.randrange(6):
            case 0 | 1:
                store(tier, owner, first, dice.randrange(1, 9), now)
            case 2:
                tier.lookup(f"r{step}", names(owner, first, 8), [], now, dice.randrange(1, 30))
            case 3:
                hashes = names(owner, first, 4)
                tier.reserve(f"late{step}", hashes, [b"root" * 8, *hashes[:3]], now, now + 2, owners=[owner] * 4)
            case 4:
                for ticket in tier.expire(now):
                    tier.absolve(ticket)
            case 5:
                hashes = names(owner, first, 2)
                tier.lookup(f"bad{step}", hashes, [b"other" * 8] * 2, now, 1.0)
        tier.check_integrity()
        assert all(count <= limits.get(one, 5) for one, count in held(tier).items()), step
    assert tier.statistics()["over_quota_total"] > 100 and tier.statistics()["evicted_quota_total"] > 100


def test_the_ledger_forgets_who_has_nothing_and_shows_few() -> None:
    """Bounded by what is stored, and the page of metrics by a number of rows."""
    owners = Owners(Quotas(100))
    digests = [owner_of(str(i)) for i in range(40)]
    for i, digest in enumerate(digests):
        owners.charge(digest, i + 1)

    rows, others = owners.top()

    assert [row.nbytes for row in rows] == list(range(40, 8, -1)) and rows[0] == Share(digests[39], 40, 1, 100)
    assert (others.nbytes, others.count) == (sum(range(1, 9)), 8)
    for i, digest in enumerate(digests):
        owners.discharge(digest, i + 1)
    assert owners.shares() == [] and owners.total_nbytes == 0


# --- disk -----------------------------------------------------------------------------------------


def used(tier: DiskTier) -> dict[bytes, int]:
    """Bytes by owner."""
    return {row.owner: row.nbytes for row in tier.shares()}


def on_disk(directory: Path) -> int:
    """Bytes of all segments as the file system counts them."""
    return sum(path.stat().st_blocks * 512 for path in directory.glob("*/segment-*"))


def write(tier: DiskTier, owner: bytes, name: int, length: int = 5, now: float = 0.0) -> int:
    """Write a chain for an owner; five records take a page of the disk."""
    return tier.write([replace(block, owner=owner) for block in blocks(name, length)], now)


def test_on_disk_an_owner_s_own_oldest_segments_go(tmp_path: Path) -> None:
    """The accounts are those of the file system, before and after."""
    tier = make(tmp_path, quotas=Quotas(4 * PAGE))  # one is kept free for what rounding may take
    write(tier, B, 100)
    for name in range(3):
        assert write(tier, A, name) == 5
    assert used(tier) == {A: 3 * PAGE, B: PAGE}
    assert served(tier, 0, 5) == 5  # now the first is the latest used

    assert write(tier, A, 3) == 5

    assert [served(tier, name, 5) for name in (0, 1, 2, 3, 100)] == [5, 0, 5, 5, 5]
    assert sum(used(tier).values()) == on_disk(tmp_path) == tier.statistics()["nbytes"]
    tier.check_integrity()


def test_owners_of_one_batch_get_segments_of_their_own(tmp_path: Path) -> None:
    """And one that is over its quota does not keep the other from the disk."""
    tier = make(tmp_path, quotas=Quotas(0, {A: PAGE // 2}))
    mixed = []
    for one, two in zip(blocks(1, 4), blocks(2, 4), strict=True):
        mixed += [replace(one, owner=A), replace(two, owner=B)]

    assert tier.write(mixed, 0.0) == 4

    assert used(tier) == {B: PAGE} and (served(tier, 1, 4), served(tier, 2, 4)) == (0, 4)
    assert tier.statistics()["refused_total"] == 4
    tier.check_integrity()


def test_a_chain_beyond_the_quota_is_stored_as_far_as_it_goes(tmp_path: Path) -> None:
    """Its beginning is worth most."""
    tier = make(tmp_path, quotas=Quotas(3 * PAGE))

    assert write(tier, A, 1, 40) == 2 * PAGE // (256 + 512)

    assert used(tier)[A] <= 3 * PAGE
    tier.check_integrity()


def test_owners_are_known_again_after_a_restart(tmp_path: Path) -> None:
    """Also with a smaller quota than before: then the owner's own segments go at its next write, nobody else's."""
    first = make(tmp_path)
    for name in range(4):
        write(first, A, name)
    write(first, B, 100)
    write(first, SHARED, 200)
    before = used(first)
    first.close()

    again = make(tmp_path, "e2", quotas=Quotas(0, {A: 2 * PAGE}))
    assert used(again) == before == {A: 4 * PAGE, B: PAGE, SHARED: PAGE}
    assert again.owners_of([blocks(1, 1)[0].hash, blocks(100, 1)[0].hash, bytes(32)]) == [A, B, SHARED]

    assert write(again, A, 9) == 5
    assert used(again) == {A: PAGE, B: PAGE, SHARED: PAGE}
    assert sum(used(again).values()) == on_disk(tmp_path)
    again.check_integrity()


def test_a_segment_that_is_read_does_not_go_and_nobody_pays_for_it(tmp_path: Path) -> None:
    """Then the write is refused."""
    tier = make(tmp_path, quotas=Quotas(2 * PAGE))
    write(tier, A, 1)
    write(tier, B, 2)
    catalog = tier._catalog
    lease = catalog.pin([catalog.records[blocks(1, 1)[0].hash]], 9.0)

    assert write(tier, A, 3) == 0 and used(tier) == {A: PAGE, B: PAGE}

    catalog.unpin(lease)
    assert write(tier, A, 3) == 5 and used(tier) == {A: PAGE, B: PAGE}
    tier.check_integrity()


@pytest.mark.slow
def test_random_writers_stay_within_their_quotas_on_disk(tmp_path: Path) -> None:
    """Scenario: five owners, a cap below the sum of their quotas, restarts now and then."""
    limits = {A: 3 * PAGE, B: 5 * PAGE}
    quotas, dice = Quotas(4 * PAGE, limits), random.Random(9)
    tier = make(tmp_path, "e0", max_nbytes=16 * PAGE, quotas=quotas)
    for step in range(400):
        owner = dice.choice([A, B, C, owner_of("d"), SHARED])
        name = dice.randrange(40) * 5 + [A, B, C, owner_of("d"), SHARED].index(owner)
        write(tier, owner, name, dice.randrange(1, 12), float(step))
        served(tier, dice.randrange(200), 6, float(step))
        if dice.random() < 0.02:
            tier.close()
            tier = make(tmp_path, f"e{step}", max_nbytes=16 * PAGE, quotas=quotas)
        tier.check_integrity()
        assert all(nbytes <= limits.get(one, 4 * PAGE) for one, nbytes in used(tier).items())
        assert sum(used(tier).values()) == on_disk(tmp_path) <= 16 * PAGE < PLENTY
