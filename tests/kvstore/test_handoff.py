"""Verified copies between pools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore.handoff as handoff
from kvstore.errors import LayoutMismatch, TransferAborted, TransferCorrupt
from kvstore.handoff import copy_blocks
from kvstore.pool import BlockPool
from schemas.messages import BlockRef

NBYTES, BLOCKS = 48, 12


def pair(directory: Path, **second: object) -> tuple[BlockPool, BlockPool]:
    """Two pools; the first holds a different byte in each block."""
    shape = {"num_blocks": BLOCKS, "block_nbytes": NBYTES, "layout": "l"} | second
    source = BlockPool.create(directory, "a", BLOCKS, NBYTES, "l", "e1", "h")
    dest = BlockPool.create(directory, "b", epoch="e2", host="h", **shape)  # type: ignore[arg-type]
    source.view()[:] = b"".join(bytes([b + 1]) * NBYTES for b in range(BLOCKS))
    return source, dest


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[tuple[BlockPool, BlockPool]]:
    """Two equal pools."""
    source, dest = pair(tmp_path)
    yield source, dest
    source.close()
    dest.close()


def refs(indices: list[int]) -> list[BlockRef]:
    """References to these blocks."""
    return [BlockRef(index=i, generation=1) for i in indices]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), longest=st.integers(1, 5))
def test_blocks_arrive_whole_and_nothing_else_changes(
    pools: tuple[BlockPool, BlockPool], monkeypatch: pytest.MonkeyPatch, data: st.DataObject, longest: int
) -> None:
    """Any choice of blocks in any order is copied exactly, with the checksums of the sources."""
    source, dest = pools
    monkeypatch.setattr(handoff, "MAX_COPY_NBYTES", longest * NBYTES)
    count = data.draw(st.integers(0, BLOCKS))
    start = data.draw(st.integers(0, BLOCKS - count))
    runs = st.permutations(range(BLOCKS)).map(lambda p: p[:count]) | st.just(list(range(start, start + count)))
    from_, to = data.draw(runs), data.draw(runs)
    dest.view()[:] = bytes(BLOCKS * NBYTES)

    sums = copy_blocks(source, refs(from_), dest, refs(to), should_stop=lambda: False)

    content = {t: bytes([f + 1]) * NBYTES for f, t in zip(from_, to, strict=True)}
    for block in range(BLOCKS):
        wanted = content.get(block, bytes(NBYTES))
        assert bytes(dest.view()[block * NBYTES : (block + 1) * NBYTES]) == wanted
    assert sums == [xxhash.xxh3_64_intdigest(bytes([f + 1]) * NBYTES) for f in from_]


def test_adjacent_blocks_go_in_one_piece(pools: tuple[BlockPool, BlockPool]) -> None:
    """`should_stop` is asked once per piece: two for two runs."""
    source, dest = pools
    asked: list[int] = []

    copy_blocks(
        source, refs([0, 1, 2, 7, 8]), dest, refs([3, 4, 5, 6, 7]), should_stop=lambda: bool(asked.append(1))
    )

    assert len(asked) == 2


def test_an_aborted_copy_writes_nothing_more(pools: tuple[BlockPool, BlockPool]) -> None:
    """After `should_stop` says so, no further block is touched."""
    source, dest = pools
    answers = iter([False, True])

    with pytest.raises(TransferAborted, match="after 1 of 2"):
        copy_blocks(source, refs([0, 5]), dest, refs([2, 9]), should_stop=lambda: next(answers))

    assert bytes(dest.view()[9 * NBYTES : 10 * NBYTES]) == bytes(NBYTES)


def test_a_copy_that_differs_is_found(
    pools: tuple[BlockPool, BlockPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A destination that does not keep what was written is an error that names the block."""
    source, dest = pools

    real, seen = handoff.checksum, []

    def damaging(block: memoryview) -> int:
        seen.append(1)
        if len(seen) == 4:  # two sources and the first copy went well
            block[3] ^= 1
        return real(block)

    monkeypatch.setattr(handoff, "checksum", damaging)

    with pytest.raises(TransferCorrupt, match="block 1"):
        copy_blocks(source, refs([0, 1]), dest, refs([4, 5]), should_stop=lambda: False)


@pytest.mark.parametrize("other", [{"layout": "x"}, {"block_nbytes": 24}])
def test_pools_of_another_shape_are_refused(tmp_path: Path, other: dict[str, object]) -> None:
    """Layout and block size must be equal."""
    source, dest = pair(tmp_path, **other)

    with pytest.raises(LayoutMismatch):
        copy_blocks(source, refs([0]), dest, refs([0]), should_stop=lambda: False)


def test_blocks_outside_a_pool_are_refused(pools: tuple[BlockPool, BlockPool]) -> None:
    """A wrong index or lists of two lengths raise before anything is written."""
    source, dest = pools
    for from_, to in (([BLOCKS], [0]), ([0], [BLOCKS]), ([-1], [0]), ([0, 1], [0])):
        with pytest.raises(ValueError):
            copy_blocks(source, refs(from_), dest, refs(to), should_stop=lambda: False)

    assert bytes(dest.view()) == bytes(BLOCKS * NBYTES)
