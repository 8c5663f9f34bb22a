"""`python -m bench.failover`: how long does a client's stream stand still when the process that decodes it dies?

Streams run over HTTP; one decode process is killed (SIGKILL) or frozen (SIGSTOP) under them. The gap is the longest
silence that any client sees from then on. One prompt of a moved stream must be computed again, which no failover can
save: what that takes alone is measured after each round, and its median is taken off once, however many streams moved.
Requests are cold, or warm: those ask for warm failover, and a survivor loads what has been stored of them meanwhile.
Each text is compared with that of an undisturbed run. Where NVIDIA Dynamo is installed (`scripts/peers.sh`), the same
is done to its mocker, and both serve 64 streams at the same simulated pace. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.client import LoadFailed
from bench.dynamo import Dynamo
from bench.failover_rounds import DynamoVictims, OurVictims, Round, Rounds, Victims
from bench.load import measure, one
from bench.servers import PeerMissing, ServerFailed, peers_directory
from bench.stats import percentile
from chaos.instance import Address, Instance, InstanceFailed, leftovers
from chaos.workload import FILLER

KILL_OVER_MS = 60.0  # beyond one prefill of what has moved
STOP_OVER_MS = 1500.0
TEMPLATE = 40  # bytes around a prompt
LOADED_SHARE = 0.8  # of the moved prompts' blocks: less was not a warm failover
WAYS = ("cold", "warm")
Level = tuple[str, str, int, int]  # way, fault, streams, rounds


def row(system: str, engine: str, level: Level, rounds: list[Round]) -> dict[str, Any]:
    """Sum rounds up."""
    way, fault, streams, _ = level
    gaps = [r.gap_ms for r in rounds]
    out: dict[str, Any] = {
        "system": system, "engine": engine, "way": way, "fault": fault, "streams": streams, "rounds": len(rounds),
        "gap_p50_ms": round(percentile(gaps, 0.5), 1), "gap_p99_ms": round(percentile(gaps, 0.99), 1),
        "gap_max_ms": round(max(gaps, default=0.0), 1), "failed": sum(r.failed for r in rounds),
        "differing": sum(r.differing for r in rounds), "compared": sum(r.compared for r in rounds),
        "stuck": sum(r.stuck for r in rounds), "moved": sum(r.moved for r in rounds),
    }  # fmt: skip
    if system == "headrace":
        prefills = [r.one_prefill_ms for r in rounds if r.one_prefill_ms > 0]
        prefill = percentile(prefills, 0.5) if prefills else 0.0  # where none is known nothing is taken off
        # Never more than the survivor really took: it may have found blocks that it could load.
        over = [r.gap_ms - min(prefill, r.again_ms) for r in rounds]
        bound = KILL_OVER_MS if fault == "kill" else STOP_OVER_MS
        for name in ("again_ms", "noticed_ms", "placed_ms", "shown_ms"):
            out[f"{name.removesuffix('_ms')}_p50_ms"] = round(percentile([getattr(r, name) for r in rounds], 0.5), 1)
        out |= {
            "one_prefill_ms": round(prefill, 1), "over_p50_ms": round(percentile(over, 0.5), 1),
            "over_p99_ms": round(percentile(over, 0.99), 1), "bound_ms": bound,
            "met": bool(over) and percentile(over, 0.99) <= bound,
        }  # fmt: skip
        if way == "warm":
            moving = [r.loaded_share for r in rounds if r.moved]
            out["loaded_share_p50"] = round(percentile(moving, 0.5), 3) if moving else 0.0
    return out


async def rounds_of(
    victims: Victims, base: str, model: str, levels: list[Level], tokens: int, seed: int, say: Callable[[str], None]
) -> list[tuple[Level, list[Round]]]:
    """Run all levels against one running system."""
    out = []
    for level in levels:
        way, fault, streams, count = level
        runner = Rounds(
            victims, base, model, streams=streams, tokens=tokens, fault=fault, seed=seed, say=say, warm=way == "warm"
        )
        out.append((level, [await runner.one(number) for number in range(count)]))
    return out


async def ours(args: argparse.Namespace, engine: str, levels: list[Level], tokens: int) -> list[dict[str, Any]]:
    """Hurt a private instance of ours."""
    say = print if args.verbose else lambda line: None
    async with instance(args, engine) as where:
        nats = await where.connect("bench-failover")
        try:
            victims = OurVictims(nats, where)
            await victims.start()
            async with where.client() as http:
                model = (await http.get("/v1/models")).json()["data"][0]["id"]
            await one(where.http, model, "Good morning.", 8)
            found = await rounds_of(victims, where.http, model, levels, tokens, args.seed, say)
        finally:
            await nats.close()
    return [row("headrace", engine, level, rounds) for level, rounds in found]


class instance:
    """`async with instance(args, engine) as address`: a private instance that must leave nothing behind."""

    def __init__(self, args: argparse.Namespace, engine: str, *up: str) -> None:
        self._args, self._engine, self._up = args, engine, up
        self._name = f"failover-{args.port_base}"
        self._instance = Instance(self._name, log=Path(args.logs) / f"{self._name}.log")

    async def __aenter__(self) -> Address:
        """Start it."""
        flags = ("--engine", self._engine, *self._args.up, *self._up)
        await self._instance.start(*flags, port_base=self._args.port_base)
        return self._instance.address

    async def __aexit__(self, kind: Any, *_: object) -> None:
        """Stop it.

        Raises:
            InstanceFailed: if it does not stop cleanly.
        """
        code, left = await self._instance.stop(), leftovers(self._name)
        if kind is None and (code or left):
            raise InstanceFailed(f"stopped with exit code {code}, left {left}:\n{self._instance.tail()}")


async def pace_of(base: str, model: str, tokens: int) -> tuple[float, float]:
    """Return what one stream alone sees: seconds to the first text and between texts."""
    timings = [await one(base, model, text(f"pace {n}"), tokens) for n in range(5)]
    itl = statistics.median(gap for t in timings for gap in t.itl_s)
    return statistics.median(t.ttft_s for t in timings), itl


def text(name: str) -> str:
    """Return a prompt of about 110 tokens that begins unlike any other."""
    return f"{name}: " + FILLER * 3 + "What follows from that? Answer at length."


async def peer(args: argparse.Namespace, levels: list[Level]) -> dict[str, Any]:
    """Hurt Dynamo, then compare throughput at its own pace.

    Raises:
        PeerMissing: if it is not installed.
    """
    say = print if args.verbose else lambda line: None
    directory = args.peers_dir
    prompts = [text(f"load {n}") for n in range(args.load_streams * 4)]
    async with Dynamo(directory) as dynamo:
        ttft_s, itl_s = await pace_of(dynamo.base, "tiny", 64)
        before = await measure(dynamo.base, "tiny", prompts, args.load_streams, 64)
        victims = DynamoVictims(dynamo)
        found = await rounds_of(victims, dynamo.base, "tiny", levels, args.null_tokens, args.seed, say)
    rows = [row("dynamo", "mocker", level, rounds) for level, rounds in found]
    # The mocker's own pace for ours: a step as long as one of its tokens, a prompt as long as its first token.
    # A null engine's tokens are bytes: those of the prompt and of the template around it.
    per_token = max(0.0, ttft_s - itl_s) / (len(text("load 000")) + TEMPLATE)
    engine = f"null:decode_s={itl_s:.5f},prefill_s_per_token={per_token:.7f}"
    async with instance(args, engine) as where, where.client() as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        await one(where.http, model, "Good morning.", 8)
        mine = [await measure(where.http, model, prompts, args.load_streams, 64) for _ in range(args.load_turns)]
    async with Dynamo(directory) as dynamo:
        after = [await measure(dynamo.base, "tiny", prompts, args.load_streams, 64) for _ in range(args.load_turns)]
    ours_tps = statistics.median(level.tokens_per_s for level in mine)
    theirs_tps = statistics.median([before.tokens_per_s, *(level.tokens_per_s for level in after)])
    load = {
        "streams": args.load_streams, "engine": engine, "dynamo_ttft_ms": round(ttft_s * 1000, 1),
        "dynamo_itl_ms": round(itl_s * 1000, 2), "headrace_tokens_per_s": round(ours_tps, 1),
        "dynamo_tokens_per_s": round(theirs_tps, 1), "ratio": round(ours_tps / theirs_tps, 3),
        "target": 1.0, "met": ours_tps >= theirs_tps,
    }  # fmt: skip
    return {"rows": rows, "load": load}


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    names = ("system", "engine", "way", "fault", "streams", "rounds", "gap_p50_ms", "gap_p99_ms", "one_prefill_ms",
             "over_p99_ms", "bound_ms", "met", "failed", "differing", "stuck")  # fmt: skip
    table = Table(*(n.replace("_", " ") for n in names), title="Longest gap that a client sees", title_justify="left")
    for each in rows:
        table.add_row(*(str(each.get(n, "")) for n in names))
    Console(width=180).print(table)


def levels_of(args: argparse.Namespace, rounds: dict[tuple[str, int], int], ways: tuple[str, ...]) -> list[Level]:
    """Return the levels asked for, with their rounds."""
    out = []
    for way in ways:
        for (fault, streams), count in rounds.items():
            if fault in args.faults and streams in args.streams:
                out.append((way, fault, streams, 1 if args.quick else args.rounds or count))
    return out


def not_met(rows: list[dict[str, Any]]) -> list[str]:
    """Name our rows that miss their bound, and the warm ones whose survivors computed instead of loading."""
    names = {id(r): f"{r['engine']}, {r['way']} {r['fault']}, {r['streams']} streams" for r in rows}
    missed = [names[id(r)] for r in rows if not r["met"]]
    return missed + [
        f"{names[id(r)]}: loaded {r['loaded_share_p50']} of the prompts"
        for r in rows if r.get("loaded_share_p50", 1.0) < LOADED_SHARE
    ]  # fmt: skip


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.failover", description=__doc__)
    parser.add_argument(
        "--engines", type=lambda s: s.split(";") if s else [], default=None,
        help="engines of ours, by semicolons (default: auto and a null engine of the mocker's pace)",
    )  # fmt: skip
    parser.add_argument("--faults", type=lambda s: tuple(s.split(",")), default=("kill", "stop"))
    parser.add_argument("--ways", type=lambda s: tuple(s.split(",")), default=WAYS, help="of ours: cold, warm")
    parser.add_argument("--streams", type=lambda s: tuple(map(int, s.split(","))), default=(1, 16))
    parser.add_argument(
        "--kills", type=int, default=100, help="at 16 streams with the null engine, for the 99th percentile"
    )
    parser.add_argument("--rounds", type=int, default=0, help="of every level; 0: by level")
    parser.add_argument("--tokens", type=int, default=64, help="per stream, with the real model")
    parser.add_argument("--null-tokens", type=int, default=160, help="per stream, with engines that only keep a pace")
    parser.add_argument("--load-streams", type=int, default=64)
    parser.add_argument("--load-turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port-base", type=int, default=18720)
    parser.add_argument("--logs", default="", help="directory for the instances' logs")
    parser.add_argument("--up", action="append", default=[], help="one more argument for `headrace up`")
    parser.add_argument("--no-peer", action="store_true", help="leave Dynamo out")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one round of each level")
    parser.add_argument("--verbose", action="store_true", help="a line per round")
    return parser


NULL = "null:decode_s=0.0058,prefill_s_per_token=0.0001"  # about Dynamo's mocker: tokens are bytes here


async def _main(args: argparse.Namespace) -> dict[str, Any]:
    args.logs = args.logs or tempfile.mkdtemp(prefix="headrace-failover-")
    engines = args.engines if args.engines is not None else ["auto", NULL]
    rows: list[dict[str, Any]] = []
    for engine in engines:
        real = not engine.startswith(("null", "scripted"))
        counts = {("kill", 1): 10, ("kill", 16): 10 if real else args.kills, ("stop", 1): 3, ("stop", 16): 3}
        rows += await ours(args, engine, levels_of(args, counts, args.ways), args.tokens if real else args.null_tokens)
    result: dict[str, Any] = {"check": "failover"}
    if not args.no_peer:
        counts = {("kill", 16): 10, ("stop", 16): 1}
        try:
            found = await peer(args, levels_of(args, counts, ("cold",)))
            rows += found["rows"]
            result["load"] = found["load"]
        except PeerMissing as exc:
            print(f"left out: {exc}", flush=True)
            result["left_out"] = str(exc)
        except (ServerFailed, LoadFailed, httpx.HTTPError, TimeoutError) as exc:
            print(f"the peer failed: {exc}", flush=True)
            result["peer_error"] = f"{type(exc).__name__}: {exc}"
    show(rows)
    mine = [r for r in rows if r["system"] == "headrace"]
    missed = not_met(mine)
    if "load" in result and not result["load"]["met"]:
        missed.append("throughput beside Dynamo")
    valid = all(r["failed"] == 0 and r["differing"] == 0 and r["stuck"] == 0 for r in mine)
    return result | {"rows": rows, "missed": missed, "ok": valid and bool(rows) and not missed}


def run(main: Callable[[], Coroutine[Any, Any, dict[str, Any]]], name: str) -> int:
    """Run a bench and print its figures as the last line."""
    result: dict[str, Any]
    try:
        result = asyncio.run(main())
    except (InstanceFailed, ServerFailed, LoadFailed, httpx.HTTPError, TimeoutError, OSError) as exc:
        result = {"check": name, "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def main() -> int:
    """Run the command line."""
    args = _arguments().parse_args()
    args.peers_dir = peers_directory()
    return run(lambda: _main(args), "failover")


if __name__ == "__main__":
    sys.exit(main())
