"""`python -m chaos`, which is `headrace chaos`: break a running system and check what its clients saw."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos import commands
from chaos.instance import InstanceFailed
from chaos.scenarios import GROUPS, SCENARIOS


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headrace chaos", description="Break a running system, check its promises.")
    parsers = parser.add_subparsers(dest="command", required=True)
    parsers.add_parser("list", help="show the scenarios")
    run = parsers.add_parser("run", help="run a scenario or a group of them")
    run.add_argument("name")
    run.add_argument("--rounds", type=int, default=5, help="how often each scenario must count")
    run.add_argument("--engine", default="auto", help="auto, native or torch (the real model) or scripted[:FILE]")
    _shape(run, prefill=1, decode=2, streams=4, tokens=96, pace_s=0.02)
    full = parsers.add_parser("full", help="all scenarios in turns, with scripted engines and with the real model")
    full.add_argument("--minutes", type=float, default=50.0, help="most time that it takes")
    full.add_argument("--scripted", type=int, default=commands.FULL_SCRIPTED, help="faults that count; 0: none")
    full.add_argument("--real", type=int, default=commands.FULL_REAL, help="the same with the real model")
    _shape(full, prefill=2, decode=3, streams=8, tokens=96, pace_s=0.01)
    storm = parsers.add_parser("storm", help="everything at once, in virtual time, for many seeds")
    storm.add_argument("--minutes", type=float, default=0.0, help="of virtual time per seed (default 30)")
    storm.add_argument("--seeds", type=int, default=0, help="how many (default 50)")
    storm.add_argument("--seed", type=int, default=1, help="the first one")
    storm.add_argument("--quick", action="store_true", help="20 seeds of 3 minutes")
    storm.add_argument("--jobs", type=int, default=0, help="storms at once (default: one per core)")
    storm.add_argument("--history", type=Path, default=None, help="directory for the histories of seeds that fail")
    check = parsers.add_parser("check", help="hold a recorded history to the promises")
    check.add_argument("file", type=Path)
    replay = parsers.add_parser("replay", help="run again what a history or a storm's file says")
    replay.add_argument("file", type=Path)
    replay.add_argument(
        "--minimise", type=int, nargs="?", const=60, default=0, metavar="RUNS",
        help="leave out faults of a storm for as long as it fails, in at most so many runs (60)",
    )  # fmt: skip
    _shape(replay, prefill=1, decode=2, streams=4, tokens=96, pace_s=0.02)
    return parser


def _shape(
    parser: argparse.ArgumentParser, *, prefill: int, decode: int, streams: int, tokens: int, pace_s: float
) -> None:
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=streams, help="requests that run at any time")
    parser.add_argument("--tokens", type=int, default=tokens, help="length of each stream")
    parser.add_argument("--deadline-s", type=float, default=120.0, help="of every request")
    parser.add_argument("--pace-s", type=float, default=pace_s, help="seconds per step of scripted engines")
    parser.add_argument("--prefill", type=int, default=prefill, help="engines of the private instance")
    parser.add_argument("--decode", type=int, default=decode)
    parser.add_argument("--port-base", type=int, default=18600)
    parser.add_argument("--instance", default=None, help="hurt this running instance instead of starting one")
    parser.add_argument("--history", type=Path, default=None, help="where to write the clients' history")


def _list() -> int:
    for name, scenario in SCENARIOS.items():
        print(f"{name:30} {scenario.summary} ({scenario.works}; requests: {scenario.loads}; engine: {scenario.engine})")
    for name, members in GROUPS.items():
        print(f"{name:30} {', '.join(members)}")
    return 0


def _perform(args: argparse.Namespace) -> dict[str, Any]:
    match args.command:
        case "run":
            return asyncio.run(commands.run(args))
        case "full":
            return asyncio.run(commands.full(args))
        case "check":
            return commands.check(args.file)
        case "storm":
            from chaos.virtual import commands as storms

            storms.repeatable()
            return storms.storm(args, commands.say)
        case _:
            made = commands.how_made(args.file)
            if made["made"] == "storm":
                from chaos.virtual import commands as storms

                storms.repeatable()
                return storms.replay(args, made, commands.say)
            return asyncio.run(commands.replay(args, made))


def main(argv: list[str] | None = None, *, perform: Callable[[argparse.Namespace], dict[str, Any]] = _perform) -> int:
    """Run the command line; the last line printed is one JSON object."""
    args = _arguments().parse_args(argv)
    if args.command == "list":
        return _list()
    try:
        result = perform(args)
    except (InstanceFailed, RuntimeError, TimeoutError, KeyError, OSError) as exc:
        result = {"check": f"chaos-{args.command}", "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
