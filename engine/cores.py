"""How many threads a step takes, so that the engines of one machine do not trample each other.

Threads of a step wait for one another after every op; with more of them than cores they wait for whole time slices of
the scheduler. So engines tell each other, in a small shared file, when they compute: an engine alone takes all cores,
and engines that are busy at the same time share them evenly, each with one thread at least. No engine waits for
another one, and one that dies is forgotten.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

STREAMED_PER_THREAD = 128 << 20  # bytes
SLOTS = 256
IDLE_AFTER_S = 0.005  # between two steps an engine is still busy; a prompt elsewhere comes later than that
DEAD_AFTER_S = 30.0  # a step that takes longer ended with its process

_SLOT = struct.Struct("<dd")  # begin and end of the last step, monotonic seconds of the machine


class CoreShare:
    """This process's place among the engines of the machine. Not thread-safe."""

    def __init__(self, directory: Path, cores: int, now: Callable[[], float]) -> None:
        """Take a slot.

        Args:
            directory: where the shared file lies; made if missing. All engines of a machine name the same.
            cores: how many there are.
            now: monotonic seconds, the same clock in all processes.

        Raises:
            OSError: the file cannot be made, or all slots are taken.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._cores = cores
        self._now = now
        self._file = os.open(directory / "steps", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(self._file, SLOTS * _SLOT.size)
            self._slot = self._take_slot()
            self._map = mmap.mmap(self._file, SLOTS * _SLOT.size)
        except OSError:
            os.close(self._file)
            raise
        self._view = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        self._at = self._slot * _SLOT.size
        _SLOT.pack_into(self._map, self._at, 0.0, 0.0)

    def begin(self) -> int:
        """Tell the others that a step begins; returns on how many threads to compute it, at least 1."""
        now = self._now()
        _SLOT.pack_into(self._map, self._at, now, 0.0)
        others = sum(
            self._busy(begun, ended, now)
            for slot, (begun, ended) in enumerate(_SLOT.iter_unpack(self._map[: SLOTS * _SLOT.size]))
            if begun and slot != self._slot
        )
        return max(1, self._cores // (others + 1))

    def end(self) -> None:
        """Tell the others that the step is over."""
        begun, _ = _SLOT.unpack_from(self._map, self._at)
        _SLOT.pack_into(self._map, self._at, begun, self._now())

    @property
    def shared(self) -> tuple[int, int, int, int, float, float]:
        """Address of the slots, their number, this one's, cores, and both limits, for steps in compiled code."""
        return ctypes.addressof(self._view), SLOTS, self._slot, self._cores, IDLE_AFTER_S, DEAD_AFTER_S

    def close(self) -> None:
        """Leave the slot to somebody else; nobody reads the shared file through this object any more."""
        _SLOT.pack_into(self._map, self._at, 0.0, 0.0)
        del self._view  # a map with a view on it cannot be closed
        self._map.close()
        os.close(self._file)

    @staticmethod
    def _busy(begun: float, ended: float, now: float) -> bool:
        if ended:
            return now - ended < IDLE_AFTER_S
        return now - begun < DEAD_AFTER_S

    def _take_slot(self) -> int:
        for slot in range(SLOTS):
            try:
                # Held until the file is closed, by the kernel when the process dies.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, _SLOT.size, slot * _SLOT.size)
                return slot
            except (BlockingIOError, PermissionError):
                continue
        raise OSError(f"{SLOTS} engines run on this machine already")


def useful_threads(threads: int, num_tokens: int, weight_nbytes: int) -> int:
    """Return on how many threads a step of so many tokens is worth computing.

    With one or two tokens a step does little but read the weights, and a few cores read as fast as all: a thread should
    have enough to read that meeting the others after every op does not count.
    """
    if num_tokens > 2:
        return threads
    return max(1, min(threads, -(-weight_nbytes // STREAMED_PER_THREAD)))
