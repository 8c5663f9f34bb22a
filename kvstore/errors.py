"""What can go wrong with blocks. None of it reaches a client: callers recompute, wait or refuse.

KvError
├── PoolFull           no block can be had now
├── PoolGone           another process's pool is not there (any more), or is not the one that the handle names
├── LayoutMismatch     two pools whose blocks cannot be copied into one another
├── TransferAborted    a copy was told to stop
├── TransferCorrupt    a copy does not equal its source
├── PeerFailed         another host did not deliver
├── NotPackable        a block holds what the format of the store cannot give back
├── BadRecord          bytes on a disk are no sound record
├── PinRefused         pins hold as much as they may
└── DiskBusy           a directory of records has an owner already
"""

from __future__ import annotations

from collections.abc import Sequence


class KvError(Exception):
    """Root of the errors about blocks.

    `arrived` is of a fetch that failed on its way: for each block its checksum if it lies verified in the destination
    all the same, 0 if not; empty if none does.
    """

    arrived: Sequence[int] = ()


class PoolFull(KvError):
    """Raised when more blocks are wanted than can be had."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {available} available")
        self.wanted = wanted
        self.available = available


class PoolGone(KvError):
    """Raised when the pool behind a handle is not there, or is another one."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"pool {path}: {reason}")
        self.path = path
        self.reason = reason


class PinRefused(KvError):
    """Raised when a prefix cannot be pinned: `code` says by which bound, `limit` how many pins or blocks that is."""

    def __init__(self, code: str, reason: str, limit: int) -> None:
        super().__init__(f"{reason}: at most {limit}")
        self.code = code
        self.limit = limit


class LayoutMismatch(KvError):
    """Raised when two pools differ in layout or block size."""

    def __init__(self, source: str, dest: str) -> None:
        super().__init__(f"blocks of {source} do not fit a pool of {dest}")
        self.source = source
        self.dest = dest


class TransferAborted(KvError):
    """Raised when a copy stopped because it was told to."""

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f"stopped after {done} of {total} blocks")
        self.done = done
        self.total = total


class TransferCorrupt(KvError):
    """Raised when a copied block does not equal its source."""

    def __init__(self, index: int, expected: int, found: int) -> None:
        super().__init__(f"block {index}: checksum {found:016x}, expected {expected:016x}")
        self.index = index
        self.expected = expected
        self.found = found


class PeerFailed(KvError):
    """Raised when another host does not deliver what it was asked for; `why` is one word for a metric."""

    def __init__(self, address: str, why: str, detail: str = "") -> None:
        super().__init__(f"{address}: {why}{f', {detail}' if detail else ''}")
        self.address = address
        self.why = why


class NotPackable(KvError):
    """Raised when a block and its packed form do not say the same: it was not rounded, or one of them was changed."""

    def __init__(self, index: int, layout: str) -> None:
        super().__init__(f"block {index} is not what {layout} can hold")
        self.index = index
        self.layout = layout


class BadRecord(KvError):
    """Raised when bytes on a disk are no record, or a damaged one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DiskBusy(KvError):
    """Raised when another owner holds the lock of a directory of records."""

    def __init__(self, directory: str, owner: str) -> None:
        super().__init__(f"{directory} belongs to {owner or 'another process'}")
        self.directory = directory
        self.owner = owner
