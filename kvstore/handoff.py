"""Copying blocks from one pool to another, verified. The owners of both pools check generations, not this code.

Between an engine that rounds its keys and values and a store, blocks are packed and unpacked on the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import xxhash

from kvstore.errors import LayoutMismatch, NotPackable, TransferAborted, TransferCorrupt
from kvstore.formats import Packing, packing_for, stored_form
from schemas.messages import BlockRef

MAX_COPY_NBYTES = 4 << 20  # between two looks at `should_stop`; also how long the interpreter lock is kept


class Memory(Protocol):
    """A pool as this module sees it."""

    @property
    def layout(self) -> str: ...

    @property
    def block_nbytes(self) -> int: ...

    def view(self) -> memoryview: ...


class PrivateMemory:
    """A few blocks of this process's own, between a store's form of them and an engine's."""

    def __init__(self, layout: str, block_nbytes: int, num_blocks: int) -> None:
        self.layout = layout
        self.block_nbytes = block_nbytes
        self._bytes = bytearray(block_nbytes * num_blocks)

    def view(self) -> memoryview:
        """Return the writable bytes of all blocks."""
        return memoryview(self._bytes)

    def refs(self, count: int) -> list[BlockRef]:
        """Return references to the first so many."""
        return [BlockRef(index=i, generation=0) for i in range(count)]


def copy_blocks(
    src: Memory,
    src_refs: Sequence[BlockRef],
    dst: Memory,
    dst_refs: Sequence[BlockRef],
    *,
    should_stop: Callable[[], bool],
) -> list[int]:
    """Copy whole blocks, adjacent ones in one piece, and verify every copy; into and out of a store's form if need be.

    Returns:
        The xxh3_64 of each block, in order: of its bytes in the store where one side is packed, else of the source's.

    Raises:
        LayoutMismatch: if the pools differ in layout or block size, and neither is the packed form of the other.
        NotPackable: if a packed block does not give back exactly the other side's block.
        TransferAborted: if `should_stop` says so; nothing is written after that.
        TransferCorrupt: if a destination block does not equal its source.
        ValueError: if the lists differ in length or an index is outside its pool.
    """
    copy = _way(src, dst)
    if len(src_refs) != len(dst_refs):
        raise ValueError(f"{len(src_refs)} source blocks, {len(dst_refs)} destination blocks")
    source, dest = src.view(), dst.view()
    from_, to = src.block_nbytes, dst.block_nbytes
    for view, refs, size in ((source, src_refs, from_), (dest, dst_refs, to)):
        if any(ref.index < 0 or (ref.index + 1) * size > len(view) for ref in refs):
            raise ValueError("a block index is outside its pool")
    checksums: list[int] = []
    for first, count in _runs(src_refs, dst_refs, max(1, MAX_COPY_NBYTES // max(from_, to))):
        if should_stop():
            raise TransferAborted(first, len(src_refs))
        one, other = src_refs[first].index, dst_refs[first].index
        checksums += copy(source[one * from_ : (one + count) * from_], dest[other * to : (other + count) * to], first)
    return checksums


Copy = Callable[[memoryview, memoryview, int], list[int]]
"""Copies blocks that lie together, of which the first is this one of the job; returns their checksums."""


def _way(src: Memory, dst: Memory) -> Copy:
    ours, theirs = (src.layout, src.block_nbytes), (dst.layout, dst.block_nbytes)
    if ours == theirs:
        return functools.partial(_plain, src.block_nbytes)
    for engine, stored, way in ((src, theirs, _pack), (dst, ours, _unpack)):
        packing = packing_for(engine.layout)
        if packing is not None and stored == stored_form(engine.layout, engine.block_nbytes):
            return functools.partial(way, packing)
    raise LayoutMismatch(f"{src.layout}/{src.block_nbytes}", f"{dst.layout}/{dst.block_nbytes}")


def _plain(size: int, source: memoryview, dest: memoryview, first: int) -> list[int]:
    sums = _checksums(source, size)
    dest[:] = source
    for i, expected in enumerate(sums):
        found = checksum(dest[i * size : (i + 1) * size])
        if found != expected:
            raise TransferCorrupt(first + i, expected, found)
    return sums


def _pack(packing: Packing, source: memoryview, dest: memoryview, first: int) -> list[int]:
    packing.pack(source, dest)
    # The bytes first: what is compared after that is what the checksums are of, or has changed and is found out later.
    sums = _checksums(dest, packing.shape.packed_nbytes)
    wrong = packing.first_unequal(source, dest)
    if wrong is not None:
        raise NotPackable(first + wrong, packing.shape.format)
    return sums


def _unpack(packing: Packing, source: memoryview, dest: memoryview, first: int) -> list[int]:
    # A copy of our own: the lease on the source may lapse, and checksum and blocks must be of the same bytes.
    own = memoryview(bytes(source))
    sums = _checksums(own, packing.shape.packed_nbytes)
    packing.unpack(own, dest)
    wrong = packing.first_unequal(dest, own)
    if wrong is not None:
        raise NotPackable(first + wrong, packing.shape.format)
    return sums


def _checksums(blocks: memoryview, size: int) -> list[int]:
    return [checksum(blocks[at : at + size]) for at in range(0, len(blocks), size)]


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
