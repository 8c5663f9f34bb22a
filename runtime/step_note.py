"""What an engine is computing, where its death does not take it along: a page of memory shared with the supervisor.

A process that is killed by a fault says nothing. So the engine notes the requests of each step before it begins, and
takes the note back when the step is over; the supervisor, which made the page and keeps it, reads it when the process
has ended. A note costs a byte per step, and its text where the step's requests are not those of the last one.
"""

from __future__ import annotations

import atexit
import mmap
import os
import struct
from collections.abc import Sequence

ENV = "_STEP_NOTE_FD"  # number of the inherited descriptor; no setting, so it has no prefix of theirs
SLOTS = 4  # engines of one process; a fifth notes nothing
SLOT_NBYTES = 16 * 1024
NBYTES = SLOTS * SLOT_NBYTES

_HEAD = struct.Struct("<BBxxI")  # taken, a step is being computed, length of the text
_TAKEN, _BUSY = 0, 1
_ROOM = SLOT_NBYTES - _HEAD.size


class StepNote:
    """An engine's end: `begin` and `end` around each step, from one thread."""

    def __init__(self, page: mmap.mmap, at: int) -> None:
        self._page = page
        self._at = at
        self._names: tuple[str, ...] | None = None
        page[at : at + _HEAD.size] = _HEAD.pack(1, 0, 0)
        # Who leaves in order leaves no note, even if a step never came back.
        atexit.register(self.end)

    @classmethod
    def inherited(cls) -> StepNote | None:
        """Return a note on the page that this process was given by its supervisor; None without one."""
        try:
            page = mmap.mmap(int(os.environ[ENV]), NBYTES)
        except (KeyError, ValueError, OSError):
            return None
        free = [at for at in range(0, NBYTES, SLOT_NBYTES) if not page[at + _TAKEN]]
        return cls(page, free[0]) if free else None

    def begin(self, names: tuple[str, ...]) -> None:
        """A step of these requests begins; those that find no room on the page are left out, never the first two."""
        if names != self._names:
            text = _text(names)
            start = self._at + _HEAD.size
            self._page[start : start + len(text)] = text
            self._page[self._at : start] = _HEAD.pack(1, 0, len(text))
            self._names = names
        self._page[self._at + _BUSY] = 1

    def end(self) -> None:
        """The step is over."""
        self._page[self._at + _BUSY] = 0


class NotePage:
    """The supervisor's end: a page for one child at a time."""

    def __init__(self) -> None:
        """Make the page.

        Raises:
            OSError: if the system has no memory to share.
        """
        self.fd = os.memfd_create("step-note")
        os.ftruncate(self.fd, NBYTES)

    def clear(self) -> None:
        """The next child begins with a clean page."""
        for at in range(0, NBYTES, SLOT_NBYTES):
            os.pwrite(self.fd, bytes(_HEAD.size), at)

    def read(self) -> list[str]:
        """Return the requests of the steps that were being computed."""
        names: list[str] = []
        for at in range(0, NBYTES, SLOT_NBYTES):
            taken, busy, length = _HEAD.unpack(os.pread(self.fd, _HEAD.size, at))
            if taken and busy and length <= _ROOM:
                names += os.pread(self.fd, length, at + _HEAD.size).decode("utf-8", "replace").splitlines()
        return names

    def close(self) -> None:
        """Give the page back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _text(names: Sequence[str]) -> bytes:
    """Return the names line by line, as many as there is room for."""
    text = "\n".join(names).encode()
    return text if len(text) <= _ROOM else text[:_ROOM].rpartition(b"\n")[0]
