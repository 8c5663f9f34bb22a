"""`python -m chaos run NAME`: break a running system and check what its clients saw."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from chaos.history import Recorder
from chaos.instance import Address, Instance, InstanceFailed, address
from chaos.run import Outcome, Runner, summary
from chaos.scenarios import GROUPS, SCENARIOS, Scenario, resolve
from chaos.watch import Watch


def _say(line: str) -> None:
    print(line, flush=True)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show the scenarios")
    run = commands.add_parser("run", help="run a scenario or a group of them")
    run.add_argument("name")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--rounds", type=int, default=5, help="faults that must count, per scenario")
    run.add_argument("--streams", type=int, default=4)
    run.add_argument("--tokens", type=int, default=96, help="length of each stream")
    run.add_argument("--deadline-s", type=float, default=120.0, help="of every request")
    run.add_argument("--engine", default="auto", help="auto, native or torch (the real model) or scripted[:FILE]")
    run.add_argument("--port-base", type=int, default=18600)
    run.add_argument("--instance", default=None, help="hurt this running instance instead of starting one")
    run.add_argument("--history", type=Path, default=None, help="where to write the clients' history")
    return parser


async def _drive(where: Address, scenarios: list[Scenario], args: argparse.Namespace, history: Path) -> list[Outcome]:
    recorder = Recorder(time.monotonic, history)
    outcomes: list[Outcome] = []
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
                recorder, watch, http, nats, model, seed=args.seed, say=_say, streams=args.streams, tokens=args.tokens,
                deadline_s=args.deadline_s,
            )  # fmt: skip
            await asyncio.sleep(1.0)  # four heartbeats: every actor has been heard
            await runner.prepare()
            _say(f"references: {len(runner.references)} requests ran undisturbed")
            for scenario in scenarios:
                outcomes += await runner.rounds(scenario, args.rounds)
    finally:
        recorder.close()
        await nats.close()
    return outcomes


def _script(directory: Path) -> Path:
    """Write a script for the scripted engine with a pace like that of a small model."""
    path = directory / "script.json"
    path.write_text(json.dumps({"pace_s": 0.02, "prefill_s_per_token": 0.0003}))
    return path


async def _run(args: argparse.Namespace) -> int:
    scenarios = resolve(args.name)
    directory = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    history = args.history or directory / "history.jsonl"
    instance: Instance | None = None
    try:
        if args.instance is not None:
            where = address(args.instance)
        else:
            instance = Instance(f"chaos-{args.port_base}", log=directory / "up.log")
            if args.engine == "scripted":
                args.engine = f"scripted:{_script(directory)}"
            await instance.start("--isolate", "--prefill", "1", "--engine", args.engine, port_base=args.port_base)
            where = instance.address
            _say(f"ready after {instance.ready_after_s:.1f} s; log {instance.log}, history {history}")
        outcomes = await _drive(where, scenarios, args, history)
    finally:
        code = await instance.stop() if instance is not None else 0
    result = summary(outcomes, seed=args.seed, engine=args.engine)
    result |= {"rounds": args.rounds, "streams": args.streams, "exit_code": code, "history": str(history)}
    missing = result["faults_effective"] < args.rounds * len(scenarios)
    result["ok"] = not (result["violations"] or result["failed"] or missing or code)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def main() -> int:
    """Run the command line; the last line printed is one JSON object."""
    args = _arguments().parse_args()
    if args.command == "list":
        for name, scenario in SCENARIOS.items():
            print(f"{name:18} {scenario.fault} {'/'.join(scenario.kinds)} ({scenario.works})")
        for name, members in GROUPS.items():
            print(f"{name:18} {', '.join(members)}")
        return 0
    try:
        return asyncio.run(_run(args))
    except (InstanceFailed, RuntimeError, TimeoutError, KeyError) as exc:
        print(json.dumps({"check": "chaos", "ok": False, "error": str(exc)}))
        return 1


if __name__ == "__main__":
    sys.exit(main())
