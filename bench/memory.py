"""`python -m bench.memory`: resident memory per engine, and whether memory grows with the number of requests.

A private instance serves short streamed chats over HTTP: some on the real engine, many on the scripted one. Resident
bytes of every process are taken while they run; a line through them, after a warm-up, tells the growth per request.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from bench import cpu, load, servers, slope
from bench.client import LoadFailed, stream
from bench.load import GateFailed
from bench.questions import long_text
from bench.servers import Server, ServerFailed
from bench.targets import SHORT
from chaos.workload import chat
from headrace.fetch import ensure_model

NODE_POOL_TOKENS, NODE_LIMIT_MB = 4096, 700.0
WARM_UP = 0.5  # of the requests: tables and caches that are bounded fill up first (the largest takes 30,000)
SETTLED = 0.1  # the same after requests that were sent before
WARM_UP_STREAMS, LEAD_IN = 16, 1500
SAMPLES = 120
ENGINES = ("prefill", "decode", "both")


@dataclass(frozen=True, slots=True)
class Phase:
    """One measurement: which engine, how many requests, and what growth is still flat."""

    engine: str
    requests: int
    streams: int
    tokens: int
    limit_kib: float  # upper confidence bound, KiB per request, all processes together
    warm_up: float = WARM_UP  # share of the requests that is not measured
    first: int = 0  # number of the first prompt


async def grow(server: Server, phase: Phase) -> dict[str, Any]:
    """Send the requests of a phase and measure memory meanwhile.

    Raises:
        LoadFailed: if one of them fails.
    """
    every = max(1, phase.requests // SAMPLES)
    done, took = 0, time.monotonic()
    at: list[float] = []
    sizes: list[dict[str, float]] = []  # KiB by process

    async def worker(numbers: Iterator[int]) -> None:
        nonlocal done
        for number in numbers:
            body = chat(server.model, f"Say number {number} in a few words.", phase.tokens, seed=None, stream=True)
            await stream(server.base, body)
            done += 1
            if done % every == 0:
                at.append(float(done))
                sizes.append(cpu.resident_kib(server.pid))

    numbers = iter(range(phase.first, phase.first + phase.requests))
    async with asyncio.TaskGroup() as group:
        for _ in range(phase.streams):
            group.create_task(worker(numbers))
    took = time.monotonic() - took
    first = int(len(at) * phase.warm_up)
    if any(one.keys() != sizes[0].keys() for one in sizes):
        raise LoadFailed("a process came or went; the sums are not of the same things")
    whole = [sum(one.values()) for one in sizes]
    found = slope.least_squares(at[first:], whole[first:])
    by_process = {
        name: round(slope.least_squares(at[first:], [one[name] for one in sizes[first:]]).value, 4) for name in sizes[0]
    }
    return {
        "engine": phase.engine, "requests": phase.requests, "took_s": round(took, 1), "samples": len(at) - first,
        "kib_per_request": round(found.value, 4), "low": round(found.low, 4), "high": round(found.high, 4),
        "limit_kib": phase.limit_kib, "flat": found.high <= phase.limit_kib, "by_process": by_process,
        "grown_mb": round((whole[-1] - whole[first]) / 1024, 2),
    }  # fmt: skip


def engines(server: Server) -> dict[str, dict[str, float]]:
    """Return resident and proportional megabytes of each engine node."""
    found = {}
    for process in server.processes():
        try:
            name, info = cpu.title(process), process.memory_full_info()
        except psutil.Error:
            continue
        if name.startswith(ENGINES):
            found[name] = {"rss_mb": round(info.rss / 2**20, 1), "pss_mb": round(info.pss / 2**20, 1)}
    return found


async def real(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Measure the real engine: what its nodes take once their pool has been filled, then the growth."""
    # A small host tier is full before the measurement begins; it would else grow by the prompts' blocks for long.
    env = {"HEADRACE_HOST_TIER_TOKENS": str(NODE_POOL_TOKENS // 2)}
    spec = servers.ours(args.model, args.port_base, [f"--pool-tokens={NODE_POOL_TOKENS}", *args.up], env)
    async with Server(spec, directory / "real.log") as server:
        prompts = [long_text(i, SHORT) for i in range(NODE_POOL_TOKENS // SHORT)]
        if differing := await load.differing(server.base, server.model, prompts[:5], 16):
            raise GateFailed("the whole system", differing, 5)
        await load.run(server.base, server.model, prompts, 16, 16)
        nodes = engines(server)
        # Ends of thousands of requests are remembered; buffers grow to the largest step, which guesses make larger.
        first = 0
        before = ((args.warm_up_requests, WARM_UP_STREAMS, 1), (LEAD_IN, 8, args.tokens))
        for requests, streams, tokens in before if args.warm_up_requests else ():
            await grow(server, Phase("real", requests, streams, tokens, args.real_limit, first=first))
            first += requests
        settled = SETTLED if first else WARM_UP
        growth = await grow(server, Phase("real", args.requests, 8, args.tokens, args.real_limit, settled, first))
    return {"engines": nodes, "growth": growth}


async def scripted(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Measure the growth around the scripted engine, which checks every block it reads."""
    spec = servers.ours(args.model, args.port_base + 5, ["--engine", "scripted", *args.up])
    phase = Phase("scripted", args.scripted_requests, args.scripted_streams, 2, args.scripted_limit)
    async with Server(spec, directory / "scripted.log") as server:
        return await grow(server, phase)


async def _main(args: argparse.Namespace) -> dict[str, Any]:
    args.model = args.model or ensure_model()
    directory = Path(tempfile.mkdtemp(prefix="headrace-memory-"))
    out: dict[str, Any] = {"check": "bench-memory", "engines": {}, "growth": []}
    if args.requests:
        found = await real(args, directory)
        out["growth"].append(found["growth"])
        largest = max(row["rss_mb"] for row in found["engines"].values())
        out |= {"engines": found["engines"], "pool_tokens": NODE_POOL_TOKENS, "engine_rss_mb": largest}
        out |= {"engine_limit_mb": NODE_LIMIT_MB, "engine_met": largest <= NODE_LIMIT_MB}
    if args.scripted_requests:
        out["growth"].append(await scripted(args, directory))
    return out | {"ok": bool(out["growth"]) and all(row["flat"] for row in out["growth"])}


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=120)
    table = Table("engine node", "resident MB", "proportional MB", title=f"Pool of {NODE_POOL_TOKENS} tokens, filled")
    for name, row in result["engines"].items():
        table.add_row(name, f"{row['rss_mb']:.1f}", f"{row['pss_mb']:.1f}")
    console.print(table)
    table = Table("engine", "requests", "KiB per request", "95 %", "limit", "flat", title="Growth, all processes")
    for row in result["growth"]:
        bounds = f"{row['low']:.3f} to {row['high']:.3f}"
        cells = [f"{row['kib_per_request']:.3f}", bounds, f"{row['limit_kib']:g}", "yes" if row["flat"] else "no"]
        table.add_row(row["engine"], str(row["requests"]), *cells)
    console.print(table)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="on the real engine; 0: none")
    parser.add_argument("--warm-up-requests", type=int, default=9000, help="of one token, sent before")
    parser.add_argument("--scripted-requests", type=int, default=100_000)
    parser.add_argument("--scripted-streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8, help="output tokens on the real engine")
    parser.add_argument("--real-limit", type=float, default=8.0, help="KiB per request that still count as flat")
    parser.add_argument("--scripted-limit", type=float, default=0.25)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--port-base", type=int, default=18820)
    parser.add_argument("--up", action="append", default=[], help="one more argument for `headrace up`")
    return parser


def main() -> int:
    """Run the command line."""
    args = _arguments().parse_args()
    try:
        result = asyncio.run(_main(args))
        show(result)
    except* (ServerFailed, LoadFailed, GateFailed, httpx.HTTPError, OSError, TimeoutError, ValueError) as several:
        first = several.exceptions[0]
        result = {"check": "bench-memory", "ok": False, "error": f"{type(first).__name__}: {first}"}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
