"""Who computes on how many cores: engines of one machine share them step by step, without a word to each other.

There is a lock file per core. An engine that begins a step takes as many as it could use and finds free, and lets them
go at the step's end; with none free it still computes, on one thread. So a prompt alone on the machine gets all cores,
and engines that are busy at the same time get one each, instead of more threads than cores that wait for one another at
every layer. The kernel lets a dead process's locks go.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

STREAMED_PER_THREAD = 128 << 20  # bytes


class CoreShare:
    """This process's claim on the machine's cores. Not thread-safe."""

    def __init__(self, directory: Path, cores: int) -> None:
        """Open the lock files.

        Args:
            directory: where they lie; made if missing. All engines of a machine name the same.
            cores: how many there are.

        Raises:
            OSError: a file cannot be made.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._files = [
            os.open(directory / f"core-{i}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666) for i in range(cores)
        ]
        self._held: list[int] = []
        self._first = os.getpid() % max(1, cores)  # engines begin at different cores, so they seldom meet

    def take(self, wanted: int) -> int:
        """Take up to `wanted` free cores; returns how many threads to compute on, at least 1."""
        count = len(self._files)
        for i in range(count):
            if len(self._held) >= wanted:
                break
            file = self._files[(self._first + i) % count]
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._held.append(file)
        return max(1, len(self._held))

    def give_back(self) -> None:
        """Let all cores go."""
        for file in self._held:
            fcntl.flock(file, fcntl.LOCK_UN)
        self._held.clear()

    def close(self) -> None:
        """Let all cores go and close the files."""
        self._held.clear()
        for file in self._files:
            os.close(file)
        self._files.clear()


def useful_threads(threads: int, num_tokens: int, weight_nbytes: int) -> int:
    """Return on how many threads a step of so many tokens is worth computing.

    With one or two tokens a step does little but read the weights, and a few cores read as fast as all: a thread should
    have enough to read that meeting the others after every op does not count.
    """
    if num_tokens > 2:
        return threads
    return max(1, min(threads, -(-weight_nbytes // STREAMED_PER_THREAD)))
