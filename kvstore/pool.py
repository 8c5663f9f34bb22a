"""A pool: memory for a fixed number of blocks, the ledger of who uses which, and the cache of what they hold.

A block is in exactly one of four states:

    free         nothing of worth in it
    cached       nobody uses it, but its content is known by hash and can be had again
    in use       somebody holds a reference
    quarantined  nobody of ours uses it, but a writer elsewhere has not confirmed that it is done

One thread owns a pool. Other processes write into its blocks only as `BlockRef`s say.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from kvstore.errors import PoolFull
from kvstore.index import Dump, EventLog, Op
from kvstore.shm import PREFIX, AttachedPool, SharedFile, attach, detach, reap
from schemas.messages import BlockRef, PoolHandle

DEFAULT_DIRECTORY = Path("/dev/shm")

__all__ = ["DEFAULT_DIRECTORY", "AttachedPool", "BlockPool", "attach", "detach", "reap"]


class BlockPool:
    """Blocks of one owner: allocation, references, generations and the device-tier prefix cache."""

    def __init__(self, memory: SharedFile, handle: PoolHandle, num_blocks: int) -> None:
        """Take over memory that `create` made."""
        self.num_blocks = num_blocks
        self.block_nbytes = handle.block_nbytes
        self.layout = handle.layout
        self._memory = memory
        self._handle = handle
        self._free: deque[int] = deque(range(num_blocks))
        self._touched = bytearray(num_blocks)
        self._refs = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._quarantine: dict[str, list[int]] = {}
        self._num_quarantined = 0
        self._counts = {"allocated": 0, "evicted": 0, "matched": 0, "published": 0, "quarantined": 0}
        self._events: EventLog | None = None  # numbered changes of the prefix cache, once somebody wants them
        self._parents: dict[bytes, bytes] = {}  # of the hashes that are known, then

    @classmethod
    def create(
        cls, directory: Path, name: str, num_blocks: int, block_nbytes: int, layout: str, epoch: str, host: str
    ) -> BlockPool:
        """Make a pool in a file `headrace-<name>-<epoch>`.

        Args:
            directory: on a CPU `/dev/shm`.
            name: `<instance>-<actor>`, so that an instance can find what it left behind (see `reap`).
            num_blocks: blocks in the pool.
            block_nbytes: bytes of one block, all layers.
            layout: text that another pool must share for blocks to be copied between the two.
            epoch: incarnation of the owner.
            host: where the file can be mapped.

        Raises:
            OSError: if the memory cannot be had; nothing is left behind.
            ValueError: if a size is not positive.
        """
        if num_blocks <= 0 or block_nbytes <= 0:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_nbytes} bytes")
        path = directory / f"{PREFIX}{name}-{epoch}"
        nbytes = num_blocks * block_nbytes
        memory = SharedFile(path, nbytes, {"epoch": epoch, "layout": layout, "block_nbytes": block_nbytes})
        handle = PoolHandle(
            path=str(path), nbytes=nbytes, block_nbytes=block_nbytes, layout=layout, epoch=epoch, host=host
        )
        return cls(memory, handle, num_blocks)

    # --- memory ------------------------------------------------------------------------------------

    def handle(self) -> PoolHandle:
        """Return what another process needs to map this pool."""
        return self._handle

    def view(self) -> memoryview:
        """Return the writable bytes of all blocks, `num_blocks × block_nbytes`."""
        return self._memory.view()

    def copy(self, source: int, dest: int) -> None:
        """Copy one block's bytes onto another's."""
        view, size = self.view(), self.block_nbytes
        view[dest * size : (dest + 1) * size] = view[source * size : (source + 1) * size]

    def close(self) -> None:
        """Unlink the file and give the memory back."""
        self._memory.close()

    def touch_ahead(self, ahead: int, limit: int) -> int:
        """Map the memory of blocks that will be handed out next and were never used; the time for it is while idle.

        Args:
            ahead: how many of the next free blocks to look at.
            limit: most blocks to touch now; one of 400 KB takes about a tenth of a millisecond.

        Returns:
            How many were touched; 0: the next ones are all there.
        """
        found = [block for block in islice(self._free, ahead) if not self._touched[block]][:limit]
        for block in found:
            self._memory.touch(block * self.block_nbytes, self.block_nbytes)
            self._touched[block] = 1
        return len(found)

    # --- allocation --------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now; cached ones are evicted for it."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses but whose content is known."""
        return len(self._cached)

    @property
    def num_quarantined(self) -> int:
        """Blocks that wait for a writer's confirmation."""
        return self._num_quarantined

    @property
    def in_use(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free) - len(self._cached) - self._num_quarantined

    def can_allocate(self, n: int) -> bool:
        """Whether `allocate(n)` would succeed."""
        return n <= len(self._free) + len(self._cached)

    def allocate(self, n: int) -> list[int]:
        """Hand out `n` blocks with one reference each; their generation rises.

        Raises:
            PoolFull: if fewer can be had; nothing has changed then.
        """
        if n > self.num_free:
            raise PoolFull(n, self.num_free)
        while len(self._free) < n:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self._free.append(block)
            self._counts["evicted"] += 1
        out = [self._free.popleft() for _ in range(n)]
        for block in out:
            self._refs[block] = 1
            self._generations[block] += 1
            self._touched[block] = 1
        self._counts["allocated"] += n
        return out

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks in use or cached."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]  # KeyError: a free block has nothing to share
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each; the last one makes a block cached (if its content is known) or free.

        Later blocks of the list become evictable first, so a chain loses its tail before its head.
        """
        for block in reversed(blocks):
            refs = self._refs[block]
            assert refs > 0, f"block {block} freed once too often"
            self._refs[block] = refs - 1
            if refs > 1:
                continue
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def num_reclaimable(self, blocks: Iterable[int]) -> int:
        """Count those that `free` would make available: the ones with a single reference."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 1)

    # --- references of other processes -------------------------------------------------------------

    def refs(self, blocks: Iterable[int]) -> list[BlockRef]:
        """Return references that another process may use, valid while `check` says so."""
        return [BlockRef(index=block, generation=self._generations[block]) for block in blocks]

    def check(self, refs: Iterable[BlockRef]) -> bool:
        """Whether all these blocks are still lent under these generations."""
        return all(self.is_lent(ref.index, ref.generation) for ref in refs)

    def is_lent(self, block: int, generation: int) -> bool:
        """Whether this block is still lent under this generation."""
        return 0 <= block < self.num_blocks and self._generations[block] == generation and self._refs[block] > 0

    def quarantine(self, blocks: Sequence[int], writer: str) -> None:
        """Turn the caller's reference into one that only `absolve(writer)` drops; their content is forgotten."""
        for block in blocks:
            assert self._refs[block] == 1, f"block {block} is shared and cannot be another's to write"
            self._forget(block)
        self._quarantine.setdefault(writer, []).extend(blocks)
        self._num_quarantined += len(blocks)
        self._counts["quarantined"] += len(blocks)

    def absolve(self, writer: str) -> int:
        """The writer is done or gone: free what it might have written; returns how many blocks."""
        blocks = self._quarantine.pop(writer, [])
        self._num_quarantined -= len(blocks)
        self.free(blocks)
        return len(blocks)

    @property
    def writers(self) -> list[str]:
        """Writers whose confirmation is outstanding."""
        return list(self._quarantine)

    # --- prefix cache ------------------------------------------------------------------------------

    def publish(self, block: int, digest: bytes, parent: bytes = b"") -> bool:
        """Make a block in use known by its hash; false if another block is known by it already.

        Args:
            parent: the hash before it, if known; for those who follow the cache.
        """
        assert self._refs[block] > 0, f"block {block} is not in use"
        if digest in self._block_of or self._hash_of[block] is not None:
            return False
        self._block_of[digest] = block
        self._hash_of[block] = digest
        self._counts["published"] += 1
        if self._events is not None:
            self._parents[digest] = parent
            self._events.record(Op.ADD, digest, parent)
        return True

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Forget what these blocks in use hold: their content is not to be trusted."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is not in use"
            self._forget(block)

    def block_of(self, digest: bytes) -> int | None:
        """Return the block known by this hash."""
        return self._block_of.get(digest)

    def peek(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return the length of the longest known prefix, and how many of its blocks nobody uses now."""
        length = idle = 0
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            length += 1
            idle += self._refs[block] == 0
        return length, idle

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix, with a reference each for the caller."""
        out = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            out.append(block)
        self.share(out)
        self._counts["matched"] += len(out)
        return out

    def _forget(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._hash_of[block] = None
            if self._events is not None:
                self._parents.pop(digest, None)
                self._events.record(Op.DROP, digest)

    # --- those who follow the cache ----------------------------------------------------------------

    def log_changes(self) -> None:
        """Number the changes of the prefix cache from now on; before it holds anything."""
        assert not self._block_of, "changes are numbered from the first on"
        self._events = EventLog(self._handle.epoch)

    @property
    def events(self) -> EventLog:
        """The numbered changes. The owner's thread records them; one other thread may collect."""
        assert self._events is not None, "changes are not logged"
        return self._events

    def dump(self) -> Dump:
        """Return all hashes that are known, from any thread.

        The number is read first and each change is recorded after it was made: changes beyond the number may be in the
        list already, and following them again changes nothing.
        """
        number = self.events.number
        hashes = tuple(self._block_of)  # one C call on keys that are bytes: no other thread comes in between
        return Dump(self.events.epoch, number, hashes, tuple(self._parents.get(h, b"") for h in hashes))

    # --- bookkeeping -------------------------------------------------------------------------------

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        return {
            "blocks_total": self.num_blocks,
            "blocks_free": len(self._free),
            "blocks_cached": len(self._cached),
            "blocks_in_use": self.in_use,
            "blocks_quarantined": self._num_quarantined,
            **{f"blocks_{name}_total": count for name, count in self._counts.items()},
        }

    def check_integrity(self) -> None:
        """Assert that the ledger balances."""
        quarantined = [b for blocks in self._quarantine.values() for b in blocks]
        free, cached = set(self._free), set(self._cached)
        used = {b for b in range(self.num_blocks) if self._refs[b] > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(set(quarantined)) == len(quarantined) == self._num_quarantined, "quarantine does not add up"
        assert set(quarantined) <= used, "a quarantined block has no reference"
        assert not free & cached and not free & used and not cached & used, "a block is in two states"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is in no state"
        assert all(self._hash_of[b] is not None for b in cached), "a cached block has no hash"
        assert all(self._hash_of[b] is None for b in free), "a free block has a hash"
        known = {digest: b for b, digest in enumerate(self._hash_of) if digest is not None}
        assert known == self._block_of, "hashes and blocks disagree"
        assert len(self._free) + len(self._cached) + self.in_use + self._num_quarantined == self.num_blocks
