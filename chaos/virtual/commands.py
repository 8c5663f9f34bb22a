"""`headrace chaos storm` and the replay of one: seeds in turn or side by side, and the file of each that failed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from chaos.judge import Verdict, figures
from chaos.virtual.minimise import minimise
from chaos.virtual.plan import StormPlan, from_json, make_plan
from chaos.virtual.storm import run_storm

HASHES = "PYTHONHASHSEED"  # the order of sets is part of what a seed decides
QUICK = (20, 3.0)  # seeds, minutes
WHOLE = (50, 30.0)
SHOWN = 12  # broken promises that are printed of one storm


def repeatable() -> None:
    """Start this process anew with a fixed hash seed, unless it has one."""
    if os.environ.get(HASHES) != "0":
        os.environ[HASHES] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "chaos", *sys.argv[1:]])


def one_storm(plan: StormPlan, history: Path) -> dict[str, Any]:
    """Run a storm; its history is kept if it broke a promise."""
    began = time.perf_counter()
    verdict, _ = run_storm(plan, history)
    bad = broken(verdict)
    if not bad:
        history.unlink()
    found = figures(verdict)
    del found["longest_stall_ms"], found["kills_of_decode"]
    return {
        "seed": plan.seed, "minutes": plan.minutes, "wall_s": round(time.perf_counter() - began, 1), **found,
        "bad": bad[:SHOWN], "history": str(history) if bad else None,
    }  # fmt: skip


def broken(verdict: Verdict) -> list[str]:
    """Return what went wrong, a line each."""
    return [*map(str, verdict.violations), *verdict.errors]


def storm(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the storms of many seeds, several at once."""
    seeds, minutes = QUICK if args.quick else WHOLE
    seeds, minutes = args.seeds or seeds, args.minutes or minutes
    directory = args.history or Path(tempfile.mkdtemp(prefix="headrace-storms-"))
    directory.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    results = []
    with ProcessPoolExecutor(args.jobs or os.cpu_count()) as pool:
        jobs = [
            pool.submit(one_storm, make_plan(seed, minutes), directory / f"storm-{seed}.jsonl")
            for seed in range(args.seed, args.seed + seeds)
        ]
        for job in jobs:
            result = job.result()
            results.append(result)
            bad = "".join(f"\n    {line}" for line in result["bad"])
            say(
                f"  seed {result['seed']}: {result['faults_effective']} faults count, {result['texts_compared']} texts "
                f"compared, {len(result['bad'])} broken promises, {result['wall_s']} s{bad}"
            )
    summed = {
        key: sum(r[key] for r in results)
        for key in ("faults_performed", "faults_effective", "requests", "texts_compared", "failed", "refused", "gaps",
                    "repeats", "differing", "violations")
    }  # fmt: skip
    failed = [r["history"] for r in results if r["bad"]]
    return {
        "check": "chaos-storm", "seeds": [r["seed"] for r in results], "virtual_minutes": seeds * minutes,
        "wall_s": round(time.perf_counter() - began, 1), **summed, "failing": failed, "ok": not failed,
    }  # fmt: skip


def replay(args: argparse.Namespace, made: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Run a storm again from its file, exactly; with `--minimise`, with as few faults as still break a promise."""
    plan = from_json(made)
    directory = Path(tempfile.mkdtemp(prefix="headrace-replay-"))

    def fails(blows: tuple[Any, ...]) -> bool:
        bad = broken(run_storm(plan.with_blows(blows), directory / "try.jsonl")[0])
        say(f"  {len(blows)} faults: {bad[0] if bad else 'clean'}")
        return bool(bad)

    if args.minimise and fails(plan.blows):
        plan = plan.with_blows(minimise(plan.blows, fails, most_runs=args.minimise))
        for blow in plan.blows:
            say(f"  {json.dumps(dataclasses.asdict(blow))}")
    result = one_storm(plan, directory / "replay.jsonl")
    for line in result["bad"]:
        say(f"    {line}")
    return {"check": "chaos-replay", **result, "blows": len(plan.blows), "ok": not result["bad"]}
