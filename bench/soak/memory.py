"""What an instance takes while it runs: memory of each process, files in shared memory and on the disk."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import cpu, slope
from bench.servers import Server

WARM_UP = 0.5  # of the run: pools, tables and buffers that are bounded fill up first
LEAST_SAMPLES = 30  # behind the warm-up; fewer are no line

_ROLLUP = re.compile(r"^(Rss|Pss): +(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look.

    Attributes:
        t: monotonic seconds.
        pss_kib, rss_kib: by process; in the first, pages that several share count in parts.
        shm_nbytes: of the instance's pool files.
        disk_nbytes: of the disk tier, as the file system counts it.
    """

    t: float
    pss_kib: dict[str, int]
    rss_kib: dict[str, int]
    shm_nbytes: int
    disk_nbytes: int


def look(processes: Iterable[psutil.Process], pools: Path, prefix: str, disk: Path) -> Sample:
    """Take a sample; a process that has just ended is left out."""
    pss: dict[str, int] = {}
    rss: dict[str, int] = {}
    for process in processes:
        try:
            name = cpu.title(process)
            found = dict(_ROLLUP.findall(Path(f"/proc/{process.pid}/smaps_rollup").read_text()))
        except (psutil.Error, OSError):
            continue
        pss[name] = pss.get(name, 0) + int(found.get("Pss", 0))
        rss[name] = rss.get(name, 0) + int(found.get("Rss", 0))
    return Sample(time.monotonic(), pss, rss, taken(pools.glob(f"{prefix}*")), taken(disk.glob("**/*")))


def taken(paths: Iterable[Path]) -> int:
    """Return the bytes that files take, as the file system counts them."""
    out = 0
    for path in paths:
        try:
            out += os.stat(path).st_blocks * 512
        except OSError:
            continue  # removed meanwhile
    return out


@dataclass(slots=True)
class Watcher:
    """Looks at a server's processes and files again and again."""

    server: Server
    disk: Path
    every_s: float
    samples: list[Sample] = field(default_factory=list)

    async def watch(self) -> None:
        """Go on until cancelled."""
        prefix = f"headrace-bench-{self.server.spec.port}-"
        while True:
            self.samples.append(look(self.server.processes(), Path("/dev/shm"), prefix, self.disk))
            await asyncio.sleep(self.every_s)


def judge(samples: Sequence[Sample], *, limit_mb: float, disk_limit: int, answers: int) -> dict[str, Any]:
    """Tell whether memory stayed flat and files within their bounds.

    Args:
        samples: in their order.
        limit_mb: growth of all processes together over the samples behind the warm-up that still counts as flat, by the
            upper bound of the slope.
        disk_limit: what the disk tier may take, in bytes.
        answers: how many there were in all, to say growth per request.

    Returns:
        Figures; `ok` is false where a bound was passed. With too few samples memory is not judged, and `flat` is None.
    """
    rest = samples[int(len(samples) * WARM_UP) :]
    shm = [sample.shm_nbytes for sample in samples]
    disk = [sample.disk_nbytes for sample in samples]
    out: dict[str, Any] = {
        "samples": len(rest), "flat": None, "limit_mb": limit_mb,
        "shm_mb": [_mb(min(shm)), _mb(max(shm))], "disk_mb": [_mb(min(disk)), _mb(max(disk))],
        "disk_limit_mb": _mb(disk_limit),
    }  # fmt: skip
    shm_rest = [sample.shm_nbytes for sample in rest]
    fits = max(disk) <= disk_limit and max(shm_rest) == min(shm_rest)
    if len(rest) < LEAST_SAMPLES:
        return out | {"ok": fits}
    if any(sample.pss_kib.keys() != rest[0].pss_kib.keys() for sample in rest):
        return out | {"ok": False, "why": "a process came or went"}
    at = [sample.t for sample in rest]
    span = at[-1] - at[0]

    def grown(values: Sequence[float]) -> slope.Slope:
        line = slope.least_squares(at, values)
        return slope.Slope(*(bound * span / 1024 for bound in (line.value, line.low, line.high)))

    whole = grown([float(sum(sample.pss_kib.values())) for sample in rest])
    each = {name: round(grown([float(s.pss_kib[name]) for s in rest]).value, 2) for name in sorted(rest[0].pss_kib)}
    rss = {name: round(grown([float(s.rss_kib[name]) for s in rest]).value, 2) for name in sorted(rest[0].rss_kib)}
    flat = whole.high <= limit_mb
    return out | {
        "flat": flat, "ok": fits and flat, "seconds": round(span, 1),
        "pss_mb": _mb(sum(rest[-1].pss_kib.values()) * 1024),
        "grown_mb": round(whole.value, 2), "low_mb": round(whole.low, 2), "high_mb": round(whole.high, 2),
        "kib_per_request": round(whole.value * 1024 / max(1.0, answers * len(rest) / len(samples)), 2),
        "grown_mb_by_process": each, "rss_grown_mb_by_process": rss,
    }  # fmt: skip


def _mb(nbytes: float) -> float:
    return round(nbytes / 2**20, 2)
