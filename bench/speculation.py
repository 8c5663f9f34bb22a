"""`python -m bench.speculation`: tokens per second with and without speculation, in pairs, on repetitive tasks.

The engine alone, in this process: each group of prompts runs with and without guesses, in alternating order. The ratio
of rates has a confidence interval by bootstrap over the groups; texts must be the same. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.inprocess import Engine, EngineFailed, Request, Shape, greedy, make_runner
from bench.questions import NoQuestions, default_path, read
from engine.speculation.lookup import PromptLookup
from headrace.fetch import ensure_model
from models.text import load_text

CATEGORIES = ("summarization", "translation")
LOWEST = 0.98  # of the lower bound: guesses may cost 2 % at most
FEWEST = 3  # pairs; of fewer, the interval says nothing
RESAMPLES = 4000
LONGEST_PROMPT = 1900  # tokens; the model's window less the answer


@dataclass(frozen=True, slots=True)
class Pair:
    """One group of requests, run both ways."""

    tokens: int
    plain_s: float
    guessing_s: float
    drafted: int
    accepted: int
    differing: int


def interval(pairs: Sequence[Pair], seed: int = 1) -> tuple[float, float, float]:
    """Return the ratio of rates (with over without) and its two-sided 95 % interval, by bootstrap over the pairs.

    Raises:
        ValueError: without pairs.
    """
    if not pairs:
        raise ValueError("no pairs, no ratio")
    draw = random.Random(seed)

    def ratio(of: Sequence[Pair]) -> float:
        return sum(p.plain_s for p in of) / sum(p.guessing_s for p in of)

    ratios = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return ratio(pairs), ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES)]


def groups_of(requests: Sequence[Request], streams: int, at_most: int) -> list[list[Request]]:
    """Return full groups of requests that run at once."""
    whole = [list(requests[at : at + streams]) for at in range(0, len(requests) - streams + 1, streams)]
    return whole[:at_most]


def timed(runner: Any, group: Sequence[Request], guess: bool) -> tuple[float, dict[Any, list[int]], dict[str, float]]:
    """Run a group; returns seconds from the arrival to the last id, the ids, and the engine's counters."""
    longest = max(len(r.ids) + r.sampling.max_tokens for r in group)
    options: dict[str, Any] = {"drafter": PromptLookup()} if guess else {}
    with Engine(runner, Shape(max_running=len(group)), longest=longest, **options) as engine:
        began = time.perf_counter()
        found = engine.run(group)
        return time.perf_counter() - began, found, engine.statistics


def pair(runner: Any, group: Sequence[Request], guess_first: bool) -> Pair:
    """Run a group both ways."""
    runs = {guess: timed(runner, group, guess) for guess in ((True, False) if guess_first else (False, True))}
    (plain_s, want, _), (guessing_s, got, counts) = runs[False], runs[True]
    return Pair(
        sum(map(len, want.values())), plain_s, guessing_s, int(counts["drafted_total"]), int(counts["accepted_total"]),
        sum(got[key] != ids for key, ids in want.items()),
    )  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each category at each number of streams."""
    model = args.model or ensure_model()
    runner = make_runner(args.runner, model, args.threads or len(os.sched_getaffinity(0)))
    text = load_text(model)
    questions = read(args.questions)
    rows: list[dict[str, Any]] = []
    for category in args.categories:
        asked = [q for q in questions if q.category == category]
        ids = [(q.id, text.chat_ids([{"role": "user", "content": q.text}], created=0)) for q in asked]
        requests = [greedy(f"q{number}", one, args.tokens) for number, one in ids if len(one) <= LONGEST_PROMPT]
        for streams in args.streams:
            groups = groups_of(requests, streams, args.groups if streams > 1 else args.singles)
            if not groups:
                print(f"  {category}: {len(requests)} prompts are no group of {streams}", flush=True)
                continue
            timed(runner, groups[0][:1], True)  # the first product of a kind takes longer
            again = [group for _ in range(args.rounds) for group in groups]
            pairs = [pair(runner, group, number % 2 == 1) for number, group in enumerate(again)]
            rows.append(summary(category, streams, pairs))
            print(f"  {rows[-1]}", flush=True)
    if not rows:
        raise NoQuestions(args.questions, f"no prompts of {', '.join(args.categories)}")
    differing = sum(row["differing"] for row in rows)
    held = all(row["met"] for row in rows)
    return {
        "check": "bench-speculation", "ok": differing == 0, "runner": args.runner, "questions": args.questions.name,
        "differing": differing, "target": f"lower bound ≥ {LOWEST}", "met": held, "rows": rows,
    }  # fmt: skip


def summary(category: str, streams: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the figures of one line."""
    value, low, high = interval(pairs)
    tokens = sum(p.tokens for p in pairs)
    drafted, accepted = sum(p.drafted for p in pairs), sum(p.accepted for p in pairs)
    return {
        "category": category, "streams": streams, "pairs": len(pairs), "tokens": tokens,
        "tokens_per_s_without": round(tokens / sum(p.plain_s for p in pairs), 1),
        "tokens_per_s_with": round(tokens / sum(p.guessing_s for p in pairs), 1),
        "ratio": round(value, 4), "low": round(low, 4), "high": round(high, 4),
        "met": len(pairs) >= FEWEST and low >= LOWEST,
        "drafted": drafted, "accepted": accepted, "differing": sum(p.differing for p in pairs),
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print the table; no speed when a text differs."""
    if not result["ok"]:
        return
    table = Table("task", "streams", "pairs", "without", "with", "ratio", "95 %", "guessed", "right", title="tokens/s")
    for row in result["rows"]:
        cells = [f"{row['tokens_per_s_without']:.1f}", f"{row['tokens_per_s_with']:.1f}", f"{row['ratio']:.3f}"]
        cells += [f"{row['low']:.3f} to {row['high']:.3f}", str(row["drafted"]), str(row["accepted"])]
        table.add_row(row["category"], str(row["streams"]), str(row["pairs"]), *cells)
    Console(width=120).print(table)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--runner", default="native", help="native or torch[:DTYPE]")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--questions", type=Path, default=default_path("spec_bench"))
    parser.add_argument("--categories", type=lambda s: tuple(s.split(",")), default=CATEGORIES)
    parser.add_argument("--streams", type=lambda s: tuple(map(int, s.split(","))), default=(1, 16))
    parser.add_argument("--singles", type=int, default=24, help="prompts per category that run one at a time")
    parser.add_argument("--groups", type=int, default=5, help="groups per category that run at once")
    parser.add_argument("--rounds", type=int, default=1, help="times that each group runs both ways")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each request")
    args = parser.parse_args()
    try:
        result = measure(args)
        show(result)
    except (EngineFailed, NoQuestions, ImportError, ValueError, OSError) as exc:
        result = {"check": "bench-speculation", "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    if not result["ok"]:
        # Speeds over wrong texts are not told.
        result["rows"] = [
            {k: v for k, v in row.items() if not k.startswith("tokens_per_s")} for row in result.get("rows", [])
        ]
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
