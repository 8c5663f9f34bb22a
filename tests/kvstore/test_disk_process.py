"""The disk tier across real processes: killed at each step of a write, a full file system, an owner that lives."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_cases import LAYOUT, NBYTES, PLENTY, STRIDE, blocks, leftovers, make, segments, served

from kvstore.disk.tier import DiskTier
from kvstore.errors import DiskBusy

pytestmark = pytest.mark.slow

CHILD = Path(__file__).resolve().parent / "disk_child.py"
# step:occurrence, and how many blocks of the write in progress are there afterwards
STEPS = [
    ("created", 0),
    ("record:1", 0),
    ("record:2", 0),
    ("record:3", 0),
    ("written", 0),
    ("renamed", 3),
    ("inserted", 3),
]


def child(what: str, directory: Path, value: str = "") -> subprocess.CompletedProcess[str]:
    """Run a process to its end."""
    argv = [sys.executable, str(CHILD), what, str(directory), value]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("step", "kept"), STEPS)
def test_a_process_killed_in_a_write_leaves_all_of_it_or_nothing(tmp_path: Path, step: str, kept: int) -> None:
    """What was stored before is served, leftovers are removed, and the next owner writes as if nothing had been."""
    died = child("kill", tmp_path, step)
    assert died.returncode == -signal.SIGKILL, died.stderr

    tier = make(tmp_path, "next")

    assert served(tier, 1, 3) == 3 and served(tier, 2, 3) == kept
    assert leftovers(tier) == [] and len(segments(tier)) == (2 if kept else 1)
    assert tier.statistics()["leftovers_total"] == (0 if kept else 1)
    tier.check_integrity()
    assert tier.write(blocks(2, 3), 0.0) == 3 - kept and served(tier, 2, 3) == 3
    tier.check_integrity()


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    """The write stops in the middle of a record: nothing of it stays, and it succeeds once the limit is gone."""
    done = child("limit", tmp_path, str(STRIDE * 4 + 100))
    assert done.returncode == 0, done.stderr

    first, second, code, files, healed, third, came = json.loads(done.stdout)

    assert (first, second, third, came) == (3, 0, 8, 8) and healed
    assert code == errno.EFBIG and files == 0  # the first segment has given way


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; skipped where none can be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_file_system_is_a_miss_and_then_recovers(small_disk: Path) -> None:
    """The cap is above what the disk holds, and something else fills it: no exception, no wrong byte, no leftover."""
    tier = make(small_disk, max_nbytes=PLENTY)
    stored = 0
    now = 0.0
    for name in range(1, 40):
        stored += tier.write(blocks(name, 20), now)
        now += 100.0
        tier.probe(now)
        tier.check_integrity()
        assert leftovers(tier) == []
        assert all(served(tier, other, 20) in (0, 20) for other in range(1, name + 1))

    assert tier.statistics()["failed_writes_total"] > 0 and tier.statistics()["evicted_total"] > 0
    assert stored * STRIDE > 256 * 1024  # more than fits at once: old blocks gave way to new ones

    hog = small_disk / "hog"
    try:
        hog.write_bytes(bytes(1 << 20))
    except OSError as exc:
        assert exc.errno == errno.ENOSPC
    assert tier.write(blocks(90, 20), now) == 0 and tier.statistics()["errno"] == errno.ENOSPC
    hog.unlink()
    assert tier.probe(now + 100.0) and tier.write(blocks(90, 20), now + 100.0) == 20
    assert served(tier, 90, 20) == 20
    tier.check_integrity()
    tier.close()


def test_a_read_only_file_system_keeps_the_tier_off(small_disk: Path) -> None:
    """As after an error of the device: no exception, a reason, and all is back once it can be written again."""
    tier = make(small_disk)
    tier.write(blocks(1, 4), 0.0)
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        tier = make(small_disk)
        assert tier.statistics()["errno"] == errno.EROFS and tier.write(blocks(2, 4), 0.0) == 0
        assert served(tier, 1, 4) == 0 and not tier.probe(1.0)
        tier.check_integrity()
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)

    assert tier.probe(100.0) and served(tier, 1, 4) == 4
    assert tier.write(blocks(2, 4), 100.0) == 4 and served(tier, 2, 4) == 4
    tier.check_integrity()
    tier.close()


def test_an_owner_in_another_process_is_respected_until_it_dies(tmp_path: Path) -> None:
    """The lock ends with the process, however that ends."""
    argv = [sys.executable, str(CHILD), "own", str(tmp_path), ""]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        tier = DiskTier(tmp_path, layout=LAYOUT, block_nbytes=NBYTES, epoch="e2", max_nbytes=PLENTY)
        with pytest.raises(DiskBusy, match="epoch alive"):
            tier.open(0.0)
        assert not tier.probe(1.0)
    finally:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()

    assert tier.probe(100.0) and served(tier, 1, 3) == 3
    tier.check_integrity()
