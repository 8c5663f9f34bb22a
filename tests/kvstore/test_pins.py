"""Pinned blocks stay, for their time and within bounds, and nothing else is kept from going."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from disk_cases import blocks, chain, make, served

from kvstore.disk.files import PAGE
from kvstore.errors import PinRefused
from kvstore.owners import Quotas
from kvstore.pins import MAX_PINS, Pins
from kvstore.pool import BlockPool
from kvstore.tiers import HostTier
from schemas.tenants import owner_of

A, B = owner_of("a"), owner_of("b")
BLOCK = 64


def names(what: int, count: int) -> list[bytes]:
    """Hashes of a chain."""
    return [what.to_bytes(8, "little") + i.to_bytes(24, "little") for i in range(count)]


# --- the table ------------------------------------------------------------------------------------


def test_a_block_is_held_until_the_last_of_its_pins_ends() -> None:
    """By time or by hand; what becomes free is said once."""
    pins, one = Pins(100), names(1, 4)

    assert pins.pin("p", A, one, 5.0) == one
    assert pins.pin("q", B, [*one[:2], *names(2, 1)], 9.0) == names(2, 1)

    assert pins.expire(4.9) == [] and pins.expire(5.0) == one[2:]
    assert one[0] in pins and one[2] not in pins
    assert pins.unpin("q") == [*one[:2], *names(2, 1)] and pins.unpin("q") is None
    assert len(pins) == 0 and pins.all() == []


def test_pinning_again_replaces_and_does_not_count_twice() -> None:
    """The end moves, either way; blocks that are not of the new pin are let go."""
    pins = Pins(4)
    pins.pin("p", A, names(1, 4), 5.0)

    assert pins.pin("p", A, names(1, 2), 50.0) == []

    assert names(1, 4)[3] not in pins and pins.expire(49.0) == [] and pins.expire(50.0) == names(1, 2)


def test_the_shares_of_tier_and_tenant_bound_what_is_held() -> None:
    """Blocks that are pinned twice count once; a refused pin changes nothing."""
    pins = Pins(6)
    pins.pin("p", A, names(1, 4), 5.0, 4)

    assert pins.pin("same", A, names(1, 3), 5.0, 4) == []
    with pytest.raises(PinRefused) as tenant:
        pins.pin("p2", A, names(2, 1), 5.0, 4)
    with pytest.raises(PinRefused) as tier:
        pins.pin("p", B, names(3, 7), 5.0)
    pins.pin("b", B, names(3, 2), 5.0, 4)

    assert (tenant.value.code, tenant.value.limit) == ("tenant_share", 4)
    assert (tier.value.code, tier.value.limit) == ("tier_share", 6)
    assert all(digest in pins for digest in names(1, 4)) and names(2, 1)[0] not in pins


def test_the_number_of_pins_is_bounded() -> None:
    """Whatever they hold."""
    pins = Pins(10)
    for i in range(MAX_PINS):
        pins.pin(f"p{i}", A, names(1, 1), 5.0)

    with pytest.raises(PinRefused) as caught:
        pins.pin("more", A, names(1, 1), 5.0)
    pins.pin("p3", A, names(1, 1), 6.0)

    assert caught.value.code == "too_many_pins"


# --- host memory ----------------------------------------------------------------------------------


def host(directory: Path, *, num_blocks: int = 8, quota: int = 0) -> HostTier:
    """A tier of a few blocks."""
    pool = BlockPool.create(directory, "inst-kv", num_blocks, BLOCK, "l", "e1", "h")
    return HostTier(pool, quotas=Quotas(quota * BLOCK))


def store(tier: HostTier, what: int, count: int, now: float = 0.0, owner: bytes = A) -> int:
    """Write a chain."""
    hashes = names(what, count)
    staging = tier.reserve(f"w{what}.{now}", hashes, [b"r" * 32, *hashes][:count], now, now + 9, owners=[owner] * count)
    return tier.commit(f"w{what}.{now}", True, [1] * len(staging.refs))


@pytest.mark.parametrize("before", [True, False])
def test_held_blocks_outlive_a_flood_whether_stored_before_or_after(before: bool, tmp_path: Path) -> None:
    """When they are let go they are like new ones, and a flood takes them too."""
    tier = host(tmp_path)
    if before:
        store(tier, 1, 4)
    tier.hold(names(1, 4))
    if not before:
        store(tier, 1, 4)

    for what in range(2, 30):
        assert store(tier, what, 3) == 3
        tier.check_integrity()
    assert all(digest in tier for digest in names(1, 4))

    tier.let_go(names(1, 4))
    for what in range(30, 60):
        store(tier, what, 3)
        tier.check_integrity()
    assert not any(digest in tier for digest in names(1, 4))


def test_held_blocks_do_not_go_for_their_own_tenant_s_quota(tmp_path: Path) -> None:
    """Its other blocks do."""
    tier = host(tmp_path, quota=4)
    store(tier, 1, 2)
    tier.hold(names(1, 2))

    assert store(tier, 2, 2) == 2 and store(tier, 3, 3) == 2

    assert [d in tier for d in names(1, 2)] == [True, True] and names(2, 1)[0] not in tier
    tier.check_integrity()


def test_a_damaged_block_goes_though_it_is_held(tmp_path: Path) -> None:
    """And its good copy, when it comes, is held again."""
    tier = host(tmp_path)
    store(tier, 1, 2)
    tier.hold(names(1, 2))

    assert tier.report_corrupt(names(1, 2)) == 2 and names(1, 1)[0] not in tier
    store(tier, 1, 2, 1.0)
    for what in range(2, 20):
        store(tier, what, 3)

    assert names(1, 2)[1] in tier
    tier.check_integrity()


# --- disk -----------------------------------------------------------------------------------------


def hashes(name: int, length: int) -> list[bytes]:
    """Hashes of a chain that can be on disk."""
    return chain(name, length)[0]


def test_on_disk_held_segments_go_last(tmp_path: Path) -> None:
    """Written before or after; they do not stop the disk when there is nothing else."""
    tier = make(tmp_path, max_nbytes=4 * PAGE)
    tier.write(blocks(1, 5), 0.0)
    tier.hold([*hashes(1, 2), *hashes(2, 1)])
    tier.write(blocks(2, 5), 0.0)
    for name in range(3, 12):
        assert tier.write(blocks(name, 5), 0.0) == 5
        tier.check_integrity()
    assert (served(tier, 1, 5), served(tier, 2, 5)) == (5, 5)

    tier.hold(hashes(11, 1))
    assert tier.write(blocks(12, 5), 0.0) == 5
    tier.let_go([*hashes(1, 2), *hashes(2, 1), *hashes(11, 1)])
    tier.check_integrity()

    for name in range(13, 18):
        tier.write(blocks(name, 5), 0.0)
    assert (served(tier, 1, 5), served(tier, 2, 5), served(tier, 11, 5)) == (0, 0, 0)
    tier.check_integrity()


def test_what_is_held_is_held_after_the_directory_was_looked_through_anew(tmp_path: Path) -> None:
    """A new catalog knows the old wishes."""
    tier = make(tmp_path, max_nbytes=4 * PAGE)
    tier.write(blocks(1, 5), 0.0)
    tier.hold(hashes(1, 5))
    tier.close()

    assert tier.open(0.0)
    for name in range(3, 9):
        tier.write(blocks(name, 5), 0.0)

    assert served(tier, 1, 5) == 5
    tier.check_integrity()


def test_random_wishes_keep_the_disk_s_ledger(tmp_path: Path) -> None:
    """Scenario: hold, let go, write, damage, in any order, two tenants with quotas."""
    tier = make(tmp_path, max_nbytes=10 * PAGE, quotas=Quotas(6 * PAGE))
    dice = random.Random(3)
    for step in range(600):
        name = dice.randrange(20)
        match dice.randrange(5):
            case 0 | 1:
                owner = A if name % 2 else B
                tier.write([replace(b, owner=owner) for b in blocks(name, dice.randrange(1, 8))], float(step))
            case 2:
                tier.hold(hashes(name, 6))
            case 3:
                tier.let_go(hashes(name, 6))
            case 4:
                tier.forget(hashes(name, 2))
        tier.check_integrity()
