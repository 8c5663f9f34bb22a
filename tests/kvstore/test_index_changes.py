"""Changes as bytes: what is packed comes back, and what is no packing is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import chain_hashes, root_hash
from kvstore.changes import ADD_AFTER, ADD_NEXT, DROP, Change, pack, unpack
from kvstore.index import Op

HASHES = [bytes([i]) * 32 for i in range(5)]


@st.composite
def changes(draw: st.DrawFn) -> list[Change]:
    """Changes in any order, with parents and without."""
    out: list[Change] = []
    for _ in range(draw(st.integers(0, 12))):
        op, digest = draw(st.sampled_from(list(Op))), draw(st.sampled_from(HASHES))
        parent = draw(st.sampled_from([b"", *HASHES])) if op is Op.ADD else b""
        out.append((op, digest, parent))
    return out


@given(changes())
def test_what_is_packed_comes_back(wanted: list[Change]) -> None:
    """Whatever follows whatever."""
    packed = pack(wanted)

    assert unpack(packed.ops, packed.hashes, packed.parents) == wanted


def test_a_chain_names_its_root_alone() -> None:
    """A hundred blocks in a row take one parent."""
    root = root_hash("r")
    hashes = chain_hashes([1] * 1600, root=root)

    packed = pack((Op.ADD, digest, parent) for digest, parent in zip(hashes, [root, *hashes], strict=False))

    assert (len(packed.ops), len(packed.hashes), packed.parents) == (100, 3200, root)


@pytest.mark.parametrize(
    ("ops", "hashes", "parents"),
    [
        (b"\x01", b"", b""),
        (b"\x01", HASHES[0] + b"x", b""),
        (bytes([ADD_AFTER]), HASHES[0], b""),
        (bytes([DROP]), HASHES[0], HASHES[1]),
        (bytes([ADD_NEXT]), HASHES[0], b""),
        (b"\x04", HASHES[0], b""),
    ],
)
def test_what_is_no_packing_is_refused(ops: bytes, hashes: bytes, parents: bytes) -> None:
    """Lengths that do not fit, a first change that follows none, an unknown one."""
    with pytest.raises(ValueError, match=r"changes with|follows none|unknown"):
        unpack(ops, hashes, parents)
