"""`python -m bench.peers`: the whole system against other servers, in one run: same prompts, same load, same cores.

Each repetition starts one server after the other, so that whatever else the machine does hits all of them; figures are
medians over the repetitions. Ours must give the same texts alone and beside others, or no speed is printed. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import load, servers, targets
from bench.client import LoadFailed
from bench.load import GateFailed
from bench.questions import ROOT, long_text
from bench.servers import OURS, PeerMissing, Server, ServerFailed, ServerSpec
from headrace.fetch import ensure_model

GATE_PROMPTS, GATE_TOKENS = 5, 24
LLAMA_CONTEXT = 20_480  # 16 slots of 1,280 tokens: a prompt of 1,024 and its answer fit
FIGURES = ("tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_max_over_p50")


def requests_of(streams: int, tokens: int) -> int:
    """Return how many requests a level has: a median of more than one where that costs little."""
    short = tokens <= 2 * targets.SHORT
    return streams * ((6 if short else 2) if streams == 1 else 2 if streams <= 4 and short else 1)


def specs(args: argparse.Namespace) -> list[ServerSpec]:
    """Return the servers asked for, ours first.

    Raises:
        PeerMissing: if one of them is not installed.
    """
    directory, threads = args.peers_dir, len(os.sched_getaffinity(0))
    found = [servers.ours(args.model, args.port_base, args.ours)]
    if "llama" in args.peers:
        found.append(servers.llama(directory, args.model, args.port_base + 20, threads, LLAMA_CONTEXT))
    if "vllm" in args.peers:
        found.append(servers.vllm(directory, args.port_base + 30))
    return found


class Schedule:
    """Which levels a repetition runs: all but the heaviest, which run once, and none that would break the limit.

    Long prompts at many streams take the slowest peer minutes: at 16 streams they run in the first repetition, which
    tells what more of them will cost, at 64 in the last.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._levels = [(tokens, streams) for tokens in args.prompts for streams in args.streams]
        self._repetitions = args.repetitions
        self._limit_s = args.limit_min * 60
        self._began = time.monotonic()
        self.skipped: list[str] = []

    def levels(self, repetition: int, costs: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
        """Return the levels of a repetition.

        Args:
            repetition: from 0.
            costs: seconds that each level took so far, summed over the servers; the unknown is scaled by its streams.
        """
        last = self._repetitions - 1
        only = {(t, s): 0 if s <= 16 else last for t, s in self._levels if t > 2 * targets.SHORT and s >= 16}
        out, left = [], self._limit_s - (time.monotonic() - self._began)
        for level in self._levels:
            if only.get(level, repetition) != repetition:
                continue
            cost = costs.get(level) or max((costs[k] * level[1] / k[1] for k in costs if k[0] == level[0]), default=0.0)
            if cost > left:
                self.skipped.append(f"{level[0]} tokens × {level[1]} streams in repetition {repetition + 1}")
                continue
            left -= cost
            out.append(level)
        return out


async def visit(
    spec: ServerSpec, levels: Sequence[tuple[int, int]], args: argparse.Namespace, log: Path, first: int
) -> dict[str, Any]:
    """Start a server, check it, run the levels, and stop it.

    Raises:
        GateFailed: if ours gives other texts beside others than alone.
    """
    out: dict[str, Any] = {"levels": {}}
    async with Server(spec, log) as server:
        out["start_s"] = round(server.start_s, 3)
        warm = [long_text(first + i, targets.SHORT) for i in range(GATE_PROMPTS)]
        differing = await load.differing(server.base, server.model, warm, min(GATE_TOKENS, args.tokens))
        out["differing"] = differing
        if differing and spec.name == OURS:
            raise GateFailed("ours, beside others", differing, len(warm))
        first += len(warm)
        for tokens, streams in levels:
            count = requests_of(streams, tokens)
            prompts = [long_text(first + i, tokens) for i in range(count)]
            first += count
            began = time.monotonic()
            found = await load.measure(server.base, server.model, prompts, streams, args.tokens)
            row = found.row() | {"itl_max_over_p50": round(found.itl_max_ms / max(found.itl_p50_ms, 1e-3), 2)}
            out["levels"][tokens, streams] = row | {"took_s": round(time.monotonic() - began, 2)}
            print(f"  {spec.name}: {tokens} tokens × {streams}: {found.tokens_per_s:.1f} tokens/s", flush=True)
        out["pss_mb"] = round(server.pss_mb(), 1)
    return out


async def compare(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run all repetitions and sum them up."""
    found, schedule = specs(args), Schedule(args)
    visits: dict[str, list[dict[str, Any]]] = {spec.name: [] for spec in found}
    costs: dict[tuple[int, int], float] = {}
    began = time.monotonic()
    for spec in found:
        print(f"$ {spec.command}", flush=True)
    for repetition in range(args.repetitions):
        levels = schedule.levels(repetition, costs)
        for spec in found:
            print(f"repetition {repetition + 1}: {spec.name}", flush=True)
            log = directory / f"{spec.name}-{repetition}.log"
            # The numbers of prompts are the same for all servers, and other ones in each repetition.
            visits[spec.name].append(await visit(spec, levels, args, log, repetition * 10_000))
        for level in levels:
            costs[level] = sum(v[-1]["levels"][level]["took_s"] for v in visits.values())
    return {
        "levels": _level_rows(visits), "servers": _server_rows(visits), "skipped": schedule.skipped,
        "commands": {spec.name: spec.command for spec in found}, "took_s": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _level_rows(visits: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for level in dict.fromkeys(level for v in visits[OURS] for level in v["levels"]):
        figures = {
            name: targets.medians(v["levels"][level] for v in several if level in v["levels"])
            for name, several in visits.items()
        }
        repetitions = sum(level in v["levels"] for v in visits[OURS])
        row: dict[str, Any] = {"prompt": level[0], "streams": level[1], "repetitions": repetitions, "figures": figures}
        row["ratios"] = {
            name: _ratio(name, figures, targets.SERVER.get((*level, name))) for name in FIGURES if len(visits) > 1
        }
        rows.append(row)
    return rows


def _server_rows(visits: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    figures = {name: targets.medians(several) for name, several in visits.items()}
    rows: dict[str, Any] = {"figures": figures}
    if len(visits) > 1:
        rows["ratios"] = {
            "start_s": _ratio("start_s", figures, targets.START), "pss_mb": _ratio("pss_mb", figures, None)
        }  # fmt: skip
    return rows


def _ratio(name: str, figures: dict[str, dict[str, float]], target: targets.Target | None) -> dict[str, Any] | None:
    mine = figures[OURS].get(name)
    peers = {peer: row[name] for peer, row in figures.items() if peer != OURS and name in row}
    found = None if mine is None else targets.ratio(name, mine, peers, target.peer if target else "")
    if found is None:
        return None
    out: dict[str, Any] = {"over": found.peer, "ratio": round(found.value, 3)}
    return out if target is None else out | {"target": str(target), "met": target.met(found.value)}


def show(result: dict[str, Any]) -> None:
    """Print the figures and the ratios, with the target beside each that has one."""
    console, names = Console(width=150), list(result["commands"])
    table = Table("prompt", "streams", "figure", *names, "ratio", "over", "target", "met", title="Whole servers")
    for row in result["levels"]:
        for figure in FIGURES:
            shown = [f"{row['figures'][name].get(figure, float('nan')):.1f}" for name in names]
            table.add_row(str(row["prompt"]), str(row["streams"]), figure, *shown, *_cells(row["ratios"].get(figure)))
    for figure in ("start_s", "pss_mb"):
        shown = [f"{result['servers']['figures'][name].get(figure, float('nan')):.1f}" for name in names]
        table.add_row("", "", figure, *shown, *_cells(result["servers"].get("ratios", {}).get(figure)))
    console.print(table)
    for line in result["skipped"]:
        print(f"skipped for lack of time: {line}")


def _cells(ratio: dict[str, Any] | None) -> tuple[str, str, str, str]:
    if ratio is None:
        return "", "", "", ""
    met = {True: "yes", False: "no", None: ""}[ratio.get("met")]
    return f"{ratio['ratio']:.2f}", ratio["over"], ratio.get("target", ""), met


def draw(result: dict[str, Any], png: Path, directory: Path) -> str:
    """Draw the figures with whichever of our own and the peers' environments has matplotlib; "" if none has."""
    png.parent.mkdir(parents=True, exist_ok=True)
    for python in (Path(sys.executable), *(directory / name / "bin" / "python" for name in ("vllm", "llamacpp"))):
        command = [str(python), str(ROOT / "bench" / "chart.py"), str(png)]
        try:
            done = subprocess.run(command, input=json.dumps(result), text=True, capture_output=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return str(png)
    print("no picture: no environment has matplotlib (`pip install headrace[bench]`)")
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--peers", default="llama,vllm", help="which, by commas; empty: ours alone")
    parser.add_argument("--peers-dir", type=Path, default=servers.peers_directory(), help="where they are installed")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--streams", type=_numbers, default=(1, 4, 16, 64))
    parser.add_argument("--prompts", type=_numbers, default=(targets.SHORT, targets.LONG), help="tokens, about")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per request")
    parser.add_argument("--limit-min", type=float, default=24.0, help="levels that would take longer are left out")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; the default model without it")
    parser.add_argument("--port-base", type=int, default=18740)
    parser.add_argument("--png", type=Path, default=ROOT / ".headrace" / "bench" / "peers.png")
    parser.add_argument(
        "--ours", action="append", default=None, help="an argument for `headrace up` (default: --pool-tokens=20480)"
    )
    return parser


async def _main(args: argparse.Namespace) -> dict[str, Any]:
    args.peers = [name for name in args.peers.split(",") if name]
    if unknown := set(args.peers) - {"llama", "vllm"}:
        raise PeerMissing(", ".join(sorted(unknown)), args.peers_dir)
    args.model = args.model or ensure_model()
    # As many tokens as llama-server gets; vLLM's 2 GB hold more.
    args.ours = args.ours if args.ours is not None else [f"--pool-tokens={LLAMA_CONTEXT}"]
    result = await compare(args, Path(tempfile.mkdtemp(prefix="headrace-peers-")))
    show(result)
    told = [r for row in result["levels"] for r in row["ratios"].values()]
    told += list(result["servers"].get("ratios", {}).values())
    held = [r["met"] for r in told if r is not None and "met" in r]
    result["targets"] = {"held": sum(held), "of": len(held)}
    return {"check": "bench-peers", "ok": True, "png": draw(result, args.png, args.peers_dir)} | result


def main() -> int:
    """Run the command line."""
    args = _arguments().parse_args()
    try:
        result = asyncio.run(_main(args))
    except (PeerMissing, ServerFailed, LoadFailed, GateFailed, TimeoutError, OSError) as exc:
        result = {"check": "bench-peers", "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
