"""The pool's ledger, its prefix cache, and its memory across processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.errors import PoolFull, PoolGone
from kvstore.index import BlockIndex, Dump
from kvstore.pool import BlockPool, attach, detach, reap

NBYTES = 64


def make_pool(directory: Path, num_blocks: int = 8, *, name: str = "inst-pool", epoch: str = "e1") -> BlockPool:
    """A small pool."""
    return BlockPool.create(directory, name, num_blocks, NBYTES, "layout", epoch, "here")


class Ledger(RuleBasedStateMachine):
    """Random use of a pool against a plain model of who holds what."""

    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(self.directory, 12)
        self.held: list[list[int]] = []  # one reference per entry
        self.quarantined: dict[str, list[int]] = {}
        self.content: dict[int, bytes] = {}  # block → hash it was published under, while that may be found
        self.number = 0

    @rule(n=st.integers(0, 14))
    def allocate(self, n: int) -> None:
        """Hands out what can be had, or changes nothing."""
        free = self.pool.num_free
        if n > free:
            with pytest.raises(PoolFull):
                self.pool.allocate(n)
            assert self.pool.num_free == free
            return
        before = {b: self.pool.refs([b])[0] for b in range(12)}
        blocks = self.pool.allocate(n)
        assert len(set(blocks)) == n and not set(blocks) & self._taken()
        assert not self.pool.check([before[b] for b in blocks]) or not blocks
        for block in blocks:
            self.content.pop(block, None)
        if blocks:
            self.held.append(blocks)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A second holder keeps blocks alive."""
        if self.held:
            blocks = list(data.draw(st.sampled_from(self.held)))
            self.pool.share(blocks)
            self.held.append(blocks)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """One holder leaves."""
        if self.held:
            self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """A held block becomes known under a new hash."""
        if self.held:
            block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.held))))
            self.number += 1
            digest = self.number.to_bytes(32, "big")
            if self.pool.publish(block, digest):
                self.content[block] = digest
            else:
                assert block in self.content

    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        """What is found holds what was published, and gets a reference."""
        if self.content:
            block = data.draw(st.sampled_from(sorted(self.content)))
            found = self.pool.match([self.content[block], b"unknown", self.content[block]])
            assert found == [block]
            self.held.append(found)

    @rule(data=st.data(), writer=st.sampled_from(["w1", "w2"]))
    def quarantine(self, data: st.DataObject, writer: str) -> None:
        """Blocks of one holder wait for a writer."""
        alone = [h for h in self.held if not any(set(h) & set(o) for o in self.held if o is not h)]
        if alone:
            blocks = data.draw(st.sampled_from(alone))
            self.held = [h for h in self.held if h is not blocks]
            self.pool.quarantine(blocks, writer)
            self.quarantined.setdefault(writer, []).extend(blocks)
            for block in blocks:
                self.content.pop(block, None)

    @rule(writer=st.sampled_from(["w1", "w2"]))
    def absolve(self, writer: str) -> None:
        """The writer is done."""
        assert self.pool.absolve(writer) == len(self.quarantined.pop(writer, []))

    def _taken(self) -> set[int]:
        return {b for h in self.held for b in h} | {b for q in self.quarantined.values() for b in q}

    @invariant()
    def balances(self) -> None:
        """Pool and model agree on every count."""
        self.pool.check_integrity()
        in_use = {b for h in self.held for b in h}
        assert self.pool.in_use == len(in_use)
        assert self.pool.num_quarantined == sum(len(q) for q in self.quarantined.values())
        assert self.pool.num_free == 12 - len(self._taken())
        for block, digest in self.content.items():
            assert self.pool.block_of(digest) == block

    def teardown(self) -> None:
        """Everything that was taken can be given back."""
        for blocks in self.held:
            self.pool.free(blocks)
        for writer in self.pool.writers:
            self.pool.absolve(writer)
        self.pool.check_integrity()
        assert self.pool.num_free == 12
        self.pool.close()


@pytest.mark.slow
def test_the_ledger_balances_whatever_happens(tmp_path: Path) -> None:
    """No order of operations loses a block, lends it twice, or finds what is no longer there."""
    Ledger.directory = tmp_path
    run_state_machine_as_test(
        Ledger,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_a_chain_loses_its_tail_first_and_the_oldest_chain_before_a_younger_one(tmp_path: Path) -> None:
    """Eviction takes the least recently used chain, from its end."""
    pool = make_pool(tmp_path, 4)
    chains = []
    for name in (b"a", b"b"):
        blocks = pool.allocate(2)
        hashes = [name + b"0", name + b"1"]
        for block, digest in zip(blocks, hashes, strict=True):
            pool.publish(block, digest)
        pool.free(blocks)
        chains.append(hashes)

    pool.allocate(1)

    assert pool.peek(chains[0]) == (1, 1) and pool.peek(chains[1]) == (2, 2)


def test_a_block_in_use_is_never_evicted(tmp_path: Path) -> None:
    """A matched block stays, however much is wanted."""
    pool = make_pool(tmp_path, 2)
    [block] = pool.allocate(1)
    pool.publish(block, b"h")
    pool.free([block])
    assert pool.match([b"h"]) == [block]

    pool.allocate(1)

    assert not pool.can_allocate(1)
    with pytest.raises(PoolFull, match="1 blocks wanted, 0 available"):
        pool.allocate(1)
    assert pool.peek([b"h"]) == (1, 0)


def test_a_reference_dies_with_its_lending(tmp_path: Path) -> None:
    """After a block is given back or lent again, an old reference is refused, and so is a made-up one."""
    pool = make_pool(tmp_path, 1)
    blocks = pool.allocate(1)
    [old] = pool.refs(blocks)
    assert pool.check([old])

    pool.free(blocks)
    assert not pool.check([old])
    pool.allocate(1)

    assert not pool.check([old]) and pool.check(pool.refs([0]))
    assert not pool.check([old.model_copy(update={"index": 99})])


def test_known_content_is_published_once(tmp_path: Path) -> None:
    """A second block with the same hash stays unknown and is simply free afterwards."""
    pool = make_pool(tmp_path, 2)
    blocks = pool.allocate(2)

    assert pool.publish(blocks[0], b"h") and not pool.publish(blocks[1], b"h")
    pool.free(blocks)

    assert pool.num_cached == 1 and pool.num_free == 2


def test_the_file_has_owner_and_epoch_in_its_name_and_goes_with_the_pool(tmp_path: Path) -> None:
    """One file, readable by its owner alone, as long as the pool lives; closing twice is harmless."""
    pool = make_pool(tmp_path)
    path = Path(pool.handle().path)
    assert path.name == "headrace-inst-pool-e1" and path.stat().st_mode & 0o777 == 0o600

    pool.close()
    pool.close()

    assert list(tmp_path.iterdir()) == []


def test_another_process_reads_and_writes_the_same_bytes(tmp_path: Path) -> None:
    """The handle is all that another process needs; its exit leaves the file in place."""
    pool = make_pool(tmp_path)
    pool.view()[0:5] = b"hello"
    code = (
        "import sys; from schemas.messages import PoolHandle; from kvstore.pool import attach\n"
        "view = attach(PoolHandle.model_validate_json(sys.argv[1])).view()\n"
        "print(bytes(view[0:5]).decode()); view[5:11] = b' world'"
    )
    root = Path(__file__).resolve().parents[2]

    out = subprocess.run(
        [sys.executable, "-c", code, pool.handle().model_dump_json()],
        capture_output=True, text=True, check=True, timeout=30, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip

    assert out.stdout == "hello\n"
    assert bytes(pool.view()[:11]) == b"hello world"
    assert Path(pool.handle().path).exists()
    pool.close()


def test_only_the_very_pool_is_attached(tmp_path: Path) -> None:
    """Absent, cut, or relabelled pools are refused by name; a closed one is noticed although it was mapped before."""
    pool = make_pool(tmp_path)
    handle = pool.handle()
    assert attach(handle) is attach(handle)

    for change in ({"epoch": "e2"}, {"layout": "x"}, {"nbytes": 32}, {"block_nbytes": 32}, {"path": "/nowhere"}):
        with pytest.raises(PoolGone, match="pool /"):
            attach(handle.model_copy(update=change))
    pool.close()

    with pytest.raises(PoolGone):
        attach(handle)
    detach({"e1"})


def test_leftovers_of_dead_owners_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """A file without a living owner goes; pools in use, other instances, live epochs and other files stay."""
    mine = make_pool(tmp_path, name="inst-mine", epoch="e3")
    for name in ("inst-dead-e1", "inst-live-e2", "other-dead-e1"):
        (tmp_path / f"headrace-{name}").write_bytes(b"x")
    (tmp_path / "notes").write_bytes(b"x")

    removed = reap(tmp_path, "headrace-inst-", {"e2"})

    assert removed == ["headrace-inst-dead-e1"]
    assert reap(tmp_path, "headrace-inst-", set()) == ["headrace-inst-live-e2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["headrace-inst-mine-e3", "headrace-other-dead-e1", "notes"]
    mine.close()


def test_a_killed_owner_leaves_a_file_that_can_be_reaped(tmp_path: Path) -> None:
    """While the owner lives its pool is safe from a reaper; after SIGKILL it is not."""
    code = (
        "import sys; from pathlib import Path; from kvstore.pool import BlockPool\n"
        "BlockPool.create(Path(sys.argv[1]), 'inst-a', 2, 64, 'l', 'e9', 'h')\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    root = Path(__file__).resolve().parents[2]
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    with owner:
        assert owner.stdout is not None and owner.stdout.readline() == "up\n"
        while_alive = reap(tmp_path, "headrace-inst-", set())
        owner.kill()
        owner.wait(10)

    assert while_alive == []
    assert reap(tmp_path, "headrace-inst-", set()) == ["headrace-inst-a-e9"]


def test_a_pool_that_cannot_be_had_leaves_nothing(tmp_path: Path) -> None:
    """No memory, a name in use, or a senseless size: an error at once and no file."""
    with pytest.raises(ValueError, match="0 blocks"):
        make_pool(tmp_path, 0)
    with pytest.raises(OSError):
        BlockPool.create(tmp_path, "inst-big", 1 << 40, 1 << 20, "l", "e", "h")
    assert list(tmp_path.iterdir()) == []
    pool = make_pool(tmp_path)
    with pytest.raises(FileExistsError):
        make_pool(tmp_path)
    assert Path(pool.handle().path).exists()
    pool.close()


def test_blocks_that_come_next_are_touched_once_and_keep_what_they_hold(tmp_path: Path) -> None:
    """What is used, or was touched before, is left alone; contents never change."""
    made = BlockPool.create(tmp_path, "touch", 8, 5000, "x", "e", "h")
    try:
        made.view()[:] = bytes(range(250)) * 160
        before = bytes(made.view())
        made.allocate(3)

        assert [made.touch_ahead(4, 3), made.touch_ahead(4, 3), made.touch_ahead(4, 3)] == [3, 1, 0]
        assert made.touch_ahead(8, 8) == 1
        assert bytes(made.view()) == before
    finally:
        made.close()


def test_who_follows_the_changes_knows_what_the_pool_knows(tmp_path: Path) -> None:
    """A dump at any moment, then the changes behind it, through evictions and content that is not to be trusted."""
    pool, index, number = make_pool(tmp_path, 8), BlockIndex(), 0
    pool.log_changes()

    for turn in range(40):
        if turn == 20:
            index = BlockIndex()
            assert index.load(pool.dump())
        blocks = pool.allocate(1 + turn % 3)
        digests = [f"{number + i}".encode() for i in range(len(blocks))]
        for block, digest, parent in zip(blocks, digests, [b"root", *digests], strict=False):
            assert pool.publish(block, digest, parent)
        number += len(blocks)
        if turn % 5 == 4:
            pool.unpublish(blocks[-1:])
        pool.free(blocks)
        if turn == 0:
            index.load(Dump(pool.events.epoch, 0, ()))
        assert all(index.apply(event) for event in pool.events.collect())

        known = {f"{i}".encode() for i in range(number) if pool.block_of(f"{i}".encode()) is not None}
        assert {d for d in (f"{i}".encode() for i in range(number)) if index.locations(d)} == known
    assert len(pool._parents) == len(known) <= 8
