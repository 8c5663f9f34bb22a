"""The hash chain of blocks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import BLOCK_TOKENS, chain_hashes, num_blocks_for, root_hash

field = st.one_of(st.none(), st.text(max_size=4), st.binary(max_size=4), st.integers(0, 300))


@given(st.lists(field, max_size=4), st.lists(field, max_size=4))
def test_different_fields_never_give_the_same_root(one: list[object], two: list[object]) -> None:
    """Two lists of fields share a root only if they are equal, types included."""
    same = [(type(f), f) for f in one] == [(type(f), f) for f in two]

    assert (root_hash(*one) == root_hash(*two)) is same  # type: ignore[arg-type]


def test_fields_do_not_run_together_and_absent_is_not_empty() -> None:
    """Shifting a character between neighbours, or moving a name to another field, changes the root."""
    variants = [("ab", "c"), ("a", "bc"), ("abc", ""), ("abc", None), (None, "abc"), ("abc",), ("", "abc"), ()]

    roots = [root_hash(*fields) for fields in variants]

    assert all(a != b for a, b in itertools.combinations(roots, 2))
    assert {len(root) for root in roots} == {32}


def test_the_chain_is_fixed() -> None:
    """Stored blocks outlive a process, so the chain's bytes are pinned."""
    hashes = chain_hashes(list(range(40)), root=root_hash(1, "model", b"\x00", None))

    assert [h.hex()[:16] for h in hashes] == GOLDEN


GOLDEN = ["de948004c44d8d31", "b00fec17a360cb9e"]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.integers(0, 5))
def test_a_chain_continued_equals_a_chain_in_one_piece(ids: list[int], blocks: int) -> None:
    """Hashing in pieces gives the same hashes; only full blocks have one."""
    root = root_hash("r")
    cut = min(blocks, len(ids) // BLOCK_TOKENS) * BLOCK_TOKENS

    whole = chain_hashes(ids, root=root)
    head = chain_hashes(ids[:cut], root=root)
    tail = chain_hashes(ids[cut:], root=root, start=head[-1] if head else None)

    assert head + tail == whole and len(whole) == len(ids) // BLOCK_TOKENS


def test_a_hash_depends_on_everything_before_it() -> None:
    """Another root or another first id changes all hashes; another last id only the last."""
    ids = list(range(48))
    base = chain_hashes(ids, root=root_hash("a"))

    assert not set(base) & set(chain_hashes(ids, root=root_hash("b")))
    assert not set(base) & set(chain_hashes([7, *ids[1:]], root=root_hash("a")))
    assert chain_hashes([*ids[:-1], 7], root=root_hash("a"))[:2] == base[:2]


def test_blocks_are_counted_up() -> None:
    """A partial block is a block."""
    assert [num_blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
