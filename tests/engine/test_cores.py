"""Engines of one machine share its cores step by step."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine import cores
from engine.cores import DEAD_AFTER_S, IDLE_AFTER_S, STREAMED_PER_THREAD, CoreShare, useful_threads
from kernels import native
from models import packed
from models.native import NativeTransformer
from models.quant import checked
from models.source import open_model
from tests.models.native_models import Shape, write_model

HOLDER = """
import sys, time
from pathlib import Path
from engine.cores import CoreShare
share = CoreShare(Path(sys.argv[1]), 4, time.monotonic)
print(share.begin(), flush=True)
sys.stdin.read()
"""


class Now:
    """A clock that stands still unless told."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def pair(tmp_path: Path, now: Now) -> Iterator[tuple[CoreShare, CoreShare]]:
    """Two engines of one machine (record locks belong to processes: the second slot is taken by hand)."""
    first = CoreShare(tmp_path, 4, now)
    second = CoreShare.__new__(CoreShare)
    original = CoreShare._take_slot
    CoreShare._take_slot = lambda self: 1  # type: ignore[method-assign]
    try:
        second.__init__(tmp_path, 4, now)  # type: ignore[misc]
    finally:
        CoreShare._take_slot = original  # type: ignore[method-assign]
    yield first, second
    first.close()
    second.close()


def test_an_engine_alone_gets_all_cores(pair: tuple[CoreShare, CoreShare]) -> None:
    assert pair[0].begin() == 4


def test_engines_that_compute_at_the_same_time_share_evenly(pair: tuple[CoreShare, CoreShare]) -> None:
    first, second = pair
    first.begin()
    assert second.begin() == 2
    assert first.begin() == 2


def test_an_engine_between_two_steps_still_counts(pair: tuple[CoreShare, CoreShare], now: Now) -> None:
    first, second = pair
    first.begin()
    first.end()
    now.at += IDLE_AFTER_S / 2
    assert second.begin() == 2
    now.at += IDLE_AFTER_S
    assert second.begin() == 4


def test_there_is_always_one_thread(tmp_path: Path, now: Now, pair: tuple[CoreShare, CoreShare]) -> None:
    first, second = pair
    first._cores = second._cores = 1
    first.begin()
    assert second.begin() == 1


def test_a_step_that_never_ended_is_forgotten(pair: tuple[CoreShare, CoreShare], now: Now) -> None:
    first, second = pair
    first.begin()
    now.at += DEAD_AFTER_S + 1
    assert second.begin() == 4


def test_a_slot_is_free_again_when_its_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "4"
        beside = CoreShare(tmp_path, 4, Now())
        assert beside._slot == 1
        beside.close()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    after = CoreShare(tmp_path, 4, Now())
    assert after._slot == 0
    assert after.begin() == 4
    after.close()


def test_files_that_cannot_be_made_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        CoreShare(tmp_path / "file" / "cores", os.cpu_count() or 1, Now())


def test_too_many_engines_are_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "SLOTS", 0)
    with pytest.raises(OSError, match="run on this machine already"):
        CoreShare(tmp_path, 4, Now())


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


@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_a_long_step_gives_cores_up_when_another_engine_begins(
    tmp_path: Path, pair: tuple[CoreShare, CoreShare], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads beyond its share end with a layer; short steps and numbers stay as they are."""
    mine, other = pair
    now = time.monotonic()
    monkeypatch.setattr(mine, "_now", lambda: now)
    monkeypatch.setattr(other, "_now", lambda: now)
    path = write_model(tmp_path / "m.gguf", Shape())
    with open_model(path) as source:
        weights = packed.load(source.config, functools.partial(checked, source), "any", None)
        model = NativeTransformer(source.config, weights, threads=4)
    model.share(*mine.shared)
    pool = np.zeros((8, model.block_nbytes), np.uint8)
    active = native.library().hr_team_active

    def compute(count: int) -> tuple[bytes, int]:
        run = Run(list(range(1, count + 1)), 0, list(range(8)))
        logits = model.forward([run], pool.ctypes.data, [1], threads=4)
        return logits.tobytes(), active(ctypes.c_void_p(model.team))

    try:
        alone = compute(100)
        other.begin()
        assert compute(100) == (alone[0], 2)
        assert compute(8)[1] == 4
        other.end()
        monkeypatch.setattr(other, "_now", lambda: now - 1.0)
        other.end()
        assert compute(100) == alone == (alone[0], 4)
    finally:
        model.close()


@dataclass
class Run:
    """Consecutive tokens of one sequence."""

    ids: list[int]
    start: int
    blocks: list[int]
