"""`python -m bench.engine`: the engine alone, the peers' engines alone, and what the system around ours costs.

Each configuration of ours runs in a process of its own (threads are settled before the first product). Its greedy
texts must be the same alone and together before any speed counts. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench import engine_peers, servers, targets, whole
from bench.client import LoadFailed
from bench.load import GateFailed
from bench.questions import ROOT
from bench.servers import PeerMissing, ServerFailed
from headrace.fetch import ensure_model

FEW_ROWS = 16  # for runners that are only shown beside the one that counts: more of them takes minutes


class ChildFailed(Exception):
    """Raised when the process of a configuration fails; the message ends with the end of its output."""


def child(command: Sequence[str], name: str) -> dict[str, Any]:
    """Run a process whose last line is a JSON object.

    Raises:
        ChildFailed: if it ends otherwise.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = done.stdout.strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except ValueError:
        found = {}
    if done.returncode or not found.get("ok"):
        raise ChildFailed(f"{name}: {found.get('error') or (done.stderr or done.stdout)[-1500:]}")
    return found


def configurations(args: argparse.Namespace) -> list[tuple[str, int, tuple[int, ...], int]]:
    """Return runner, threads, rows and repetitions of each process: the first runner in full, the others shortly."""
    most = max(args.threads)
    out = [(args.runners[0], threads, args.rows, 2) for threads in args.threads]
    few = tuple(rows for rows in args.rows if rows <= FEW_ROWS) or args.rows[:1]
    return out + [(runner, most, few, 1) for runner in args.runners[1:]]


def ours(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each configuration in a process of its own.

    Raises:
        ChildFailed: if one of them fails.
    """
    found = []
    for runner, threads, rows, repetitions in configurations(args):
        command = [sys.executable, "-m", "bench.engine_child", "--model", str(args.model), "--runner", runner]
        command += ["--threads", str(threads), "--rows", ",".join(map(str, rows)), "--repetitions", str(repetitions)]
        command += ["--tokens", str(args.tokens), "--prefill", ",".join(map(str, args.prefill))]
        row = child(command, f"{runner}, {threads} threads")
        found.append(row)
        print(f"  {runner}, {threads} threads: decode {row['decode']}, prefill {row['prefill']}", flush=True)
    return found


def best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row that counts: the first runner with the most threads."""
    return max((r for r in rows if r["runner"] == rows[0]["runner"]), key=lambda r: int(r["threads"]))


def ratios(mine: dict[str, Any], peers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ours over the peers for every figure that both have."""
    out = []
    for what in ("decode", "prefill"):
        for number, value in mine[what].items():
            theirs = {name: row[what][number] for name, row in peers.items() if number in row[what]}
            wanted = [targets.ENGINE.get((what, int(number)))]
            if (what, int(number)) == ("prefill", targets.LONG):
                wanted.append(targets.PREFILL_VLLM)
            for target in wanted:
                found = targets.ratio("tokens_per_s", value, theirs, target.peer if target else "")
                if found is None:
                    continue
                row = {"what": what, "number": int(number), "ours": value, "over": found.peer}
                row |= {"theirs": theirs[found.peer], "ratio": round(found.value, 3)}
                out.append(row if target is None else row | {"target": str(target), "met": target.met(found.value)})
    return out


def show(result: dict[str, Any]) -> None:
    """Print what was measured, with the target beside each ratio that has one."""
    console = Console(width=140)
    table = Table("runner", "threads", "figure", "value", title="Engine alone")
    for row in result["ours"] + list(result["peers"].values()):
        for what, unit in (("decode", "rows"), ("prefill", "tokens")):
            for number, value in row[what].items():
                table.add_row(row["runner"], str(row["threads"]), f"{what}, {number} {unit}, tok/s", f"{value:.1f}")
        for figure in ("load_to_first_token_s", "rss_mb"):
            if figure in row:
                table.add_row(row["runner"], str(row["threads"]), figure, f"{row[figure]:.2f}")
    console.print(table)
    table = Table("what", "ours", "theirs", "ratio", "over", "target", "met", title="Ratios")
    for row in result["ratios"]:
        cells = [f"{row['what']} {row['number']}", f"{row['ours']:.1f}", f"{row['theirs']:.1f}", f"{row['ratio']:.2f}"]
        table.add_row(*cells, row["over"], row.get("target", ""), {True: "yes", False: "no"}.get(row.get("met"), ""))
    for name, figure in result.get("system", {}).items():
        if isinstance(figure, dict) and "target" in figure:
            cells = [name, "", "", f"{figure['value']:.3f}", "", figure["target"], "yes" if figure["met"] else "no"]
            table.add_row(*cells)
    console.print(table)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _arguments() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument(
        "--runners", type=_names, default=("native", "torch:bfloat16", "torch:float32"), help="the first one counts"
    )
    parser.add_argument("--threads", type=_numbers, default=tuple(sorted({1, cores})))
    parser.add_argument("--rows", type=_numbers, default=(1, 4, 16, 64))
    parser.add_argument("--prefill", type=_numbers, default=(128, 1024), help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each row")
    parser.add_argument("--peers", type=_names, default=("llama", "vllm"), help="empty: none")
    parser.add_argument("--peers-dir", type=Path, default=servers.peers_directory())
    parser.add_argument("--need-peers", action="store_true", help="a missing peer is an error, not a line")
    parser.add_argument("--parts", type=_names, default=("ours", "peers", "system"))
    parser.add_argument("--streams", type=int, default=16, help="of the whole system beside the engine alone")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--port-base", type=int, default=18780)
    parser.add_argument("--up", action="append", default=[], help="one more argument for `headrace up`")
    return parser


def peers(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure the peers' engines; one that is not installed is left out with a line.

    Raises:
        PeerMissing: if one is not installed and all are needed.
    """
    measure = {"llama": engine_peers.llama, "vllm": engine_peers.vllm}
    found: dict[str, dict[str, Any]] = {}
    for name in args.peers:
        try:
            found[name] = measure[name](args.peers_dir, args.model, args.rows, args.prefill, args.tokens)
        except PeerMissing as exc:
            if args.need_peers:
                raise
            print(f"  {exc}", flush=True)
        else:
            print(f"  {name}: decode {found[name]['decode']}, prefill {found[name]['prefill']}", flush=True)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the parts that are asked for."""
    args.model = args.model or ensure_model()
    mine = ours(args) if "ours" in args.parts else []
    result: dict[str, Any] = {"check": "bench-engine", "ok": True, "ours": mine}
    result["peers"] = peers(args) if "peers" in args.parts else {}
    result["ratios"] = ratios(best(mine), result["peers"]) if mine else []
    if "system" in args.parts:
        directory = Path(tempfile.mkdtemp(prefix="headrace-engine-"))
        result["system"] = asyncio.run(whole.measure(args, args.runners[0], directory))
    missed = missing(result)
    return result | {"missed": missed, "ok": not missed}


def missing(result: dict[str, Any]) -> list[str]:
    """Return the figures that miss their target, by name."""
    rows = {f"{r['what']} {r['number']} over {r['over']}": r for r in result["ratios"]}
    rows |= {name: row for name, row in result.get("system", {}).items() if isinstance(row, dict)}
    if result.get("ours"):
        mine = best(result["ours"])
        rows |= {name: {"met": target.met(mine[name])} for name, target in targets.ALONE.items() if name in mine}
    return [name for name, row in rows.items() if row.get("met") is False]


def main() -> int:
    """Run the command line."""
    args = _arguments().parse_args()
    failures = (ChildFailed, PeerMissing, ServerFailed, LoadFailed, GateFailed, httpx.HTTPError, OSError, TimeoutError)
    try:
        result = measure(args)
        show(result)
    except failures as exc:
        result = {"check": "bench-engine", "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
