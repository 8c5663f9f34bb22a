"""What is worth a place on the disk, and when a broken one is tried again. Pure."""

from __future__ import annotations

import errno as codes
from collections import OrderedDict
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class SecondTouch:
    """Admits a block when it is used a second time: most blocks are used once, and would only wear the disk.

    What was used once is remembered for `capacity` blocks, the oldest forgotten first.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        """Remember nothing yet."""
        self._capacity = capacity
        self._once: OrderedDict[bytes, None] = OrderedDict()

    def touch(self, digest: bytes) -> bool:
        """A block was stored or used; returns whether it is worth a place from now on."""
        if digest in self._once:
            self._once.move_to_end(digest)
            return True
        self._once[digest] = None
        if len(self._once) > self._capacity:
            self._once.popitem(last=False)
        return False

    def __len__(self) -> int:
        return len(self._once)


def affordable(num_blocks: int, block_nbytes: int, bytes_per_s: float, limit_s: float) -> int:
    """Return how many of so many blocks a disk of this speed reads within a time."""
    return min(num_blocks, int(bytes_per_s * limit_s // block_nbytes))


@dataclass(slots=True)
class Health:
    """What is wrong with a directory, and when it is worth another look: pauses double until a write has succeeded."""

    errno: int = 0
    reason: str = ""
    pause_s: float = FIRST_PAUSE_S
    next_probe: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.errno == 0

    def fail(self, errno: int | None, reason: str, now: float) -> None:
        """Something was refused."""
        self.errno, self.reason = errno or codes.EIO, reason
        self.next_probe = now + self.pause_s
        self.pause_s = min(self.pause_s * 2, LONGEST_PAUSE_S)

    def due(self, now: float) -> bool:
        """Whether it is time for another look."""
        return not self.ok and now >= self.next_probe

    def passed(self) -> None:
        """A look found nothing wrong; the next pause is not shorter for it."""
        self.errno, self.reason = 0, ""

    def proved(self) -> None:
        """Real work succeeded."""
        self.errno, self.reason, self.pause_s = 0, "", FIRST_PAUSE_S
