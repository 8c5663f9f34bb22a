"""`python -m bench`: TTFT, ITL and tokens/s of the whole system over HTTP, time per hop, and the cost of the bus.

The load: chat with prompts of about 110 tokens, 64 output tokens, greedy, `ignore_eos`, streamed; the generator runs on
the same cores. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench import cpu, hops
from bench.client import LoadFailed, Timing, stream
from bench.stats import Level, level
from chaos.instance import Instance, InstanceFailed
from chaos.workload import FILLER, SUBJECTS, chat

LEVELS = (1, 4, 16, 64)
WARM_UP = 2
BUS_TURNS = 4  # requests per stream around the engine that does nothing; each fits into the default pool


def prompt(at: int) -> str:
    """Return a prompt of about 110 tokens with the chat template; its beginning is unlike any other's."""
    subject = SUBJECTS[at % len(SUBJECTS)]
    return f"Request {at} about {subject}. " + FILLER * 3 + "What follows from that? Answer at length."


async def run_level(base: str, model: str, streams: int, per_stream: int, tokens: int, first: int) -> Level:
    """Keep `streams` requests going until each worker has sent its share."""
    timings: list[Timing] = []

    async def worker(number: int) -> None:
        for turn in range(per_stream):
            text = prompt(first + number * per_stream + turn)
            timings.append(await stream(base, chat(model, text, tokens, seed=None, stream=True)))

    began = time.monotonic()
    await asyncio.gather(*(worker(n) for n in range(streams)))
    return level(streams, timings, time.monotonic() - began)


async def model_of(base: str) -> str:
    """Return the name of the model that is served."""
    async with httpx.AsyncClient(base_url=base, timeout=10.0) as http:
        return str((await http.get("/v1/models")).json()["data"][0]["id"])


async def real(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Measure the levels and the hops with the engine asked for."""
    spans = directory / "spans.jsonl"
    instance = Instance(f"bench-{args.port_base}", log=directory / "up.log")
    await instance.start(
        "--engine", args.engine, *args.up, port_base=args.port_base, env={"HEADRACE_SPANS_FILE": str(spans)}
    )
    try:
        base = instance.address.http
        model = await model_of(base)
        levels, first = [], 0
        await run_level(base, model, WARM_UP, 1, 8, -WARM_UP)
        began = time.time()
        for streams in args.levels:
            per_stream = args.per_stream or (3 if streams == 1 else 2 if streams <= 4 else 1)
            levels.append(await run_level(base, model, streams, per_stream, args.tokens, first))
            first += streams * per_stream
            print(f"  {streams} streams: {levels[-1].tokens_per_s:.1f} tokens/s", flush=True)
        resident = cpu.resident_mb(instance.pid)
    finally:
        code = await instance.stop()
    durations = hops.table(hops.read(spans))
    return {
        "engine": args.engine, "ready_s": round(instance.ready_after_s, 2), "exit_code": code,
        "levels": [found.row() for found in levels], "hops": durations, "resident_mb": resident,
        "measured_s": round(time.time() - began, 1),
    }  # fmt: skip


async def bus(args: argparse.Namespace, directory: Path, engine: str, streams: int, tokens: int) -> dict[str, Any]:
    """Measure what a token costs around an engine that computes nothing: processor time of all processes."""
    port_base = args.port_base + 10
    instance = Instance(f"bench-{port_base}", log=directory / "up-null.log")
    await instance.start("--engine", engine, *args.up, port_base=port_base)
    try:
        base = instance.address.http
        model = await model_of(base)
        await run_level(base, model, streams, 1, 8, -1000)
        before, began = cpu.seconds(instance.pid), time.monotonic()
        found = await run_level(base, model, streams, BUS_TURNS, tokens, 0)
        elapsed, after = time.monotonic() - began, cpu.seconds(instance.pid)
    finally:
        await instance.stop()
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    total = streams * BUS_TURNS * tokens
    return {
        "engine": engine, "streams": streams, "tokens_per_s": round(found.tokens_per_s, 1),
        "ttft_p50_ms": round(found.ttft_p50_ms, 1), "itl_p50_ms": round(found.itl_p50_ms, 2),
        "cpu_us_per_token": round(sum(used.values()) / total * 1e6, 1),
        "cpu_us_per_token_by_process": {k: round(v / total * 1e6, 1) for k, v in sorted(used.items()) if v > 0},
        "cores_busy": round(sum(used.values()) / elapsed, 2),
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=120)
    _table(console, "Whole system over HTTP", result["levels"])
    _table(console, "Time per hop", [{"hop": k, **v} for k, v in result["hops"].items()])
    rows = [{k: v for k, v in row.items() if not isinstance(v, dict)} for row in result["bus"]]
    _table(console, "Cost of the bus: an engine that does nothing", rows)


def _table(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    table = Table(*(name.replace("_", " ") for name in rows[0]), title=title, title_justify="left")
    for row in rows:
        table.add_row(*(str(v) for v in row.values()))
    console.print(table)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--engine", default="auto", help="auto, native or torch (the real model), scripted[:FILE] or null[:SPEC]"
    )
    parser.add_argument("--null-engine", action="append", default=None, help="for the cost of the bus; may be repeated")
    parser.add_argument("--levels", type=lambda s: tuple(map(int, s.split(","))), default=LEVELS)
    parser.add_argument("--per-stream", type=int, default=0, help="requests per stream; 0: by level")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--bus-streams", type=int, default=64)
    parser.add_argument("--bus-tokens", type=int, default=64)
    parser.add_argument("--port-base", type=int, default=18700)
    parser.add_argument("--quick", action="store_true", help="a smoke test: two small levels")
    parser.add_argument("--up", action="append", default=[], help="one more argument for `headrace up`")
    return parser


async def _main(args: argparse.Namespace) -> dict[str, Any]:
    if args.quick:
        args.levels, args.tokens, args.bus_streams, args.bus_tokens = (1, 2), 8, 4, 16
    engines = args.null_engine or (["null"] if args.quick else ["null", "null:decode_s=0.005"])
    directory = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    result = {"check": "bench"} | await real(args, directory)
    result["bus"] = [await bus(args, directory, engine, args.bus_streams, args.bus_tokens) for engine in engines]
    return result | {"ok": result["exit_code"] == 0}


def main() -> int:
    """Run the command line."""
    args = _arguments().parse_args()
    try:
        result = asyncio.run(_main(args))
        show(result)
    except (InstanceFailed, LoadFailed, httpx.HTTPError, TimeoutError) as exc:
        result = {"check": "bench", "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
