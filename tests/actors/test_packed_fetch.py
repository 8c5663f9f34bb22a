"""Packed blocks of another host: they travel as they are stored, and are unpacked where they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from actors import transfer_peers
from kernels.kv_format import Shape, group_of, plain
from kvstore.errors import KvError, LayoutMismatch, TransferAborted
from kvstore.formats import stored_form
from kvstore.handoff import Memory, copy_blocks
from kvstore.pool import BlockPool
from kvstore.transport.base import Wanted, check
from schemas import messages as m
from schemas.record import Fence
from schemas.subjects import Ref

SHAPE = Shape("block", 2, 1, 32, "int8")
LAYOUT = "block,2,2,16,1,32,bfloat16,int8"
COUNT = 10


class NearPeer:
    """Another host whose store is a pool of this test: it delivers what the real ways deliver, and remembers sizes."""

    def __init__(self, store: BlockPool, fails_after: int = 99) -> None:
        self.store = store
        self.asked: list[int] = []
        self._left = fails_after

    def fetch(
        self,
        wanted: Wanted,
        into: Memory,
        refs: Sequence[m.BlockRef],
        *,
        should_stop: Callable[[], bool],
        deadline: float,
    ) -> list[int]:
        check(wanted, into, refs)
        self._left -= 1
        if self._left < 0:
            raise TransferAborted(0, len(refs))
        self.asked.append(len(wanted.expected))
        return copy_blocks(self.store, wanted.blocks, into, refs, should_stop=should_stop)

    def close(self) -> None:
        pass


def rounded() -> bytes:
    """Blocks as an engine that rounds writes them; in this order a token's elements lie together."""
    x = np.random.default_rng(1).standard_normal((COUNT, SHAPE.groups, group_of(32))).astype(np.float32)
    values = plain.round_groups(x.reshape(COUNT, -1), 32, "int8")
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def job(store: BlockPool, dest: BlockPool, expected: list[int]) -> m.TransferJob:
    """All blocks of the store into all of an engine, the other way round."""
    ref = Ref("decode", "a", "0" * 16)
    return m.TransferJob(
        request_id="r", fence=Fence(1, "o", 1), job="j", part=0, source=ref, dest=ref, source_pool=store.handle(),
        dest_pool=dest.handle(), source_blocks=store.refs(range(COUNT)),
        dest_blocks=dest.refs(reversed(range(COUNT))), expected=expected,
    )  # fmt: skip


def test_blocks_travel_packed_and_arrive_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few at a time, each part with its own checksums; a part that fails fails the whole."""
    monkeypatch.setattr(transfer_peers, "PACKED_AT_ONCE", 4)
    layout, nbytes = stored_form(LAYOUT, SHAPE.block_nbytes)
    engine = BlockPool.create(tmp_path, "a", COUNT, SHAPE.block_nbytes, LAYOUT, "e1", "h")
    store = BlockPool.create(tmp_path, "s", COUNT, nbytes, layout, "e2", "h")
    dest = BlockPool.create(tmp_path, "b", COUNT, SHAPE.block_nbytes, LAYOUT, "e3", "h")
    engine.view()[:] = rounded()
    sums = copy_blocks(engine, engine.refs(range(COUNT)), store, store.refs(range(COUNT)), should_stop=lambda: False)
    peer = NearPeer(store)

    got = transfer_peers._fetch(peer, job(store, dest, sums), lambda: False, 1.0)

    assert got == sums and peer.asked == [4, 4, 2]
    size = SHAPE.block_nbytes
    for block in range(COUNT):
        other = COUNT - 1 - block
        assert dest.view()[other * size : (other + 1) * size] == engine.view()[block * size : (block + 1) * size]
    with pytest.raises(KvError):
        transfer_peers._fetch(NearPeer(store, fails_after=2), job(store, dest, sums), lambda: False, 1.0)
    for pool in (engine, store, dest):
        pool.close()


def test_other_formats_are_refused(tmp_path: Path) -> None:
    """Packed blocks for an engine that does not round."""
    layout, nbytes = stored_form(LAYOUT, SHAPE.block_nbytes)
    store = BlockPool.create(tmp_path, "s", COUNT, nbytes, layout, "e2", "h")
    raw = BlockPool.create(tmp_path, "b", COUNT, SHAPE.block_nbytes, LAYOUT.removesuffix(",int8"), "e3", "h")

    with pytest.raises(LayoutMismatch):
        transfer_peers._fetch(NearPeer(store), job(store, raw, []), lambda: False, 1.0)
    store.close()
    raw.close()
