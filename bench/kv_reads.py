"""`python -m bench.kv_reads`: blocks read from a disk by threads, with and without the page cache, and by io_uring.

The disk tier reads adjacent blocks of a segment with one `preadv` per run, after telling the system what comes next,
in one of two threads. Here the same blocks are read in other ways too: by more threads, past the page cache (O_DIRECT),
and by io_uring with one thread. All ways read whole aligned blocks into the same memory, in a prompt's order (adjacent)
and in a random one, by turns; what the system remembers of the files is dropped before each, and every byte is compared
after.

The last line is one JSON object; the exit code is 1 if a way brought wrong bytes. Without permission for io_uring its
rows are missing and the errno is told; so are those of direct reads where the file system knows none.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kv.probe import forget
from bench.uring import Ring, refusal
from kvstore.disk.files import PAGE, Files
from kvstore.disk.segment import MAX_READ_NBYTES

SIZES = (98_304, 196_608, 2_097_152)  # of a block: the default model's in 8 bits and raw; a model of 8 billion weights
FILE_NBYTES = 12 << 20  # about what a segment of 64 blocks of the default model takes
DEPTH = 32
DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class Read:
    """One block: the file's number, the offset there, and where it goes in memory."""

    file: int
    offset: int
    at: int


@dataclass(frozen=True, slots=True)
class Work:
    """Blocks to be read into memory."""

    paths: Sequence[Path]
    reads: Sequence[Read]
    nbytes: int
    memory: mmap.mmap

    def view(self, read: Read) -> memoryview:
        """Return where a block goes."""
        return memoryview(self.memory)[read.at : read.at + self.nbytes]

    def runs(self) -> list[list[Read]]:
        """Return adjacent blocks together, as the disk tier reads them."""
        out: list[list[Read]] = []
        most = max(1, MAX_READ_NBYTES // self.nbytes)
        for read in self.reads:
            last = out[-1] if out else []
            if last and len(last) < most and (last[-1].file, last[-1].offset + self.nbytes) == (read.file, read.offset):
                last.append(read)
            else:
                out.append([read])
        return out


def by_threads(work: Work, threads: int, flags: int) -> None:
    """One `preadv` per run of adjacent blocks, the runs dealt to threads."""
    files, runs = Files(), work.runs()
    fds = [os.open(path, os.O_RDONLY | flags) for path in work.paths]

    def some(first: int) -> None:
        mine = runs[first::threads]
        if not flags:
            for run in mine:
                files.announce(fds[run[0].file], run[0].offset, len(run) * work.nbytes)
        for run in mine:
            got = files.read(fds[run[0].file], [work.view(read) for read in run], run[0].offset)
            if got != len(run) * work.nbytes:
                raise OSError(errno.EIO, f"{got} of {len(run) * work.nbytes} bytes")

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(some, range(threads)))
    finally:
        for fd in fds:
            os.close(fd)


def by_uring(work: Work, depth: int, flags: int) -> None:
    """One read per block, so many under way, one thread."""
    fds = [os.open(path, os.O_RDONLY | flags) for path in work.paths]
    base = ctypes.addressof(ctypes.c_char.from_buffer(work.memory))
    ring = Ring(depth)
    try:
        ring.read([(fds[read.file], read.offset, base + read.at, work.nbytes) for read in work.reads], depth)
    finally:
        ring.close()
        for fd in fds:
            os.close(fd)


def ways(uring: bool, direct: bool) -> dict[str, Callable[[Work], None]]:
    """Return what is compared, the store's present way first."""
    out: dict[str, Callable[[Work], None]] = {"preadv, 1 thread": lambda work: by_threads(work, 1, 0)}
    out["preadv, 2 threads"] = lambda work: by_threads(work, 2, 0)
    for threads in (1, 2, 4) if direct else ():
        out[f"O_DIRECT, {threads} thread{'s'[: threads > 1]}"] = lambda work, n=threads: by_threads(work, n, DIRECT)  # type: ignore[misc]
    if uring:
        out[f"io_uring, {DEPTH} deep"] = lambda work: by_uring(work, DEPTH, 0)
    if uring and direct:
        out[f"io_uring O_DIRECT, {DEPTH} deep"] = lambda work: by_uring(work, DEPTH, DIRECT)
    return out


def takes_direct(path: Path) -> bool:
    """Whether the file system of a file lets reads go past the page cache."""
    try:
        fd = os.open(path, os.O_RDONLY | DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE) as page:
            return bool(DIRECT) and os.preadv(fd, [page], 0) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def lay_out(directory: Path, nbytes: int, total: int) -> tuple[list[Path], list[Read]]:
    """Write files of random blocks; returns them and the reads of all blocks in order."""
    per_file = max(1, FILE_NBYTES // nbytes)
    count = max(2, total // nbytes)
    paths: list[Path] = []
    reads: list[Read] = []
    for at in range(count):
        if at % per_file == 0:
            paths.append(directory / f"segment-{len(paths)}")
        reads.append(Read(len(paths) - 1, at % per_file * nbytes, at * nbytes))
    for number, path in enumerate(paths):
        path.write_bytes(random.Random(number).randbytes(sum(read.file == number for read in reads) * nbytes))
    return paths, reads


def measure(directory: Path, nbytes: int, total: int, turns: int, uring: bool) -> list[dict[str, Any]]:
    """Return a row per way and order: MB/s, over the first way, and seconds of processor time per GB.

    Raises:
        AssertionError: if a way brought wrong bytes.
        OSError: if the system refuses a read.
    """
    paths, reads = lay_out(directory, nbytes, total)
    compared = ways(uring, takes_direct(paths[0]))
    whole = b"".join(path.read_bytes() for path in paths)
    rows = []
    with mmap.mmap(-1, len(whole)) as memory:
        for order in ("adjacent", "random"):
            asked = reads if order == "adjacent" else random.Random(1).sample(reads, len(reads))
            work = Work(paths, asked, nbytes, memory)
            rates: dict[str, list[float]] = {name: [] for name in compared}
            cpu: dict[str, list[float]] = {name: [] for name in rates}
            for turn in range(turns + 1):  # the first one does not count
                for name, read in compared.items():
                    memory[:] = b"\xee" * len(whole)
                    forget(paths)
                    began, used = time.perf_counter(), time.process_time()
                    read(work)
                    took, used = time.perf_counter() - began, time.process_time() - used
                    if memory[:] != whole:
                        raise AssertionError(f"{name}: other bytes came than were written")
                    if turn:
                        rates[name].append(len(whole) / took / 1e6)
                        cpu[name].append(used / len(whole) * 1e9)
            first = statistics.median(next(iter(rates.values())))
            rows += [
                {
                    "block_nbytes": nbytes, "order": order, "way": name,
                    "mb_per_s": round(statistics.median(got)), "over_present": round(statistics.median(got) / first, 2),
                    "cpu_s_per_gb": round(statistics.median(cpu[name]), 2),
                }
                for name, got in rates.items()
            ]  # fmt: skip
    for path in paths:
        path.unlink()
    return rows


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_reads", description=__doc__)
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to be read (default: a temporary one)")
    parser.add_argument("--block-nbytes", default=",".join(map(str, SIZES)), help="by commas, multiples of a page")
    parser.add_argument("--total-mb", type=int, default=96, help="that are read at a time (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    sizes = [int(size) for size in args.block_nbytes.split(",")]
    if any(size <= 0 or size % PAGE for size in sizes) or min(args.turns, args.total_mb) < 1:
        parser.error("blocks are multiples of a page; sizes and turns are positive")
    code = refusal()
    result: dict[str, Any] = {"check": "kv_reads", "io_uring": "permitted" if not code else errno.errorcode.get(code)}
    rows: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-reads-", dir=args.dir) as directory:
            for size in sizes:
                rows += measure(Path(directory), size, args.total_mb << 20, args.turns, not code)
    except (AssertionError, OSError) as exc:
        result["error"] = str(exc)
    if rows:
        table = Table(*(name.replace("_", " ") for name in rows[0]), title=f"io_uring: {result['io_uring']}")
        for row in rows:
            table.add_row(*map(str, row.values()))
        Console(width=120).print(table)
    print(json.dumps(result | {"rows": rows, "ok": "error" not in result}))
    return 0 if "error" not in result else 1


if __name__ == "__main__":
    sys.exit(main())
