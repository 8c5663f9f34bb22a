"""A disk tier that is opened again: another format, names without files and files without names, and what it reads."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash
from disk_cases import NBYTES, PLENTY, STRIDE, blocks, chain, leftovers, make, segments, served

import kvstore.record
from kvstore.block import BLOCK_TOKENS, chain_hashes, root_hash
from kvstore.disk.files import Files
from kvstore.disk.tier import Block
from kvstore.handoff import checksum
from kvstore.record import HEADER_NBYTES

ROOT = root_hash("large")


def test_what_another_version_of_the_format_wrote_is_no_hit_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts, is left alone while there is room for it, and is read again by its own version."""
    with monkeypatch.context() as patched:
        patched.setattr(kvstore.record, "VERSION", kvstore.record.VERSION + 1)
        old = make(tmp_path)
        assert old.write(blocks(1, 4), 0.0) == 4
        old.close()

    now = make(tmp_path, "e2")
    assert now.folder != old.folder and now.statistics()["recovered_total"] == 0
    assert served(now, 1, 4) == 0
    assert now.statistics()["foreign_nbytes"] > 0
    assert now.write(blocks(1, 4), 0.0) == 4 and served(now, 1, 4) == 4
    now.close()

    with monkeypatch.context() as patched:
        patched.setattr(kvstore.record, "VERSION", kvstore.record.VERSION + 1)
        again = make(tmp_path, "e3")
        assert served(again, 1, 4) == 4
        again.close()
    small = make(tmp_path, "e4", max_nbytes=2 * 4096)
    assert small.write(blocks(2, 2), 0.0) == 2
    assert not segments(old) and served(small, 2, 2) == 2
    small.check_integrity()


@pytest.mark.parametrize("which", [[0, 1, 2, 3], [2]])
def test_a_sound_header_of_another_version_is_not_believed(which: list[int], tmp_path: Path) -> None:
    """In our own folder, its checksum right: the record goes at the start, and a good one comes in its place."""
    first = make(tmp_path)
    first.write(blocks(1, 4), 0.0)
    (segment,) = segments(first)
    first.close()
    data = bytearray(segment.read_bytes())
    for at in which:
        head = data[at * STRIDE : at * STRIDE + HEADER_NBYTES]
        struct.pack_into("<H", head, 8, kvstore.record.VERSION + 1)
        head[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head[:-8])))
        data[at * STRIDE : at * STRIDE + HEADER_NBYTES] = head
    segment.write_bytes(data)

    second = make(tmp_path, "e2")
    assert second.statistics()["dropped_total"] == len(which)
    assert second.statistics()["recovered_total"] == 4 - len(which)
    assert served(second, 1, 4) == which[0]
    assert second.write(blocks(1, 4), 0.0) == len(which) and served(second, 1, 4) == 4
    second.close()
    third = make(tmp_path, "e3")
    assert served(third, 1, 4) == 4
    third.check_integrity()


def test_a_file_that_is_gone_is_a_miss_and_the_rest_is_served(tmp_path: Path) -> None:
    """The index of a running tier names it still; that of the next one does not, and what it says it has it has."""
    first = make(tmp_path)
    for name in (1, 2):
        first.write(blocks(name, 3), 0.0)
    segments(first)[0].unlink()

    hashes, parents = chain(1, 3)
    assert first.peek(hashes, parents) == 3 and served(first, 1, 3) == 0
    first.probe(100.0)
    assert first.health.ok and served(first, 2, 3, 100.0) == 3
    assert first.write(blocks(1, 3), 100.0) == 3 and served(first, 1, 3, 100.0) == 3
    first.check_integrity()
    segments(first)[0].unlink()  # of the second chain
    first.close()

    second = make(tmp_path, "e2")
    assert second.statistics()["recovered_total"] == 3 == second.statistics()["records"]
    assert served(second, 1, 3) == 3 and served(second, 2, 3) == 0
    second.check_integrity()


def test_a_file_that_the_index_does_not_name_is_found_by_the_next_start(tmp_path: Path) -> None:
    """Put there from elsewhere while the tier runs: not served before its records were looked at."""
    elsewhere = make(tmp_path / "elsewhere", "e9")
    elsewhere.write(blocks(2, 3), 0.0)
    (segment,) = segments(elsewhere)
    elsewhere.close()
    tier = make(tmp_path / "here")
    tier.write(blocks(1, 3), 0.0)
    (tier.folder / segment.name.replace("000001", "000077")).write_bytes(segment.read_bytes())

    assert served(tier, 2, 3) == 0 and served(tier, 1, 3) == 3
    tier.close()

    again = make(tmp_path / "here", "e2")
    assert again.statistics()["recovered_total"] == 6
    assert served(again, 2, 3) == 3 and served(again, 1, 3) == 3 and not leftovers(again)
    again.write(blocks(3, 1), 0.0)
    assert len(segments(again)) == 3  # numbers go on behind those that were found
    again.check_integrity()


class CountingFiles(Files):
    """Real files that count what is read of them."""

    def __init__(self) -> None:
        self.nbytes = 0

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        got = super().read(fd, buffers, offset)
        self.nbytes += got
        return got


@pytest.mark.parametrize("block_nbytes", [NBYTES, 64 * NBYTES])
def test_a_start_reads_headers_and_no_payload(block_nbytes: int, tmp_path: Path) -> None:
    """However large the blocks are; a record of its own for the self-test aside."""
    hashes = chain_hashes(list(range(16 * BLOCK_TOKENS)), root=ROOT)
    parents = [ROOT, *hashes[:-1]]
    data = memoryview(bytes(range(256)) * (block_nbytes // 256))
    made = [Block(h, p, BLOCK_TOKENS, checksum(data), data) for h, p in zip(hashes, parents, strict=True)]
    first = make(tmp_path, block_nbytes=block_nbytes, max_nbytes=PLENTY * 4)
    assert first.write(made, 0.0) == len(made)
    first.close()

    files = CountingFiles()
    second = make(tmp_path, "e2", block_nbytes=block_nbytes, max_nbytes=PLENTY * 4, files=files)
    assert second.statistics()["recovered_total"] == len(made)
    assert files.nbytes == len(made) * HEADER_NBYTES + HEADER_NBYTES + block_nbytes
