"""What the commands of `python -m chaos` do against real processes: run, full, replay, check."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaos.bus import ProxiedBus
from chaos.faults import Faults
from chaos.history import Recorder, segments
from chaos.instance import Address, Instance, address
from chaos.judge import Verdict, by_scenario, figures, judge, references
from chaos.run import Runner, interleaved, summary
from chaos.scenarios import GROUPS, Scenario, resolve
from chaos.watch import Watch
from chaos.workload import POISON

FULL_SCRIPTED = 850  # faults that count, with engines that verify every block
FULL_REAL = 150
FULL_DECODE_KILLS = 100
REAL_SHARE = 0.4  # of the time, at most, where scripted engines follow
STALL_LIMIT_S = 15.0  # a stream that stands still for longer was saved by chance
REPLAYED = ("name", "seed", "rounds", "streams", "tokens", "engine", "decode", "prefill")


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def fits(scenario: Scenario, engine: str, proxy: bool = False) -> bool:
    """Whether a scenario makes sense with an engine and a system."""
    scripted = engine.startswith(("scripted", "null"))
    wanted = scenario.engine == "any" or (scenario.engine == "scripted") == scripted
    return wanted and (proxy or "proxy" not in scenario.needs)


def script(directory: Path, pace_s: float) -> Path:
    """Write a script for the scripted engine with a pace like that of a small model, or faster."""
    path = directory / "script.json"
    poison = {"contains": list(POISON.encode()), "dies": {"at": 4, "by": "SIGSEGV"}}
    path.write_text(json.dumps({"pace_s": pace_s, "prefill_s_per_token": 0.0003, "rules": [poison]}))
    return path


async def drive(
    where: Address, plan: Sequence[tuple[Scenario, int]], args: argparse.Namespace, recorder: Recorder,
    faults: Faults, done: Callable[[Verdict], bool] = lambda _: False,
) -> Runner:  # fmt: skip
    """Run a plan against a system that runs, until it is through or `done` says so."""
    nats = await where.connect("chaos")
    try:
        async with where.client() as http:
            watch = Watch(time.monotonic, recorder)
            await watch.start(nats)
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            await watch.until(
                lambda w: w.ready("decode") and w.ready("detokenize"), timeout_s=30.0, what="heartbeats heard"
            )
            runner = Runner(
                recorder, watch, http, nats, model, seed=args.seed, say=say, streams=args.streams, tokens=args.tokens,
                deadline_s=args.deadline_s, faults=faults,
            )  # fmt: skip
            await watch.settle(1.0)  # four heartbeats: every actor has been heard
            await runner.prepare([scenario for scenario, _ in plan])
            say(f"references: {len(runner.references)} requests ran undisturbed")
            await runner.campaign(plan, until=lambda: done(runner.verdict))
            return runner
    finally:
        await nats.close()


async def one(
    args: argparse.Namespace, plan: Sequence[tuple[Scenario, int]], history: Path, directory: Path,
    done: Callable[[Verdict], bool] = lambda _: False,
) -> tuple[dict[str, Any], Verdict]:  # fmt: skip
    """Run a plan against the system that the options name, or a private one; returns figures, and what was found."""
    history.parent.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(time.monotonic, history)
    recorder.add("", "run", made="processes", **{name: getattr(args, name) for name in REPLAYED})
    instance: Instance | None = None
    bus: ProxiedBus | None = None
    code = 0
    try:
        if args.instance is not None:
            where = address(args.instance)
        else:
            instance = Instance(f"chaos-{args.port_base}", log=directory / f"up-{args.engine.partition(':')[0]}.log")
            engine = args.engine
            if engine == "scripted":
                engine = f"scripted:{script(directory, args.pace_s)}"
            shape = ["--isolate", "--prefill", str(args.prefill), "--decode", str(args.decode), "--engine", engine]
            if any("proxy" in scenario.needs for scenario, _ in plan):
                bus = ProxiedBus(directory, seed=args.seed)
                shape += ["--bus", await bus.start()]
            await instance.start(*shape, port_base=args.port_base)
            where = instance.address
            say(f"ready after {instance.ready_after_s:.1f} s; log {instance.log}, history {history}")
        runner = await drive(where, plan, args, recorder, Faults(time.monotonic, instance=instance, bus=bus), done)
    finally:
        recorder.close()
        code = await instance.stop() if instance is not None else 0
        if bus is not None:
            await bus.stop()
    result = summary(runner, seed=args.seed, engine=args.engine)
    return result | {"streams": args.streams, "exit_code": code, "history": str(history)}, runner.verdict


def clean(result: dict[str, Any]) -> bool:
    """Whether no promise was broken and nothing failed."""
    return not (result["violations"] or result["failed"] or result["exit_code"])


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run a scenario or a group of them, `rounds` times each."""
    scenarios = [s for s in resolve(args.name) if fits(s, args.engine, proxy=args.instance is None)]
    if not scenarios:
        raise RuntimeError(f"{args.name} makes no sense with the engine {args.engine}")
    directory = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    plan = [(s, r) for s in scenarios for r in range(args.rounds)]
    result, _ = await one(args, plan, args.history or directory / "history.jsonl", directory)
    counted = result["scenarios"]
    missing = [s.name for s in scenarios if counted.get(s.name, {}).get("faults_effective", 0) < args.rounds]
    return result | {"rounds": args.rounds, "ok": clean(result) and not missing}


def _until(target: int, limit_s: float) -> Callable[[Verdict], bool]:
    """Return what says that enough faults have counted, or that the time since it was first asked is over."""
    first: list[float] = []

    def done(verdict: Verdict) -> bool:
        now = time.monotonic()
        first.append(now)
        return figures(verdict)["faults_effective"] >= target or now - first[0] > limit_s

    return done


async def full(args: argparse.Namespace) -> dict[str, Any]:
    """Run all scenarios in turns: with the real model, then, for what is left of the time, with scripted engines."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    began = time.monotonic()
    parts: dict[str, dict[str, Any]] = {}
    total = Verdict()
    for engine, target in (("auto", args.real), ("scripted", args.scripted)):
        if not target:
            continue
        args.engine, args.name, args.rounds = engine, "full" if engine == "scripted" else "real", 1
        scenarios = [s for s in resolve(args.name) if fits(s, engine)]
        left_s = began + args.minutes * 60 - time.monotonic()
        done = _until(target, left_s * REAL_SHARE if engine == "auto" and args.scripted else left_s)
        plan = interleaved(scenarios, max(1, target), args.seed)
        history = args.history or directory
        parts[engine], verdict = await one(args, plan, history / f"{engine}.jsonl", directory, done)
        total = total + verdict
        say(json.dumps(parts[engine]))
    sums = {
        key: sum(p[key] for p in parts.values())
        for key in ("faults_performed", "faults_effective", "kills_of_decode", "requests", "texts_compared", "failed",
                    "gaps", "repeats", "differing", "violations")
    }  # fmt: skip
    enough = all(parts[e]["faults_effective"] >= n for e, n in (("scripted", args.scripted), ("auto", args.real)) if n)
    stalls = figures(total)["longest_stall_ms"]
    names = {name for p in parts.values() for name, f in p["scenarios"].items() if f["faults_effective"]}
    return {
        "check": "chaos-full", "seeds": [args.seed], "minutes": round((time.monotonic() - began) / 60, 1), **sums,
        "num_scenarios": len(names), "longest_stall_ms": stalls, "parts": parts,
        "ok": enough and all(clean(p) for p in parts.values()) and (stalls["max"] or 0.0) <= STALL_LIMIT_S * 1000
        and (sums["kills_of_decode"] >= FULL_DECODE_KILLS or args.real < FULL_REAL),
    }  # fmt: skip


def check_file(path: Path) -> Verdict:
    """Hold a history to the promises, part by part."""
    known: dict[str, Any] = {}
    total = Verdict()
    for part in segments(path):
        known |= references(part)
        total = total + judge(part, known)
    return total


def check(path: Path) -> dict[str, Any]:
    """Judge a history from its file alone."""
    verdict = check_file(path)
    for line in [*map(str, verdict.violations), *verdict.errors]:
        say(f"  {line}")
    result = {"check": "chaos-check", "history": str(path), **figures(verdict), "scenarios": by_scenario(verdict)}
    return result | {"ok": not (verdict.violations or verdict.failed)}


def how_made(path: Path) -> dict[str, Any]:
    """Return what a history says of how it was made.

    Raises:
        RuntimeError: if it does not say.
    """
    with path.open() as lines:
        first = next(iter(lines), "")
    if '"run"' not in first:
        raise RuntimeError(f"{path} does not say how it was made")
    return dict(json.loads(first))


async def replay(args: argparse.Namespace, made: dict[str, Any]) -> dict[str, Any]:
    """Run again what a history of real processes says: same scenarios, same seed."""
    for name in REPLAYED:
        setattr(args, name, made[name])
    args.history = None
    if args.name in GROUPS and args.name != "failover":
        say("what processes do at a moment is not repeated, only which faults come and in which order")
    return await run(args)
