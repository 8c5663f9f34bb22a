"""Runs of consecutive stored blocks: exact whatever a tier drops, and few comparisons for a long prefix."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import chain_hashes, root_hash
from kvstore.index import BlockIndex, Dump
from kvstore.runs import MAX_RUN, StoredRuns

ROOT = root_hash("r")


def chain(name: int, length: int, *, parent: bytes = ROOT) -> list[bytes]:
    """Hashes of a chain of its own, from a root or as a branch of another chain."""
    return chain_hashes([name] * 16 * length, root=parent)


def store(runs: StoredRuns, hashes: Sequence[bytes], *, parent: bytes = ROOT) -> None:
    """Add a chain in its order."""
    for before, digest in zip([parent, *hashes], hashes, strict=False):
        runs.add(digest, before)


# A trunk of 12 blocks and two branches, one of them from the trunk's middle.
TRUNK = chain(1, 12)
BRANCH = chain(2, 8, parent=TRUNK[5])
OTHER = chain(3, 5, parent=TRUNK[11])
CHAINS = [TRUNK, TRUNK[:6] + BRANCH, TRUNK + OTHER, BRANCH, TRUNK[3:] + OTHER, chain(4, 3)]
PARENTS = {h: p for c in CHAINS[:3] for p, h in zip([ROOT, *c], c, strict=False)}
BLOCKS = sorted(PARENTS)


class Counted(list[bytes]):
    """Candidates that count how often somebody looks at one."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)


def by_set(stored: set[bytes], hashes: Sequence[bytes]) -> int:
    """The plain version: look at one block after the other."""
    length = 0
    while length < len(hashes) and hashes[length] in stored:
        length += 1
    return length


@given(
    st.lists(st.tuples(st.sampled_from(BLOCKS), st.sampled_from(["add", "add blindly", "drop"])), max_size=80),
    st.booleans(),
)
def test_every_prefix_is_what_looking_at_each_block_gives(changes: list[tuple[bytes, str]], whole: bool) -> None:
    """Branches, holes, blocks that come in any order and without their parents: always exactly the tier's answer."""
    runs, truth = StoredRuns(1000), set[bytes]()
    if whole:
        for digest in (*TRUNK, *BRANCH, *OTHER):
            runs.add(digest, PARENTS[digest])
            truth.add(digest)
    for digest, what in changes:
        if what == "drop":
            assert runs.drop(digest) == (digest in truth)
            truth.discard(digest)
        else:
            runs.add(digest, PARENTS[digest] if what == "add" else b"")
            truth.add(digest)

    runs.check_integrity()
    assert set(runs) == truth and len(runs) == len(truth)
    for hashes in CHAINS:
        for start in range(len(hashes)):
            assert runs.prefix(hashes, start) == by_set(truth, hashes[start:])


def test_a_long_prefix_takes_few_looks_and_one_more_chain_costs_none() -> None:
    """Ten thousand stored candidates: a look per run of 256 and not per block, however much else is stored."""
    runs, hashes = StoredRuns(100_000), chain(1, 10_000)
    store(runs, hashes)
    for name in range(2, 40):
        store(runs, chain(name, 500))

    asked = Counted(hashes)
    assert runs.prefix(asked) == 10_000
    assert asked.looks < 5 * (10_000 // MAX_RUN + 1)
    fork = Counted(hashes[:7_777] + chain(99, 2_223, parent=hashes[7_776]))
    assert runs.prefix(fork) == 7_777
    assert fork.looks < 5 * (10_000 // MAX_RUN + 1)


def test_a_dropped_block_splits_its_run_and_joins_the_parts_when_it_comes_back() -> None:
    """The work of both stays within a run."""
    runs, hashes = StoredRuns(10_000), chain(1, 3 * MAX_RUN)
    store(runs, hashes)
    assert runs.num_runs == 3

    for at in (100, 200, 300):
        runs.drop(hashes[at])
    assert runs.num_runs == 6 and runs.prefix(hashes) == 100 and runs.prefix(hashes, 101) == 99
    runs.drop(hashes[0])  # the first of a run takes no split
    assert runs.num_runs == 6 and runs.prefix(hashes, 1) == 99
    runs.add(hashes[100], hashes[99])
    assert runs.num_runs == 5 and runs.prefix(hashes, 1) == 199
    for at in (0, 200, 300):
        runs.add(hashes[at], hashes[at - 1] if at else ROOT)
    assert runs.num_runs == 3 and runs.prefix(hashes) == 3 * MAX_RUN
    runs.check_integrity()


def test_a_chain_that_comes_backwards_is_one_run() -> None:
    """Every block is there before the one that it follows."""
    runs, hashes = StoredRuns(10_000), chain(1, 50)
    for at in reversed(range(50)):
        runs.add(hashes[at], hashes[at - 1] if at else ROOT)
    assert runs.num_runs == 1 and runs.prefix(hashes) == 50
    runs.check_integrity()


def test_beyond_the_capacity_the_oldest_chain_loses_its_tail() -> None:
    """Never its head, without which the rest would be of no use."""
    runs, old, new = StoredRuns(10), chain(1, 8), chain(2, 6)
    store(runs, old)
    store(runs, new)

    assert (len(runs), runs.forgotten) == (10, 4)
    assert runs.prefix(old) == 4 and runs.prefix(new) == 6
    runs.check_integrity()


def test_the_offers_name_source_length_and_seconds_the_quickest_first() -> None:
    """A near tier with less may beat a far one with more; computing everything is always among them."""
    index, hashes = BlockIndex(), chain(1, 100)
    parents = (ROOT, *hashes[:-1])
    index.load(Dump("near", 1, tuple(hashes[:40]), parents[:40]))
    for epoch, tier, count in (("far", "disk", 90), ("unpriced", "remote", 100)):
        runs = StoredRuns(1000)
        store(runs, hashes[:count])
        index.install(epoch, 1, runs, tier=tier)

    def prefill(stored: int) -> float:
        return (100 - stored) * 0.01

    found = index.offers(hashes, {"host": 0.001, "disk": 0.002}, prefill)
    assert [(o.source, o.tier, o.num_blocks) for o in found] == [("far", "disk", 90), ("near", "host", 40), ("", "", 0)]
    assert [round(o.seconds, 6) for o in found] == [0.28, 0.64, 1.0]

    slow = index.offers(hashes, {"host": 0.001, "disk": 0.02}, prefill)
    assert [o.source for o in slow] == ["near", "", "far"]


def test_tiers_that_share_a_chain_are_joined() -> None:
    """Blocks of one prefix may lie in several tiers of one owner, in any alternation."""
    index, hashes = BlockIndex(), chain(1, 30)
    index.load(Dump("a", 1, tuple(hashes[:10] + hashes[15:20])))
    index.load(Dump("b", 1, tuple(hashes[8:16] + hashes[20:25])))
    index.load(Dump("c", 1, tuple(hashes[25:])))

    assert index.joint_prefix(["a", "b"], hashes) == 25
    assert index.joint_prefix(["a"], hashes) == 10 and index.joint_prefix(["b", "nobody"], hashes) == 0
    assert index.joint_prefix([], hashes) == 0


@pytest.fixture
def seconds_of() -> Iterator[Callable[[Callable[[], object]], float]]:
    """Processor time of the best of several calls: what else runs on the machine matters little."""
    import timeit

    yield lambda fn: min(timeit.repeat(fn, number=3, repeat=7))


@pytest.mark.slow
def test_runs_are_several_times_faster_than_looking_at_each_block(
    seconds_of: Callable[[Callable[[], object]], float],
) -> None:
    """Ten thousand candidates among a hundred thousand blocks of chains that came interleaved, in batches of 64."""
    runs, stored = StoredRuns(1_000_000), dict[bytes, None]()
    rng = random.Random(7)
    chains = [chain(1, 10_000)] + [chain(name, 900) for name in range(2, 102)]
    todo = [(c, first) for c in chains for first in range(0, len(c), 64)]
    order = sorted(range(len(todo)), key=lambda at: (todo[at][1], rng.random()))
    for c, first in (todo[at] for at in order):
        store(runs, c[first : first + 64], parent=c[first - 1] if first else ROOT)
        stored.update(dict.fromkeys(c[first : first + 64]))
    asked = chains[0]
    assert runs.prefix(asked) == 10_000

    fast = seconds_of(lambda: runs.prefix(asked))
    plain = seconds_of(lambda: next((i for i, h in enumerate(asked) if h not in stored), len(asked)))
    assert plain > 5 * fast
