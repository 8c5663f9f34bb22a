"""Ways of reading blocks: all bring the same bytes, and wrong ones are seen."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from bench import kv_reads
from bench.kv_reads import Work, measure
from bench.uring import Ring, refusal
from kvstore.disk.files import PAGE


@pytest.mark.slow
def test_all_ways_are_measured_in_both_orders(tmp_path: Path) -> None:
    """Each compares what it has read with what was written."""
    rows = measure(tmp_path, 4 * PAGE, 64 * PAGE, 1, uring=not refusal())

    assert {row["order"] for row in rows} == {"adjacent", "random"}
    assert all(row["mb_per_s"] > 0 for row in rows) and list(tmp_path.iterdir()) == []


def test_a_way_that_reads_too_little_has_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is poisoned before each turn."""

    def lazily(work: Work) -> None:
        for read in work.reads[:-1]:
            work.view(read)[:] = work.paths[read.file].read_bytes()[read.offset :][: work.nbytes]

    monkeypatch.setattr(kv_reads, "ways", lambda uring, direct: {"lazy": lazily})

    with pytest.raises(AssertionError, match="lazy"):
        measure(tmp_path, PAGE, 8 * PAGE, 1, uring=False)


@pytest.mark.skipif(refusal() != 0, reason="the system permits no io_uring")
def test_a_ring_tells_of_a_short_read(tmp_path: Path) -> None:
    """Behind the end of a file nothing comes."""
    path, memory = tmp_path / "file", ctypes.create_string_buffer(PAGE)
    path.write_bytes(b"x" * 100)
    ring = Ring(2)
    with path.open("rb") as file, pytest.raises(OSError, match="gave 100"):
        ring.read([(file.fileno(), 0, ctypes.addressof(memory), PAGE)], 2)
    ring.close()
