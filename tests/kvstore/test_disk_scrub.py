"""Checking a disk tier offline: `headrace kv verify`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from disk_cases import NBYTES, STRIDE, blocks, make, segments, served

from headrace.commands.kv import verify
from kvstore.disk.scrub import NoDiskTier, scrub
from kvstore.errors import DiskBusy
from kvstore.record import HEADER_NBYTES


def damaged(directory: Path) -> None:
    """Leave a tier with every kind of damage: 3 chains of 4, of which 7 blocks are good."""
    tier = make(directory)
    for name in (1, 2, 3):
        tier.write(blocks(name, 4), 0.0)
    one, two, three = segments(tier)
    (tier.folder / "staging-000000000077-e9").write_bytes(b"half a reco")
    tier.close()
    data = bytearray(one.read_bytes())
    data[10] ^= 1
    data[STRIDE + HEADER_NBYTES + 5] ^= 1
    one.write_bytes(data)
    two.write_bytes(two.read_bytes()[: 3 * STRIDE - 1])
    three.write_bytes(three.read_bytes()[: 3 * STRIDE])


def test_a_sound_tier_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several layouts; the last line is one JSON object."""
    for layout in ("one", "two"):
        tier = make(tmp_path, layout=layout)
        tier.write(blocks(1, 3), 0.0)
        tier.close()

    assert verify(tmp_path, drop=False) == 0

    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["good"], said["bad"], said["segments"], said["layouts"]) == (6, 0, 2, 2)
    assert said["nbytes"] == 6 * NBYTES


def test_all_damage_is_counted_and_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Header, payload, a cut end, what a dead writer left."""
    damaged(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("s*-*-*")}

    assert verify(tmp_path, drop=False) == 1

    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    counts = [said[k] for k in ("good", "bad", "bad_headers", "bad_payloads", "cut", "leftovers", "dropped")]
    assert counts == [7, 3, 1, 1, 1, 1, 0]
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("s*-*-*")}


def test_what_is_bad_can_be_dropped(tmp_path: Path) -> None:
    """Then the check passes, and a tier finds all the good ones and nothing else."""
    damaged(tmp_path)

    assert verify(tmp_path, drop=True) == 1
    assert verify(tmp_path, drop=False) == 0

    tier = make(tmp_path, "e2")
    assert tier.statistics()["recovered_total"] == 7
    assert (tier.statistics()["dropped_total"], tier.statistics()["leftovers_total"]) == (0, 0)
    assert [served(tier, name, 4) for name in (1, 2, 3)] == [0, 2, 3]
    assert tier.write(blocks(1, 4), 0.0) == 2 and served(tier, 1, 4) == 4
    tier.check_integrity()


def test_a_segment_without_a_good_record_goes_as_a_whole(tmp_path: Path) -> None:
    """An empty one too."""
    tier = make(tmp_path)
    for name in (1, 2):
        tier.write(blocks(name, 2), 0.0)
    one, two = segments(tier)
    tier.close()
    one.write_bytes(b"\xff" * STRIDE)
    two.write_bytes(b"")

    assert scrub(tmp_path, drop=True).dropped == 2

    assert not one.exists() and not two.exists()


def test_a_tier_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says who has it."""
    tier = make(tmp_path, "busy")

    with pytest.raises(DiskBusy):
        scrub(tmp_path)
    assert verify(tmp_path, drop=True) == 2
    assert "busy" in capsys.readouterr().err
    tier.close()


def test_the_tiers_of_several_stores_in_one_directory_are_all_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is named, the counts are of all of them, and damage in one is found."""
    for name in ("kv-0", "kv-1"):
        tier = make(tmp_path / name)
        tier.write(blocks(1, 3), 0.0)
        tier.close()
    assert verify(tmp_path, drop=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("/")[0] for line in lines[:-1]] == ["kv-0", "kv-1"]
    assert json.loads(lines[-1])["good"] == 6

    (segment, *_) = sorted((tmp_path / "kv-1").glob("*/segment-*"))
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    assert verify(tmp_path, drop=False) == 1


def test_any_other_directory_is_refused(tmp_path: Path) -> None:
    """And nothing is made in it."""
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NoDiskTier):
            scrub(place, drop=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_says_so_by_its_exit_code(tmp_path: Path) -> None:
    """As a user runs it; also while another process owns the directory."""
    child = Path(__file__).resolve().parent / "disk_child.py"
    argv = [sys.executable, "-m", "headrace.cli", "kv", "verify", str(tmp_path)]

    def run(*options: str) -> tuple[int, str]:
        done = subprocess.run([*argv, *options], capture_output=True, text=True, timeout=60, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    owner = subprocess.Popen([sys.executable, str(child), "own", str(tmp_path), ""], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        code, said = run()
        assert code == 2 and "alive" in said
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)
        assert owner.stdout is not None
        owner.stdout.close()

    code, said = run()
    assert code == 0 and json.loads(said.splitlines()[-1])["good"] == 3
    segment = next(tmp_path.glob("*/segment-*"))
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    assert run()[0] == 1 and run("--drop")[0] == 1 and run()[0] == 0
