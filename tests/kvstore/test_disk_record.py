"""The bytes of a record's header."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import BadRecord
from kvstore.record import HEADER_NBYTES, RecordHeader, pack, shelf_of, unpack

HEADER = RecordHeader(
    hash=bytes(range(32)), parent=bytes(range(32, 64)), num_tokens=16, nbytes=4096, checksum=0x0123456789ABCDEF,
    shelf=shelf_of("rows-1", 4096), epoch="a0a1a2a3a4a5a6a7",
)  # fmt: skip


def test_a_header_comes_back_as_it_was() -> None:
    """Every field, at the edges of its range too."""
    for header in (HEADER, replace(HEADER, checksum=2**64 - 1, nbytes=2**40, epoch="", num_tokens=0)):
        assert unpack(pack(header)) == header
    assert len(pack(HEADER)) == HEADER_NBYTES


def test_the_format_on_disk_is_what_it_was() -> None:
    """What an older process has written stays readable, or is refused by its version."""
    head = pack(HEADER)

    assert head[:16].hex() == "48526b7652656300" + "0100" + "0001" + "10000000"
    assert head[32:48] == b"a0a1a2a3a4a5a6a7" and head[48:80] == HEADER.hash and head[80:112] == HEADER.parent
    assert head[112:128].hex() == "0010000000000000" + "efcdab8967452301"
    assert head[16:32].hex() == "e47e40ffa48ce6a0ef7ce93f4b5849ab" and not any(head[128:248])


def test_no_single_wrong_bit_passes() -> None:
    """Fields, padding and the checksum itself."""
    good = pack(HEADER)

    for bit in range(HEADER_NBYTES * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadRecord):
            unpack(bad)


def test_a_cut_header_is_none() -> None:
    """Of any length."""
    for length in range(HEADER_NBYTES):
        with pytest.raises(BadRecord):
            unpack(pack(HEADER)[:length])


def test_what_does_not_fit_is_refused() -> None:
    """Silently cutting a hash would make two blocks one."""
    for bad in (replace(HEADER, hash=b"x"), replace(HEADER, parent=b""), replace(HEADER, epoch="e" * 17)):
        with pytest.raises(ValueError):
            pack(bad)


def test_shelves_differ_by_layout_and_by_size() -> None:
    """Blocks of one shelf never go into a pool of another."""
    assert len({shelf_of("a", 1), shelf_of("a", 2), shelf_of("b", 1), shelf_of("a1", 1)}) == 4
