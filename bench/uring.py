"""The least of io_uring that reads need, through system calls: one ring, reads alone, a fixed number under way.

The structures are those of linux/io_uring.h. Numbers of system calls are the same on all machines that have io_uring.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any

SETUP, ENTER = 425, 426
OP_READ = 22
ENTER_GETEVENTS = 1
OFF_SQ_RING, OFF_CQ_RING, OFF_SQES = 0, 0x8000000, 0x10000000
SQE_NBYTES, CQE_NBYTES, PARAMS_NBYTES = 64, 16, 120

_libc = ctypes.CDLL(None, use_errno=True)


def refusal() -> int:
    """Return the errno with which the system refuses to make a ring, 0 if it makes one."""
    try:
        Ring(2).close()
    except OSError as exc:
        return int(exc.errno or -1)
    return 0


class Ring:
    """Reads from files into memory, many at a time.

    Raises:
        OSError: if the system refuses.
    """

    def __init__(self, entries: int) -> None:
        params = ctypes.create_string_buffer(PARAMS_NBYTES)
        self._fd = _called(_libc.syscall(SETUP, entries, params))
        # Fields: sq_entries, cq_entries, flags, ..., at 40 the offsets of the submission ring, at 80 the other's.
        self.entries, cq_entries = struct.unpack_from("<II", params, 0)
        self._sq = struct.unpack_from("<7I", params, 40)  # head, tail, ring_mask, ring_entries, flags, dropped, array
        self._cq = struct.unpack_from("<6I", params, 80)  # head, tail, ring_mask, ring_entries, overflow, cqes
        size = self._sq[6] + 4 * self.entries
        self._sq_ring = mmap.mmap(self._fd, size, offset=OFF_SQ_RING)
        self._cq_ring = mmap.mmap(self._fd, self._cq[5] + CQE_NBYTES * cq_entries, offset=OFF_CQ_RING)
        self._sqes = mmap.mmap(self._fd, SQE_NBYTES * self.entries, offset=OFF_SQES)
        (self._sq_mask,) = struct.unpack_from("<I", self._sq_ring, self._sq[2])
        (self._cq_mask,) = struct.unpack_from("<I", self._cq_ring, self._cq[2])
        for slot in range(self.entries):
            struct.pack_into("<I", self._sq_ring, self._sq[6] + 4 * slot, slot)

    def read(self, reads: Sequence[tuple[int, int, int, int]], depth: int) -> None:
        """Do all reads, at most `depth` of them at a time.

        Args:
            reads: file, offset, address and bytes of each.
            depth: how many may be under way, up to the ring's size.

        Raises:
            OSError: if one is refused or short.
        """
        depth, begun, ended = min(depth, self.entries), 0, 0
        while ended < len(reads):
            new = min(len(reads) - begun, depth - (begun - ended))
            if new:
                self._submit(reads[begun : begun + new], begun)
                begun += new
            # The call is also the barrier between what stands in the rings and what the system sees of it.
            _called(_libc.syscall(ENTER, self._fd, new, 1, ENTER_GETEVENTS, None, 0))
            ended += self._reap(reads)

    def _submit(self, reads: Sequence[tuple[int, int, int, int]], first: int) -> None:
        (tail,) = struct.unpack_from("<I", self._sq_ring, self._sq[1])
        for at, (fd, offset, address, nbytes) in enumerate(reads):
            slot = (tail + at) & self._sq_mask
            # opcode, flags, ioprio, fd, offset, address, length, rw_flags, user_data, then nothing
            entry = struct.pack("<BBHiQQIIQ24x", OP_READ, 0, 0, fd, offset, address, nbytes, 0, first + at)
            self._sqes[slot * SQE_NBYTES : (slot + 1) * SQE_NBYTES] = entry
        struct.pack_into("<I", self._sq_ring, self._sq[1], (tail + len(reads)) & 0xFFFFFFFF)

    def _reap(self, reads: Sequence[tuple[int, int, int, int]]) -> int:
        (head,) = struct.unpack_from("<I", self._cq_ring, self._cq[0])
        (tail,) = struct.unpack_from("<I", self._cq_ring, self._cq[1])
        count = (tail - head) & 0xFFFFFFFF
        for at in range(count):
            slot = (head + at) & self._cq_mask
            which, result = struct.unpack_from("<Qi", self._cq_ring, self._cq[5] + CQE_NBYTES * slot)
            if result != reads[which][3]:
                raise OSError(-result if result < 0 else 5, f"read {which} of {len(reads)} gave {result}")
        struct.pack_into("<I", self._cq_ring, self._cq[0], tail)
        return int(count)

    def close(self) -> None:
        """Give the ring back."""
        for name in ("_sq_ring", "_cq_ring", "_sqes"):
            getattr(self, name).close()
        os.close(self._fd)


def _called(result: Any) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)
