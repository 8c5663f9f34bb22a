"""Blocks of engines that round their keys and values: packed on the way into the store, unpacked on the way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernels import native
from kernels.kv_format import Shape, group_of, plain
from kvstore.block import BLOCK_TOKENS, chain_hashes, root_hash
from kvstore.disk.tier import Block, DiskTier
from kvstore.errors import LayoutMismatch, NotPackable
from kvstore.formats import Packing, packing_for, shape_of, stored_form
from kvstore.handoff import checksum, copy_blocks
from kvstore.pool import BlockPool
from kvstore.tiers import HostTier

RAW = "native-1,2,16,2,32,bfloat16"
COUNT = 6


def layout_of(shape: Shape) -> str:
    """Return the layout of an engine."""
    if shape.order == "block":
        return f"block,{shape.layers},2,16,{shape.kv_heads},{shape.head_dim},bfloat16,{shape.format}"
    return f"native-1,{shape.layers},16,{shape.kv_heads},{shape.head_dim},bfloat16,{shape.format}"


def rounded(shape: Shape, count: int, seed: int = 0) -> bytes:
    """Return blocks as an engine that rounds writes them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, shape.groups, group_of(shape.head_dim))).astype(np.float32)
    values = plain.round_groups(x.reshape(count, -1), shape.head_dim, shape.format)
    places, _ = plain._places(shape)
    flat = np.empty((count, shape.elements), np.float32)
    flat[:, places.reshape(-1)] = values
    return (flat.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.fixture(params=[("native-1", "int8"), ("native-1", "fp8"), ("block", "int8"), ("block", "fp8")], ids="-".join)
def shape(request: pytest.FixtureRequest) -> Shape:
    """Small blocks in both orders and formats."""
    order, form = request.param
    return Shape(order, 2, 2, 32, form)


@pytest.fixture
def engine(shape: Shape, tmp_path: Path) -> Iterator[BlockPool]:
    """A pool full of rounded blocks."""
    pool = BlockPool.create(tmp_path, "engine", COUNT, shape.block_nbytes, layout_of(shape), "e1", "h")
    pool.view()[:] = rounded(shape, COUNT)
    yield pool
    pool.close()


@pytest.fixture
def store(shape: Shape, tmp_path: Path) -> Iterator[BlockPool]:
    """The pool that a host tier makes for such an engine."""
    layout, nbytes = stored_form(layout_of(shape), shape.block_nbytes)
    pool = BlockPool.create(tmp_path, "store", COUNT, nbytes, layout, "s1", "h")
    pool.view()[:] = b"\xee" * len(pool.view())
    yield pool
    pool.close()


def test_the_layout_says_how_blocks_are_kept(shape: Shape) -> None:
    """Packed for engines that round, under a layout of their own; as they are for all others."""
    layout = layout_of(shape)

    assert shape_of(layout) == shape
    assert stored_form(layout, shape.block_nbytes) == (f"packed-1/{layout}", shape.packed_nbytes)
    assert shape.packed_nbytes / shape.block_nbytes == pytest.approx(33 / 64)
    for other in (RAW, "scripted-1", "rows-1", "", "int8", "block,2,2,16,2,32,float32,int8", f"packed-1/{layout}"):
        assert stored_form(other, 4096) == (other, 4096)
    # A layout that lies about its size, or has one that cannot be packed, is kept as it is.
    assert stored_form(layout, shape.block_nbytes + 2)[0] == layout
    assert shape_of("native-1,2,16,2,40,bfloat16,int8") is None and shape_of("native-1,x,16,2,32,bfloat16,int8") is None


def test_blocks_come_back_bit_by_bit(shape: Shape, engine: BlockPool, store: BlockPool, tmp_path: Path) -> None:
    """Scattered there and back into another engine's pool; the checksums are those of the bytes in the store."""
    there, back = [4, 5, 0, 2], [1, 3, 4, 0]
    other = BlockPool.create(tmp_path, "other", COUNT, engine.block_nbytes, engine.layout, "e2", "h")
    rows = engine.refs(range(COUNT)), store.refs(range(COUNT)), other.refs(range(COUNT))

    sums = copy_blocks(
        engine, [rows[0][i] for i in there], store, [rows[1][i] for i in back], should_stop=lambda: False
    )
    again = copy_blocks(
        store, [rows[1][i] for i in back], other, [rows[2][i] for i in there], should_stop=lambda: False
    )

    size, packed = engine.block_nbytes, store.block_nbytes
    for i in there:
        assert other.view()[i * size : (i + 1) * size] == engine.view()[i * size : (i + 1) * size]
    assert sums == again == [checksum(store.view()[i * packed : (i + 1) * packed]) for i in back]
    untouched = set(range(COUNT)) - set(back)
    assert all(store.view()[i * packed : (i + 1) * packed] == b"\xee" * packed for i in untouched)
    other.close()


def test_a_block_that_was_not_rounded_is_not_stored(engine: BlockPool, store: BlockPool) -> None:
    """It could not be given back: the copy fails, and names the block."""
    view = engine.view()
    view[2 * engine.block_nbytes + 10] ^= 1

    with pytest.raises(NotPackable, match="block 2 "):
        copy_blocks(engine, engine.refs(range(4)), store, store.refs(range(4)), should_stop=lambda: False)


def test_a_wrong_bit_in_the_store_shows_in_the_checksums(engine: BlockPool, store: BlockPool) -> None:
    """As with raw blocks, whoever knows what was stored sees that this is something else."""
    refs = engine.refs(range(2)), store.refs(range(2))
    stored = copy_blocks(engine, refs[0], store, refs[1], should_stop=lambda: False)
    store.view()[store.block_nbytes - 1] ^= 4

    found = copy_blocks(store, refs[1], engine, refs[0], should_stop=lambda: False)

    assert found[0] != stored[0] and found[1] == stored[1]


def test_formats_never_meet(shape: Shape, engine: BlockPool, store: BlockPool, tmp_path: Path) -> None:
    """An engine that does not round, or rounds otherwise, gets no block of this store, nor this store one of theirs."""
    another = layout_of(replace(shape, format="fp8" if shape.format == "int8" else "int8"))
    raw = layout_of(shape).rpartition(",")[0]
    for number, layout in enumerate((another, raw)):
        pool = BlockPool.create(tmp_path, f"o{number}", COUNT, engine.block_nbytes, layout, "o1", "h")
        for source, dest in ((pool, store), (store, pool), (pool, engine)):
            with pytest.raises(LayoutMismatch):
                copy_blocks(source, source.refs([0]), dest, dest.refs([0]), should_stop=lambda: False)
        pool.close()


def test_without_a_compiler_the_plain_code_does_the_same(
    shape: Shape, engine: BlockPool, store: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same bytes in the store, and the same back."""
    compiled = copy_blocks(engine, engine.refs(range(3)), store, store.refs(range(3)), should_stop=lambda: False)
    before = bytes(engine.view())
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr("kvstore.handoff.packing_for", lambda of: Packing(shape) if of == engine.layout else None)

    assert compiled == copy_blocks(
        engine, engine.refs(range(3)), store, store.refs(range(3)), should_stop=lambda: False
    )
    engine.view()[:] = bytes(len(engine.view()))
    copy_blocks(store, store.refs(range(3)), engine, engine.refs(range(3)), should_stop=lambda: False)
    assert bytes(engine.view())[: 3 * shape.block_nbytes] == before[: 3 * shape.block_nbytes]


def test_the_disk_keeps_packed_blocks_over_a_restart(
    shape: Shape, engine: BlockPool, store: BlockPool, tmp_path: Path
) -> None:
    """From the engine through host memory to disk, and after a restart of both tiers to the engine, bit by bit."""
    root = root_hash("test", engine.layout)
    hashes = chain_hashes(list(range(BLOCK_TOKENS * COUNT)), root=root)
    parents = [root, *hashes[:-1]]
    host = HostTier(store)
    staging = host.reserve("w", hashes, parents, 0.0, 10.0)
    sums = copy_blocks(engine, engine.refs(range(COUNT)), store, staging.refs, should_stop=lambda: False)
    assert host.commit("w", True, sums) == COUNT
    size = store.block_nbytes
    data = [store.view()[ref.index * size : (ref.index + 1) * size] for ref in staging.refs]
    written = [Block(h, p, BLOCK_TOKENS, s, d) for h, p, s, d in zip(hashes, parents, sums, data, strict=True)]
    disk = DiskTier(tmp_path / "disk", layout=store.layout, block_nbytes=size, epoch="e1", max_nbytes=1 << 20)
    disk.open(0.0)
    assert disk.write(written, 0.0) == COUNT
    disk.close()
    before = bytes(engine.view())

    engine.view()[:] = bytes(len(before))
    store.view()[:] = bytes(len(store.view()))
    again = DiskTier(tmp_path / "disk", layout=store.layout, block_nbytes=size, epoch="e2", max_nbytes=1 << 20)
    again.open(0.0)
    into = [store.view()[i * size : (i + 1) * size] for i in range(COUNT)]
    assert again.read(hashes, parents, into, 0.0) == sums
    copy_blocks(store, store.refs(range(COUNT)), engine, engine.refs(range(COUNT)), should_stop=lambda: False)
    assert bytes(engine.view()) == before
    again.close()

    # Raw blocks of the same sizes have a folder of their own.
    raw = DiskTier(tmp_path / "disk", layout=RAW, block_nbytes=size, epoch="e3", max_nbytes=1 << 20)
    raw.open(0.0)
    assert raw.peek(hashes, parents) == 0
    raw.close()


def test_an_engine_that_does_not_round_pays_nothing() -> None:
    """No packing, no compiled code, no numpy: nodes that only move raw blocks stay as small as they were."""
    assert packing_for(RAW) is None and packing_for("scripted-1") is None
