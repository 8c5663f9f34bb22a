"""Looking at an instance from outside: its counters, whether its store is at rest, what was read from the disk."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

import httpx
import psutil

from bench import cpu
from bench.client import LoadFailed
from bench.servers import Server

REST_LIMIT_S = 30.0
POLL_S = 0.1
STILL = 3  # equal readings in a row
WRITES, QUEUED = "kv_writes", "kv_disk_queued"
LOADED, STORED, INSERTED = "kv_blocks_loaded_total", "kv_blocks_stored_total", "kv_disk_inserted_total"
FROM_DISK, HOST_BLOCKS = "kv_disk_loaded_total", "kv_blocks_total"
MOVING = (LOADED, STORED, INSERTED, FROM_DISK, "kv_stored", "kv_disk_records")

_SAMPLE = re.compile(r"^headrace_(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def parse(page: str) -> dict[str, float]:
    """Return the samples of a page of metrics by name, without the prefix, summed over nodes and labels."""
    out: dict[str, float] = {}
    for name, value in _SAMPLE.findall(page):
        out[name] = out.get(name, 0.0) + float(value)
    return out


async def metrics(server: Server) -> dict[str, float]:
    """Return what the instance counts now."""
    async with httpx.AsyncClient(base_url=server.base, timeout=10.0) as http:
        return parse((await http.get("/metrics")).raise_for_status().text)


async def at_rest(server: Server) -> dict[str, float]:
    """Wait until nothing moves between engines, store and disk any more; returns the counters then.

    Raises:
        LoadFailed: if something still moves after 30 s.
    """
    limit, still = time.monotonic() + REST_LIMIT_S, 0
    last: tuple[float, ...] = ()
    while True:
        found = await metrics(server)
        seen = tuple(found.get(name, 0.0) for name in MOVING)
        busy = found.get(WRITES, 0.0) or found.get(QUEUED, 0.0)
        still, last = (still + 1 if seen == last and not busy else 0), seen
        if still >= STILL - 1:
            return found
        if time.monotonic() > limit:
            state = dict(zip(MOVING, seen, strict=True))
            raise LoadFailed(f"the store is still busy after {REST_LIMIT_S:g} s: {state}")
        await asyncio.sleep(POLL_S)


async def until(server: Server, names: tuple[str, ...]) -> dict[str, float]:
    """Wait until all of these counters are above zero; returns them all.

    Raises:
        LoadFailed: if one still is not after 30 s.
    """
    limit = time.monotonic() + REST_LIMIT_S
    while True:
        found = await metrics(server)
        missing = [name for name in names if found.get(name, 0.0) <= 0]
        if not missing:
            return found
        if time.monotonic() > limit:
            raise LoadFailed(f"{', '.join(missing)} not above 0 after {REST_LIMIT_S:g} s")
        await asyncio.sleep(POLL_S)


def store_pid(server: Server) -> int:
    """Return the id of the process that holds the store.

    Raises:
        LoadFailed: if there is none.
    """
    for process in server.processes():
        try:
            if cpu.title(process).startswith("kv"):
                return process.pid
        except psutil.Error:
            continue
    raise LoadFailed("no process of the instance holds a store")


def read_nbytes(pid: int | None = None) -> int | None:
    """Return the bytes that the system has read from disks for a process (this one), None where it does not tell."""
    try:
        text = Path(f"/proc/{pid or 'self'}/io").read_text()
    except OSError:
        return None
    found = re.search(r"^read_bytes: (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def forget(paths: list[Path]) -> int:
    """Make the system forget what it keeps of files in memory, once it is on the disk; returns their bytes."""
    nbytes = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            nbytes += os.fstat(fd).st_size
        finally:
            os.close(fd)
    return nbytes


def segments(directory: Path) -> list[Path]:
    """Return the segment files of a disk tier, by name."""
    return sorted(directory.glob("*/segment-*"))


def counts_reads(directory: Path, nbytes: int = 8 << 20) -> bool:
    """Whether the system tells what it reads from the disk under a directory: by a file, written, forgotten, read."""
    path = directory / "probe"
    path.write_bytes(os.urandom(nbytes))
    try:
        forget([path])
        before = read_nbytes()
        path.read_bytes()
        after = read_nbytes()
    finally:
        path.unlink()
    return before is not None and after is not None and after - before >= nbytes // 2
