"""Copying blocks from one pool to another, verified. The owners of both pools check generations, not this code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import xxhash

from kvstore.errors import LayoutMismatch, TransferAborted, TransferCorrupt
from schemas.messages import BlockRef

MAX_COPY_NBYTES = 4 << 20  # between two looks at `should_stop`; also how long the interpreter lock is kept


class Memory(Protocol):
    """A pool as this module sees it."""

    @property
    def layout(self) -> str: ...

    @property
    def block_nbytes(self) -> int: ...

    def view(self) -> memoryview: ...


def copy_blocks(
    src: Memory,
    src_refs: Sequence[BlockRef],
    dst: Memory,
    dst_refs: Sequence[BlockRef],
    *,
    should_stop: Callable[[], bool],
) -> list[int]:
    """Copy whole blocks, adjacent ones in one piece, and verify every copy.

    Returns:
        The xxh3_64 of each source block, in order.

    Raises:
        LayoutMismatch: if the pools differ in layout or block size.
        TransferAborted: if `should_stop` says so; nothing is written after that.
        TransferCorrupt: if a destination block does not equal its source.
        ValueError: if the lists differ in length or an index is outside its pool.
    """
    if src.layout != dst.layout or src.block_nbytes != dst.block_nbytes:
        raise LayoutMismatch(f"{src.layout}/{src.block_nbytes}", f"{dst.layout}/{dst.block_nbytes}")
    if len(src_refs) != len(dst_refs):
        raise ValueError(f"{len(src_refs)} source blocks, {len(dst_refs)} destination blocks")
    size, source, dest = src.block_nbytes, src.view(), dst.view()
    for view, refs in ((source, src_refs), (dest, dst_refs)):
        if any(ref.index < 0 or (ref.index + 1) * size > len(view) for ref in refs):
            raise ValueError("a block index is outside its pool")
    checksums: list[int] = []
    for first, count in _runs(src_refs, dst_refs, max(1, MAX_COPY_NBYTES // size)):
        if should_stop():
            raise TransferAborted(first, len(src_refs))
        from_, to = src_refs[first].index * size, dst_refs[first].index * size
        sums = [checksum(source[from_ + i * size : from_ + (i + 1) * size]) for i in range(count)]
        dest[to : to + count * size] = source[from_ : from_ + count * size]
        for i, expected in enumerate(sums):
            found = checksum(dest[to + i * size : to + (i + 1) * size])
            if found != expected:
                raise TransferCorrupt(first + i, expected, found)
        checksums += sums
    return checksums


def checksum(block: memoryview) -> int:
    """Return the xxh3_64 of a block's bytes."""
    return xxhash.xxh3_64_intdigest(block)


def _runs(src: Sequence[BlockRef], dst: Sequence[BlockRef], longest: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the pieces that are adjacent in both pools."""
    first = 0
    for i in range(1, len(src) + 1):
        adjacent = (
            i < len(src)
            and i - first < longest
            and src[i].index == src[i - 1].index + 1
            and dst[i].index == dst[i - 1].index + 1
        )
        if not adjacent:
            yield first, i - first
            first = i
