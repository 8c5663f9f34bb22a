"""A store of which only the names of blocks are real: the policies and the index do what they do in a host tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.replay.trace import BLOCK_TOKENS, Trace
from kvstore.eviction import ArcPolicy, EvictionPolicy, LruPolicy, S3FifoPolicy
from kvstore.index import BlockIndex, Dump, EventLog, Op

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity: LruPolicy(),
    "s3-fifo 10%": lambda capacity: S3FifoPolicy(capacity, small=0.1),
    "s3-fifo 50%": S3FifoPolicy,
    "arc": ArcPolicy,
}
DEFAULT_EVICTION = "s3-fifo 50%"  # what a host tier has
UNLIMITED = 0


class Store:
    """Blocks by name, in the order of calls of a host tier: look up, reserve with evictions, commit."""

    def __init__(self, epoch: str, capacity: int, policy: str) -> None:
        """Start empty.

        Args:
            epoch: names the store to an index.
            capacity: in blocks; `UNLIMITED` never evicts.
            policy: one of `POLICIES`.
        """
        self.capacity = capacity
        self.events = EventLog(epoch)
        self._policy = POLICIES[policy](capacity or 1)
        self._stored: set[bytes] = set()

    @property
    def free_blocks(self) -> int:
        """Room without evictions."""
        return self.capacity - len(self._stored)

    def prefix(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the first blocks are stored; counts as no use."""
        return next((n for n, block in enumerate(hashes) if block not in self._stored), len(hashes))

    def use(self, hashes: Sequence[bytes]) -> int:
        """A prompt is looked up and, once computed, stored; returns how many of its first blocks were there.

        Chains are touched and inserted from tail to head, so that a tail goes before what it needs. A prompt that is
        too long for the store keeps its head there.
        """
        found = self.prefix(hashes)
        for block in reversed(hashes[:found]):
            self._policy.touch(block)
        wanted = []
        for position, block in enumerate(hashes[found:], found):
            if block in self._stored:
                self._policy.touch(block)
            else:
                wanted.append((block, hashes[position - 1] if position else b""))
        room = self._make_room(len(wanted), set(hashes))
        for block, parent in wanted[:room]:
            self._stored.add(block)
            self.events.record(Op.ADD, block, parent)
        for block, _ in reversed(wanted[:room]):
            self._policy.insert(block)
        return found

    def _make_room(self, wanted: int, keep: set[bytes]) -> int:
        if self.capacity == UNLIMITED:
            return wanted
        while self.free_blocks < wanted:
            victim = self._policy.victim(lambda block: block not in keep)
            if victim is None:
                break
            self._stored.remove(victim)
            self._policy.remove(victim)
            self.events.record(Op.DROP, victim)
        return min(wanted, self.free_blocks)

    def statistics(self) -> dict[str, float]:
        """Return gauges by name."""
        return {"stored": len(self._stored), **self._policy.statistics()}


def follow(index: BlockIndex, store: Store) -> None:
    """Let an index know a store that is still empty."""
    index.load(Dump(store.events.epoch, 0, ()))


def hit_rate(trace: Trace, capacity_tokens: int, policy: str) -> float:
    """Return the share of all prompt tokens found stored, one request after the other in one store.

    What is stored is read from an index that follows the store's events.

    Raises:
        RuntimeError: if index and store disagree, or an event is lost.
    """
    store = Store("store", capacity_tokens // BLOCK_TOKENS, policy)
    index = BlockIndex()
    follow(index, store)
    hit = 0
    for arrival in trace.arrivals:
        known = index.longest_prefix(arrival.hashes).get("store", 0)
        if known != store.use(arrival.hashes):
            raise RuntimeError(f"the index says {known} blocks, the store has {store.prefix(arrival.hashes)}")
        hit += min(known * BLOCK_TOKENS, arrival.input_tokens)
        if not all(index.apply(event) for event in store.events.collect()):
            raise RuntimeError("the index missed an event")
    return hit / trace.input_tokens
