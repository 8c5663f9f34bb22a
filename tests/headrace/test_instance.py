"""State files: found while the process lives, and only by its owner."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.instance import InstanceState, NoInstance, find, process_start, remove_state, running, write_state


def state(name: str = "a", pid: int | None = None) -> InstanceState:
    mine = os.getpid()
    return InstanceState(
        instance=name, pid=pid or mine, started=process_start(mine), http_url="http://127.0.0.1:1",
        bus_url="nats://127.0.0.1:2", bus_token="secret", logs="/tmp", nodes=["edge"],
    )  # fmt: skip


def test_a_running_instance_is_found_by_its_name(tmp_path: Path) -> None:
    """What was written is what is read."""
    write_state(tmp_path, state())

    assert find(tmp_path, "a") == state()
    assert running(tmp_path) == [state()]


def test_the_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    """It holds the bus token."""
    path = write_state(tmp_path, state())

    assert path.stat().st_mode & 0o777 == 0o600


def test_a_state_file_of_a_dead_process_does_not_count(tmp_path: Path) -> None:
    """A killed supervisor leaves its file behind."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    write_state(tmp_path, state(pid=child.pid))

    with pytest.raises(NoInstance, match="headrace up"):
        find(tmp_path, "a")


def test_a_reused_process_id_is_told_apart_by_its_start(tmp_path: Path) -> None:
    """The pid alone proves nothing."""
    write_state(tmp_path, dataclasses.replace(state(), started=1.0))

    with pytest.raises(NoInstance):
        find(tmp_path, "a")


def test_a_wrong_name_is_answered_with_the_right_ones(tmp_path: Path) -> None:
    """The reader learns what does run."""
    write_state(tmp_path, state("port-9100"))

    with pytest.raises(NoInstance, match="port-9100"):
        find(tmp_path, "default")


def test_a_damaged_file_does_not_count(tmp_path: Path) -> None:
    """No reader breaks over it."""
    (tmp_path / "a.json").write_text('{"pid": 1')

    assert running(tmp_path) == []


def test_removing_twice_is_as_good_as_once(tmp_path: Path) -> None:
    """A stop may follow a stop."""
    write_state(tmp_path, state())

    remove_state(tmp_path, "a")
    remove_state(tmp_path, "a")

    assert running(tmp_path) == []
