"""Eviction policies: one contract for all, and what sets them apart."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.eviction import ArcPolicy, EvictionPolicy, LruPolicy, S3FifoPolicy

MAKERS: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity: LruPolicy(),
    "s3-fifo": S3FifoPolicy,
    "s3-fifo, a tenth new": lambda capacity: S3FifoPolicy(capacity, small=0.1),
    "arc": ArcPolicy,
}
contract = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def key(name: int) -> bytes:
    """A key."""
    return name.to_bytes(4, "big")


class Store:
    """What an owner does around a policy; checks every answer."""

    def __init__(self, make: Callable[[int], EvictionPolicy], capacity: int) -> None:
        self.policy = make(capacity)
        self.capacity = capacity
        self.stored: set[bytes] = set()
        self.pinned: set[bytes] = set()
        self.evicted: list[bytes] = []
        self.asked = 0

    def can_go(self, candidate: bytes) -> bool:
        """Pinned keys stay; keys that are not stored are never asked about."""
        self.asked += 1
        assert candidate in self.stored
        return candidate not in self.pinned

    def evict(self) -> bool:
        """Let one key go; false only if all are pinned."""
        victim = self.policy.victim(self.can_go)
        if victim is None:
            assert self.stored <= self.pinned
            return False
        assert victim in self.stored and victim not in self.pinned
        self.delete(victim)
        self.evicted.append(victim)
        return True

    def delete(self, gone: bytes) -> None:
        """Drop a key, evicted or damaged."""
        self.stored.discard(gone)
        self.pinned.discard(gone)
        self.policy.remove(gone)

    def use(self, wanted: bytes) -> bool:
        """Use a key, which stores it if there is room; returns whether it was stored."""
        if wanted in self.stored:
            self.policy.touch(wanted)
            return True
        if len(self.stored) < self.capacity or self.evict():
            self.stored.add(wanted)
            self.policy.insert(wanted)
        return False

    def check(self) -> None:
        """The policy knows as many keys as there are, and not too many ghosts."""
        statistics = self.policy.statistics()
        assert statistics["keys"] == len(self.stored) <= self.capacity
        assert 0 <= statistics["ghosts"] <= self.capacity


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["use", "use", "use", "pin", "unpin", "delete", "evict", "touch"]), st.integers(0, 30)),
    max_size=120,
)


@contract
@given(operations=OPERATIONS, capacity=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_only_stored_keys_that_can_go_are_named(
    make: Callable[[int], EvictionPolicy], operations: list[tuple[str, int]], capacity: int
) -> None:
    """Whatever the order of uses, pins and deletions: what goes was stored and free to go, and memory is bounded."""
    store = Store(make, capacity)

    for operation, name in operations:
        match operation:
            case "use":
                store.use(key(name))
            case "pin" if key(name) in store.stored:
                store.pinned.add(key(name))
            case "unpin":
                store.pinned.discard(key(name))
            case "delete":
                store.delete(key(name))
            case "evict":
                store.evict()
            case "touch":
                store.policy.touch(key(name))
        store.check()

    store.pinned.clear()
    left = len(store.stored)
    store.evicted.clear()
    while store.evict():
        store.check()
    assert len(set(store.evicted)) == left and not store.stored


def churn(make: Callable[[int], EvictionPolicy], seed: int) -> Store:
    """A store after 3,000 uses, some keys far more popular than others."""
    store, draw = Store(make, 50), random.Random(seed)
    for _ in range(3000):
        store.use(key(min(int(draw.paretovariate(0.5)), 5000)))
    return store


@contract
def test_same_uses_same_victims(make: Callable[[int], EvictionPolicy]) -> None:
    """No chance is involved."""
    first, second = churn(make, 1), churn(make, 1)

    assert first.evicted == second.evicted and len(first.evicted) > 100


@contract
def test_one_look_is_enough_when_all_can_go(make: Callable[[int], EvictionPolicy]) -> None:
    """The cost of a victim does not grow with what is stored."""
    store = churn(make, 2)

    assert store.asked == len(store.evicted)


@contract
def test_a_key_stored_twice_is_one_key(make: Callable[[int], EvictionPolicy]) -> None:
    """A second insert is a use."""
    policy = make(4)
    policy.insert(b"a")
    policy.insert(b"a")

    assert policy.statistics()["keys"] == 1
    assert policy.victim(lambda _: True) == b"a"
    policy.remove(b"a")
    assert policy.victim(lambda _: True) is None


@contract
def test_the_tail_of_a_chain_goes_before_its_head(make: Callable[[int], EvictionPolicy]) -> None:
    """A store touches a chain from its tail to its head, since a block without those before it is of no use."""
    store = Store(make, 8)
    chain = [key(position) for position in range(8)]
    for _ in range(2):
        for block in reversed(chain):
            store.use(block)

    while store.evict():
        pass

    assert store.evicted == chain[::-1]


def hot_after_a_scan(make: Callable[[int], EvictionPolicy]) -> int:
    """How many of 40 keys, each used four times beside others, outlive 1,000 keys used once, in a store of 100."""
    store = Store(make, 100)
    hot = [key(name) for name in range(40)]
    for turn in range(4):
        for name in range(20):
            store.use(key(10_000 + 20 * turn + name))
        for wanted in hot:
            store.use(wanted)

    for name in range(1000):
        store.use(key(1_000_000 + name))

    return len(store.stored & set(hot))


def test_a_scan_flushes_lru_and_nothing_else() -> None:
    """One pass over keys that nobody asks for again costs the others no hot key."""
    kept = {name: hot_after_a_scan(make) for name, make in MAKERS.items()}

    assert kept == {"lru": 0, "s3-fifo": 40, "s3-fifo, a tenth new": 40, "arc": 40}


def test_s3_fifo_remembers_what_it_evicted_but_not_what_was_deleted() -> None:
    """A key that comes back soon after its eviction outlives new ones; a damaged one starts anew."""
    store = Store(lambda capacity: S3FifoPolicy(capacity, small=0.25), 4)
    for name in range(5):
        store.use(key(name))
    assert store.evicted == [key(0)]

    store.use(key(0))
    store.delete(key(4))
    store.use(key(4))

    assert store.policy.statistics()["main"] == 1
    for name in range(10, 20):
        store.use(key(name))
    assert key(0) in store.stored and key(4) not in store.stored


def test_arc_gives_room_to_what_would_have_been_hit() -> None:
    """Coming back as a ghost shifts the share towards the list that lost the key."""
    store = Store(ArcPolicy, 4)
    for name in (0, 0, 1, 2, 3, 4):
        store.use(key(name))
    assert store.evicted == [key(1)] and store.policy.statistics()["share"] == 0

    store.use(key(1))

    assert store.policy.statistics()["share"] == 1
    assert store.policy.statistics()["again"] == 2


@pytest.mark.parametrize("make", [S3FifoPolicy, ArcPolicy])
def test_no_capacity_no_policy(make: Callable[[int], EvictionPolicy]) -> None:
    """A capacity is positive."""
    with pytest.raises(ValueError, match="0 keys"):
        make(0)


def test_a_share_is_between_nothing_and_all() -> None:
    """New keys get some of the room, not all of it."""
    with pytest.raises(ValueError, match=r"1\.0 of them"):
        S3FifoPolicy(10, small=1.0)
