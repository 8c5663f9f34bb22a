"""What one tier stores, as runs of consecutive blocks of a chain: so a long prefix is found by a few comparisons.

A hash names all blocks before it (`kvstore.block`). So if a run and a prompt agree in one block, they agree in every
block between there and where they met, and a run of up to 256 blocks costs one dictionary look-up and one comparison,
or a binary search where the two part. Nothing is assumed about what a tier evicts: a block that goes from the middle
of a run splits it, and joins the parts again when it comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

MAX_RUN = 256  # blocks: bounds what one drop may cost


class _Run:
    """Consecutive blocks of one chain, each the parent of the next, never empty; and the hash before the first."""

    __slots__ = ("before", "hashes")

    def __init__(self, hashes: list[bytes], before: bytes) -> None:
        self.hashes, self.before = hashes, before


class StoredRuns:
    """A bounded set of stored blocks that knows which follows which."""

    def __init__(self, capacity: int) -> None:
        """Start empty; beyond `capacity` blocks the oldest run loses its last one, which is only a missed hint."""
        self._capacity = capacity
        self._run_of: dict[bytes, _Run] = {}
        self._runs: OrderedDict[_Run, None] = OrderedDict()  # the oldest first
        self._after: dict[bytes, _Run] = {}  # by a block that is missing, a run that would go on with it
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._run_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._run_of

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._run_of)

    @property
    def num_runs(self) -> int:
        """How many runs there are: the fewer, the faster a prefix is found."""
        return len(self._runs)

    def add(self, digest: bytes, parent: bytes = b"") -> None:
        """A block is stored now; `parent` is the hash before it, empty if that is not known."""
        if digest in self._run_of:
            return
        run = self._run_of.get(parent) if parent else None
        if run is not None and run.hashes[-1] == parent and len(run.hashes) < MAX_RUN:
            run.hashes.append(digest)
        else:
            run = self._begin([digest], parent)
        self._run_of[digest] = run
        after = self._after.pop(digest, None)
        if after is not None and len(run.hashes) + len(after.hashes) <= MAX_RUN:
            self._join(run, after)
        while len(self._run_of) > self._capacity:
            self._forget()

    def drop(self, digest: bytes) -> bool:
        """A block is no longer stored; false if it was not known."""
        run = self._run_of.pop(digest, None)
        if run is None:
            return False
        if run.hashes[-1] == digest:
            run.hashes.pop()
        else:
            self._split(run, run.hashes.index(digest))
        if not run.hashes:
            self._remove(run)
        return True

    def prefix(self, hashes: Sequence[bytes], start: int = 0) -> int:
        """Return how many blocks from `hashes[start]` on are stored without a hole.

        Args:
            hashes: of consecutive blocks of one chain.
            start: where to begin in them.
        """
        position, total, run_of = start, len(hashes), self._run_of
        while position < total:
            run = run_of.get(hashes[position])
            if run is None:
                break
            known = run.hashes
            at = 0 if known[0] == hashes[position] else known.index(hashes[position])
            position += _agreement(known, at, hashes, position, min(len(known) - at, total - position))
        return position - start

    def check_integrity(self) -> None:
        """Assert that runs and the dictionary name the same blocks."""
        listed = {digest: run for run in self._runs for digest in run.hashes}
        assert listed == self._run_of, "a block is in another run than its own"
        assert sum(len(run.hashes) for run in self._runs) == len(listed), "a block is in two runs"
        assert all(0 < len(run.hashes) <= MAX_RUN for run in self._runs), "a run is empty or too long"
        for missing, run in self._after.items():
            assert missing not in listed and run in self._runs and run.before == missing, "a run follows what is there"

    def _begin(self, hashes: list[bytes], before: bytes) -> _Run:
        run = _Run(hashes, before)
        self._runs[run] = None
        if before and before not in self._run_of:
            self._after.setdefault(before, run)
        return run

    def _remove(self, run: _Run) -> None:
        del self._runs[run]
        if self._after.get(run.before) is run:
            del self._after[run.before]

    def _move(self, hashes: list[bytes], to: _Run) -> None:
        for digest in hashes:
            self._run_of[digest] = to

    def _split(self, run: _Run, at: int) -> None:
        """Take block `at`, not the last one, out of a run; the shorter part moves to a run of its own."""
        missing, head, tail = run.hashes[at], run.hashes[:at], run.hashes[at + 1 :]
        if len(tail) < len(head):
            run.hashes = head
            self._move(tail, self._begin(tail, missing))
            return
        if self._after.get(run.before) is run:
            del self._after[run.before]
        if head:
            self._move(head, self._begin(head, run.before))
        run.hashes, run.before = tail, missing
        self._after[missing] = run

    def _join(self, run: _Run, after: _Run) -> None:
        """Make one run of two, the second of which follows the first; the longer one stays."""
        if len(after.hashes) <= len(run.hashes):
            self._move(after.hashes, run)
            self._remove(after)
            run.hashes += after.hashes
            return
        self._move(run.hashes, after)
        self._remove(run)
        after.hashes[:0] = run.hashes
        after.before = run.before
        if run.before and run.before not in self._run_of:
            self._after.setdefault(run.before, after)

    def _forget(self) -> None:
        oldest = next(iter(self._runs))
        del self._run_of[oldest.hashes.pop()]
        if not oldest.hashes:
            self._remove(oldest)
        self.forgotten += 1


def _agreement(known: list[bytes], at: int, hashes: Sequence[bytes], position: int, length: int) -> int:
    """Return how many of `length` blocks are the same from `known[at]` and `hashes[position]`, which are, on."""
    if known[at + length - 1] == hashes[position + length - 1]:
        return length
    low, high = 1, length - 1  # the first `low` agree, more than `high` do not
    while low < high:
        middle = (low + high + 1) // 2
        if known[at + middle - 1] == hashes[position + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
