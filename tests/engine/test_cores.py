"""Engines of one machine share its cores step by step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cores import STREAMED_PER_THREAD, CoreShare, useful_threads

HOLDER = """
import sys
from pathlib import Path
from engine.cores import CoreShare
share = CoreShare(Path(sys.argv[1]), 4)
print(share.take(3), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def share(tmp_path: Path) -> Iterator[CoreShare]:
    made = CoreShare(tmp_path / "cores", 4)
    yield made
    made.close()


def test_an_engine_alone_gets_all_the_cores_that_it_can_use(share: CoreShare) -> None:
    assert share.take(4) == 4
    share.give_back()
    assert share.take(2) == 2
    share.give_back()
    assert share.take(9) == 4


def test_two_engines_never_hold_the_same_core(share: CoreShare, tmp_path: Path) -> None:
    other = CoreShare(tmp_path / "cores", 4)
    assert share.take(3) == 3
    assert other.take(3) == 1
    share.give_back()
    other.give_back()
    assert other.take(3) == 3
    other.close()


def test_with_no_core_free_an_engine_still_computes(share: CoreShare, tmp_path: Path) -> None:
    other = CoreShare(tmp_path / "cores", 4)
    share.take(4)
    assert other.take(4) == 1
    other.close()


def test_a_killed_engine_leaves_no_core_taken(share: CoreShare, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "cores")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "3"
        assert share.take(4) == 1
        share.give_back()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert share.take(4) == 4


def test_closing_lets_go(tmp_path: Path) -> None:
    first = CoreShare(tmp_path, 2)
    first.take(2)
    first.close()
    second = CoreShare(tmp_path, 2)
    assert second.take(2) == 2
    second.close()


def test_files_that_cannot_be_made_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        CoreShare(tmp_path / "file" / "cores", os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("threads", "num_tokens", "weights", "useful"),
    [
        (8, 3, 1, 8),  # a batch is work for all
        (8, 1, 1, 1),
        (8, 2, STREAMED_PER_THREAD, 1),
        (8, 1, 3 * STREAMED_PER_THREAD + 1, 4),
        (2, 1, 100 * STREAMED_PER_THREAD, 2),
    ],
)
def test_single_tokens_use_as_many_threads_as_have_something_to_read(
    threads: int, num_tokens: int, weights: int, useful: int
) -> None:
    assert useful_threads(threads, num_tokens, weights) == useful
