"""`python -m bench.kv`: what the KV store is worth, and what it costs, on one machine.

- ttft: time to the first token of prompts that are computed, found in the device pool, in host memory after the pool
  had to make room, and on the disk after a restart of everything.
- other: the same of prompts that another host has computed; the two are processes of this machine and speak TCP.
- rates: megabytes per second from host to device memory and from the disk, with and without verification, beside a
  plain copy and plain reads in the same process.
- cost: tokens per second of running streams while host memory, and the disk below it, take what is new, against both
  frozen, in pairs; and the store's share of all processor time, which the machine's wavering speed does not move.

A text that differs, or wrong bytes, and no figure is printed. The last line is one JSON object; the exit code is 1 if
something failed or a target is missed. An open target (`null`: few measurements, or an interval around it) is no miss.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.client import LoadFailed
from bench.kv import cost, other_host, plan, rates, ttft
from bench.load import GateFailed
from bench.questions import ROOT
from bench.servers import ServerFailed
from bench.targets import LONG
from headrace.fetch import ensure_model
from kvstore.block import BLOCK_TOKENS
from kvstore.errors import KvError
from models.config import ModelConfig
from models.source import open_model

PARTS = ("ttft", "other", "rates", "cost")
NOT_MEASURED = {"GPU": "not measured"}
QUICK: dict[str, Any] = {"lengths": (256, LONG), "repetitions": 2, "turns": 3, "rounds": 2, "blocks": 64}
FAILURES = (
    ServerFailed, LoadFailed, GateFailed, rates.WrongBytes, KvError, httpx.HTTPError, OSError, TimeoutError, ValueError,
)  # fmt: skip


def block_nbytes(config: ModelConfig) -> int:
    """Return the bytes of a block in the layout of the compiled engine: keys and values in 16 bits, all layers."""
    return config.num_layers * BLOCK_TOKENS * config.num_kv_heads * config.head_dim * 2 * 2


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Measure the parts that are asked for."""
    began = time.monotonic()
    with open_model(args.model) as source:
        config = source.config
    lengths = plan.fitting(args.lengths, config.context_length, args.tokens)
    result: dict[str, Any] = {"check": "bench-kv", "quick": args.quick, "lengths": lengths}
    if lengths != sorted(args.lengths):
        result["note"] = f"the model's window holds {config.context_length} tokens"
        print(f"  {result['note']}: prompts of {', '.join(map(str, lengths))} tokens", flush=True)
    args.lengths = lengths
    if "rates" in args.parts:
        place = directory / "rates"
        place.mkdir()
        result["rates"] = rates.measure(place, args.blocks, block_nbytes(config), args.turns)
        print(f"  rates measured after {time.monotonic() - began:.0f} s", flush=True)
    if "ttft" in args.parts:
        result["ttft"] = asyncio.run(ttft.measure(args, directory))
        print(f"  first tokens measured after {time.monotonic() - began:.0f} s", flush=True)
    if "other" in args.parts:
        result["other"] = asyncio.run(other_host.measure(args, directory))
        print(f"  the other host measured after {time.monotonic() - began:.0f} s", flush=True)
    if "cost" in args.parts:
        result["cost"] = asyncio.run(cost.measure(args, directory))
    return result | NOT_MEASURED | {"took_s": round(time.monotonic() - began, 1)} | judge(result)


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """Return which targets are missed and which are open, by name, and whether none is missed."""
    found: dict[str, bool | None] = {}
    for row in result.get("rates", []):
        for name in (rates.UNVERIFIED, rates.VERIFIED):
            found[f"{row['path']}, {name}"] = row[name]["met"]
    for row in [*result.get("ttft", {}).get("rows", []), *result.get("other", [])]:
        if "met" in row:
            found[f"{row['path']}, {row['length']} tokens"] = row["met"]
    for row in result.get("cost", []):
        found[f"write-back, {row['tier']}"] = row["met"]
    missed = [name for name, met in found.items() if met is False]
    return {"missed": missed, "open": [name for name, met in found.items() if met is None], "ok": not missed}


COLUMNS: dict[str, dict[str, str]] = {
    "rates": {
        "path": "path", "plain_mb_s": "plain MB/s", "unverified_mb_s": "unverified", "verified_mb_s": "verified",
        "unverified": "unverified over plain", "verified": "verified over plain", "plain_read_from_disk_mb": "MB read",
    },
    "ttft": {
        "phase": "restart", "length": "tokens", "path": "path", "samples": "n", "ttft_ms": "median ms",
        "ttft_min_ms": "least", "ttft_max_ms": "most", "cached_tokens": "cached", "loaded_blocks": "loaded",
        "disk_blocks": "of disk", "read_mb": "MB read", "over_cold": "over cold", "target": "target", "met": "met",
    },
    "other": {
        "phase": "where", "length": "tokens", "path": "path", "samples": "n", "ttft_ms": "median ms",
        "ttft_min_ms": "least", "ttft_max_ms": "most", "cached_tokens": "cached", "loaded_blocks": "loaded",
        "disk_blocks": "fetched", "read_mb": "MB over TCP", "over_cold": "over cold",
    },
    "cost": {
        "tier": "tier", "pairs": "pairs", "tokens_per_s_off": "tokens/s off", "tokens_per_s_on": "on", "ratio": "ratio",
        "low": "low", "high": "high", "target": "target", "met": "met", "blocks_per_s": "blocks/s",
        "disk_blocks_per_s": "to disk", "cpu_ms_per_token_off": "cpu ms off", "cpu_ms_per_token_on": "on ",
        "store_share_off": "store's share off", "store_share_on": " on",
    },
}  # fmt: skip
TITLES = {
    "rates": "Rates", "ttft": "Time to the first token", "other": "Time to the first token, from another host",
    "cost": "Streams with and without write-back",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=120)
    for part, columns in COLUMNS.items():
        found = result.get(part, [])
        rows = found["rows"] if isinstance(found, dict) else found
        if not rows:
            continue
        table = Table(*columns.values(), title=TITLES[part], title_justify="left")
        for row in rows:
            table.add_row(*(_cell(row.get(name, "")) for name in columns))
        console.print(table)
    if not result.get("ttft", {}).get("reads_are_counted", True):
        console.print("The system does not tell what it reads from this disk: nothing shows that it was read.")
    for name in ("missed", "open"):
        if result[name]:
            console.print(f"{name}: {'; '.join(result[name])}", highlight=False)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return f"{value['over_plain']} ({value['target']})"
    return {True: "yes", False: "NO", None: "open"}[value] if value is None or isinstance(value, bool) else str(value)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.kv", description=__doc__)
    parser.add_argument("--parts", type=lambda s: tuple(s.split(",")), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--lengths", type=_numbers, default=(LONG, 4 * LONG), help="tokens of the prompts, about")
    parser.add_argument("--repetitions", type=int, default=4, help="prompts of each length, from each tier")
    parser.add_argument("--tokens", type=int, default=8, help="output tokens of these")
    parser.add_argument("--blocks", type=int, default=256, help="that a copy or read moves")
    parser.add_argument("--turns", type=int, default=7, help="of each copy or read")
    parser.add_argument("--rounds", type=int, default=12, help="pairs with and without write-back")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--per-stream", type=int, default=3, help="requests of a stream in each round")
    parser.add_argument("--cost-tokens", type=int, default=64, help="output tokens of each of these")
    parser.add_argument("--quick", action="store_true", help="a smoke test: shorter prompts, few repetitions")
    parser.add_argument("--directory", type=Path, default=ROOT / ".headrace" / "bench", help="on the disk to measure")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--port-base", type=int, default=18860)
    parser.add_argument("--up", action="append", default=[], help="one more argument for `headrace up`")
    return parser


@contextmanager
def _place(parent: Path) -> Iterator[Path]:
    """Make a folder for blocks, which are as telling as prompts; it goes at the end, and the logs with it."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kv-", dir=parent) as name:
        yield Path(name)


def main() -> int:
    """Run the command line."""
    args = _arguments().parse_args()
    if args.quick:
        vars(args).update(QUICK)
    try:
        args.model = args.model or ensure_model()
        with _place(args.directory) as directory:
            result = measure(args, directory)
        show(result)
    except FAILURES as exc:
        result = {"check": "bench-kv", "ok": False, "error": f"{type(exc).__name__}: {exc}", **NOT_MEASURED}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
