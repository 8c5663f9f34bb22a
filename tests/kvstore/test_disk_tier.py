"""The disk tier: what is stored comes back or is a miss, room is bounded, a directory has one owner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_cases import LAYOUT, NBYTES, PLENTY, STRIDE, FaultyFiles, blocks, chain, leftovers, make, segments, served

from kvstore.disk.behind import WriteBehind
from kvstore.disk.files import PAGE
from kvstore.disk.policy import LONGEST_PAUSE_S, Health, SecondTouch, affordable
from kvstore.disk.tier import READ_LEASE_S, Block, DiskTier
from kvstore.errors import DiskBusy
from kvstore.index import BlockIndex


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """As far as it is stored, whichever segments it lies in."""
    tier = make(tmp_path)

    assert tier.write(blocks(1, 3), 0.0) == 3
    assert tier.write(blocks(1, 5, first=3), 0.0) == 2
    assert tier.write(blocks(2, 2), 0.0) == 2

    hashes, parents = chain(1, 7)
    assert tier.peek(hashes, parents) == 5 and hashes[4] in tier and hashes[5] not in tier
    assert served(tier, 1, 7) == 5 and served(tier, 2, 2) == 2 and served(tier, 3, 2) == 0
    assert len(segments(tier)) == 3 and leftovers(tier) == []
    statistics = tier.statistics()
    assert (statistics["hits_total"], statistics["misses_total"], statistics["corrupt_total"]) == (7, 4, 0)
    tier.check_integrity()


def test_a_restart_finds_what_was_stored(tmp_path: Path) -> None:
    """By another incarnation, with numbers that go on: no name is used twice, not even by the same epoch."""
    first = make(tmp_path)
    first.write(blocks(1, 4), 0.0)
    first.close()

    second = make(tmp_path)
    assert second.statistics()["recovered_total"] == 4
    assert served(second, 1, 4) == 4
    second.write(blocks(2, 2), 0.0)
    assert len(segments(second)) == 2
    second.check_integrity()
    second.close()

    third = make(tmp_path, "e3")
    assert served(third, 1, 4) == 4 and served(third, 2, 2) == 2
    third.check_integrity()


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    """Not what is stored, nor what stands twice in a batch."""
    tier = make(tmp_path)
    tier.write(blocks(1, 3), 0.0)

    assert tier.write(blocks(1, 3), 0.0) == 0
    assert tier.write([*blocks(1, 4), *blocks(1, 4)], 0.0) == 1
    assert [p.stat().st_size for p in segments(tier)] == [3 * STRIDE, STRIDE]


def test_two_writers_of_the_same_blocks_leave_one_copy(tmp_path: Path) -> None:
    """In threads, while others read."""
    tier = make(tmp_path)
    counts: list[int] = []
    start = threading.Barrier(6)

    def write() -> None:
        start.wait()
        for name in range(20):
            counts.append(tier.write(blocks(name, 3), 0.0))

    def read() -> None:
        start.wait()
        for name in range(40):
            assert served(tier, name % 20, 3) in (0, 3)

    failures: list[BaseException] = []

    def guarded(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (write, write, write, read, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert failures == [] and sum(counts) == 60
    assert all(served(tier, name, 3) == 3 for name in range(20))
    assert tier.statistics()["reads"] == 0
    tier.check_integrity()


@pytest.mark.slow
def test_readers_writers_and_onlookers_do_not_disturb_one_another(tmp_path: Path) -> None:
    """In threads, over a tier that evicts all the time and is broken and mended meanwhile."""
    files = FaultyFiles()
    tier = make(tmp_path, max_nbytes=14 * PAGE, files=files)
    index = BlockIndex()
    index.load(tier.dump())
    failures: list[BaseException] = []
    over = threading.Event()
    now = [0.0]

    def repeat(work: Callable[[int], object]) -> None:
        turn = 0
        try:
            while not over.is_set():
                work(turn)
                turn += 1
        except BaseException as exc:
            failures.append(exc)
            over.set()

    def write(turn: int) -> None:
        tier.write(blocks(turn % 9, 6), now[0])
        if turn % 40 == 39:
            files.fail("write", 28)
        now[0] += 1.0
        tier.probe(now[0])
        tier.check_integrity()
        if turn == 400:
            over.set()

    def look(turn: int) -> None:
        for event in tier.events.collect():
            index.apply(event)
        tier.statistics()
        tier.peek(*chain(turn % 9, 6))
        tier.expire(now[0] - READ_LEASE_S * 2)
        if turn % 50 == 49:
            tier.forget(chain(turn % 9, 6)[0][3:4])
            tier.dump()

    def read(turn: int) -> None:
        served(tier, turn % 9, 6, now[0])

    threads = [threading.Thread(target=repeat, args=(work,)) for work in (write, look, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failures == [] and not any(thread.is_alive() for thread in threads)
    statistics = tier.statistics()
    assert statistics["hits_total"] > 0 and statistics["evicted_total"] > 0 and statistics["failed_writes_total"] > 0
    assert statistics["corrupt_total"] == 0 and statistics["reads"] == 0
    for event in tier.events.collect():
        index.apply(event)
    for name in range(9):
        known = index.longest_prefix(chain(name, 6)[0])
        assert known.get("e1", 0) == tier.peek(*chain(name, 6))
    tier.check_integrity()


def test_a_block_that_is_damaged_before_it_is_written_is_left_out(tmp_path: Path) -> None:
    """The checksum was made with the block; what memory has done to it since is seen here."""
    tier = make(tmp_path)
    good, bad, short = blocks(1, 3)
    spoiled = bytearray(bad.data)
    spoiled[7] ^= 1
    bad = Block(bad.hash, bad.parent, 16, bad.checksum, memoryview(spoiled))
    short = Block(short.hash, short.parent, 16, short.checksum, short.data[: NBYTES - 1])

    assert tier.write([good, bad, short], 0.0) == 1

    assert served(tier, 1, 3) == 1 and tier.statistics()["rejected_total"] == 2


def test_a_block_after_another_parent_is_a_miss(tmp_path: Path) -> None:
    """The hash alone is not enough."""
    tier = make(tmp_path)
    tier.write(blocks(1, 2), 0.0)
    hashes, parents = chain(1, 2)
    into = [memoryview(bytearray(NBYTES)) for _ in hashes]

    assert tier.read(hashes, [b"x" * 32, parents[1]], into, 0.0) == []
    assert len(tier.read(hashes, parents, into, 0.0)) == 2


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    """The second one is told so and changes nothing; once the first leaves, a probe takes over."""
    first = make(tmp_path)
    first.write(blocks(1, 2), 0.0)

    with pytest.raises(DiskBusy, match="epoch e1"):
        make(tmp_path, "e2")

    second = DiskTier(tmp_path, layout=LAYOUT, block_nbytes=NBYTES, epoch="e2", max_nbytes=PLENTY)
    with pytest.raises(DiskBusy):
        second.open(0.0)
    assert second.write(blocks(2, 2), 0.0) == 0 and served(second, 1, 2) == 0 and not second.health.ok
    assert not second.probe(1.0)
    assert served(first, 1, 2) == 2

    first.close()
    assert second.probe(100.0) and served(second, 1, 2) == 2
    second.check_integrity()


def test_an_index_that_follows_the_tier_knows_what_it_stores(tmp_path: Path) -> None:
    """Inserts, evictions, drops, and what a restart or a probe finds come as numbered events; a dump shows the same."""
    index = BlockIndex()
    tier = DiskTier(tmp_path, layout=LAYOUT, block_nbytes=NBYTES, epoch="e1", max_nbytes=5 * PAGE)
    index.load(tier.dump())

    def follows() -> bool:
        whole = all(index.apply(event) for event in tier.events.collect())
        late = BlockIndex()
        late.load(tier.dump())
        return whole and all(
            known.longest_prefix(chain(name, 8)[0]) == ({"e1": n} if (n := tier.peek(*chain(name, 8))) else {})
            for name in range(1, 6)
            for known in (index, late)
        )

    tier.open(0.0)
    for name in range(1, 6):
        tier.write(blocks(name, 6), 0.0)
        assert follows()
    assert tier.statistics()["evicted_total"] > 0
    tier.forget(chain(5, 8)[0][3:4])
    assert follows() and tier.peek(*chain(5, 8)) == 3
    tier.health.fail(5, "a test", 0.0)
    assert tier.probe(10.0) and follows() and tier.peek(*chain(5, 8)) == 6
    tier.close()
    assert follows() and tier.peek(*chain(5, 8)) == 0


# --- room --------------------------------------------------------------------------------------------


def test_a_full_tier_drops_whole_segments_the_least_used_first(tmp_path: Path) -> None:
    """Under the cap at every moment, in pages; what is read stays."""
    tier = make(tmp_path, max_nbytes=10 * PAGE)
    for name in range(1, 5):
        assert tier.write(blocks(name, 8), 0.0) == 8  # two pages each
    assert served(tier, 1, 8) == 8

    for name in (5, 6):
        assert tier.write(blocks(name, 8), 0.0) == 8
        assert sum(p.stat().st_blocks * 512 for p in tier.folder.iterdir()) <= 10 * PAGE
        tier.check_integrity()

    assert [served(tier, name, 8) for name in range(1, 7)] == [8, 0, 0, 8, 8, 8]
    assert tier.statistics()["evicted_total"] == 16


def test_a_batch_larger_than_the_tier_keeps_its_beginning(tmp_path: Path) -> None:
    """A chain is useful from its head on; a cap below one record stores nothing."""
    tier = make(tmp_path / "a", max_nbytes=3 * PAGE)
    assert tier.write(blocks(1, 50), 0.0) == 2 * PAGE // STRIDE
    tier.check_integrity()

    none = make(tmp_path / "b", max_nbytes=STRIDE - 1)
    assert none.write(blocks(1, 2), 0.0) == 0
    assert none.health.ok


def test_a_segment_that_is_read_is_not_removed(tmp_path: Path) -> None:
    """A write is refused while all there is to remove is being read; a lapsed reader gets nothing."""
    files = FaultyFiles()
    tier = make(tmp_path, max_nbytes=4 * PAGE, files=files)
    tier.write(blocks(1, 8), 0.0)
    seen: list[object] = []

    def meanwhile(result: int) -> int:
        seen.append(tier.write(blocks(2, 16), 1.0))  # needs the place of what is being read
        tier.check_integrity()
        assert tier.expire(READ_LEASE_S - 1) == 0 and tier.expire(READ_LEASE_S) == 1
        seen.append(tier.write(blocks(2, 8), 11.0))
        seen.append(tier.write(blocks(3, 8), 11.0))
        return result

    files.fail("read", meanwhile)
    assert served(tier, 1, 8) == 0

    assert seen == [0, 8, 8]
    assert tier.statistics()["lapsed_reads_total"] == 1
    assert served(tier, 1, 8) == 0 and served(tier, 3, 8) == 8
    tier.check_integrity()


def test_segments_of_another_layout_are_left_alone_and_go_first_when_room_is_needed(tmp_path: Path) -> None:
    """A model that comes back finds its blocks, unless the cap was reached meanwhile."""
    one = make(tmp_path, layout="one", max_nbytes=5 * PAGE)
    one.write(blocks(1, 8), 0.0)
    one.close()
    two = make(tmp_path, "e2", layout="two", max_nbytes=5 * PAGE)
    assert served(two, 1, 8) == 0 and two.statistics()["foreign_nbytes"] == 2 * PAGE
    two.write(blocks(1, 4), 0.0)
    two.close()

    one = make(tmp_path, "e3", layout="one", max_nbytes=5 * PAGE)
    assert served(one, 1, 8) == 8
    one.close()

    two = make(tmp_path, "e4", layout="two", max_nbytes=5 * PAGE)
    two.write(blocks(2, 8), 0.0)
    assert served(two, 1, 4) == 4 and served(two, 2, 8) == 8
    assert two.statistics()["foreign_nbytes"] == 0
    two.check_integrity()
    two.close()

    one = make(tmp_path, "e5", layout="one", max_nbytes=5 * PAGE)
    assert served(one, 1, 8) == 0


# --- pure parts --------------------------------------------------------------------------------------


def test_a_block_is_admitted_when_it_is_used_again() -> None:
    """One pass over many blocks admits none; what is remembered is bounded."""
    policy = SecondTouch(capacity=3)
    assert [policy.touch(key) for key in (b"a", b"b", b"a", b"c")] == [False, False, True, False]

    assert [policy.touch(key) for key in (b"d", b"e", b"f")] == [False] * 3
    assert len(policy) == 3 and not policy.touch(b"a")


def test_pauses_grow_until_real_work_succeeds() -> None:
    """A self-test that passes is not enough: a full disk often takes one block more."""
    health = Health()
    pauses = []
    now = 0.0
    for _ in range(9):
        health.fail(28, "full", now)
        assert not health.ok and not health.due(health.next_probe - 0.1) and health.due(health.next_probe)
        pauses.append(health.next_probe - now)
        now = health.next_probe
        health.passed()
        assert health.ok and not health.due(now)

    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    health.proved()
    health.fail(None, "odd", now)
    assert health.next_probe == now + 1 and health.errno != 0


def test_no_more_is_read_than_there_is_time_for() -> None:
    """Whole blocks only."""
    assert affordable(100, 1000, 10_000.0, 0.5) == 5
    assert affordable(3, 1000, 10_000.0, 0.5) == 3
    assert affordable(3, 1000, 1.0, 0.5) == 0


def test_blocks_wait_until_they_fill_a_segment_or_long_enough() -> None:
    """In the order in which they were admitted, each once, none that is written already."""
    behind = WriteBehind(SecondTouch(), batch=3, delay_s=1.0)
    keys = [bytes([i]) for i in range(5)]
    behind.touch(keys, 0.0, ())
    assert len(behind) == 0
    behind.touch(keys[:2], 1.0, ())
    behind.touch(keys[:2], 1.5, ())
    assert len(behind) == 2 and behind.take(1.9, keys) == [] and behind.take(2.0, keys) == keys[:2]

    behind.touch(keys, 3.0, {keys[0]})
    assert behind.take(3.0, keys) == keys[1:4] and behind.take(3.0, keys) == []
    assert behind.take(4.0, keys) == [keys[4]] and len(behind) == 0


def test_a_block_that_is_not_stored_yet_waits_for_a_while() -> None:
    """Its writer has announced it; one that never comes is forgotten."""
    behind = WriteBehind(None, batch=2, delay_s=1.0, keep_s=5.0)
    behind.touch([b"a", b"b"], 0.0, ())

    assert behind.take(1.0, {b"b"}) == [b"b"] and len(behind) == 1
    assert behind.take(4.0, ()) == [] and len(behind) == 1
    assert behind.take(5.0, ()) == [] and len(behind) == 0


def test_a_full_queue_drops_what_comes_unless_memory_is_about_to_go() -> None:
    """It never grows with the load; at the end everything gets its chance."""
    behind = WriteBehind(None, batch=2, max_queued=2)
    behind.touch([b"a", b"b", b"c"], 0.0, ())
    assert (len(behind), behind.dropped) == (2, 1)

    behind.push([b"c", b"d", b"a", b"e"], 0.0, {b"e"})

    stored = (b"a", b"b", b"c", b"d")
    assert [behind.take(0.0, stored, hurry=True) for _ in range(3)] == [[b"a", b"b"], [b"c", b"d"], []]
