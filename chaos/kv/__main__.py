"""`python -m chaos.kv`: hurt the store, in this process and in a running instance, and check every byte and text.

The last line printed is one JSON object; the exit code is 1 if anything was wrong, 2 if `--no-verify` found nothing
wrong in one of its parts. A failing seed is run again by `--seed N`, a single campaign by `--only NAME`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chaos.instance import InstanceFailed
from chaos.kv import blind, hosts, live
from chaos.kv.campaigns import CAMPAIGNS, run, self_check, unverified
from chaos.kv.model import Tally

LEAST_HERE, LEAST_LIVE, LEAST_HOSTS = 1700, 300, 10  # faults that must count in a whole run


def _say(line: str) -> None:
    print(line, flush=True)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chaos.kv", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="an eighth of the faults")
    parser.add_argument("--only", choices=CAMPAIGNS, default=None, help="run this campaign alone")
    parser.add_argument("--part", choices=("here", "live", "hosts"), default=None, help="run one part alone")
    parser.add_argument("--faults", type=int, default=350, help="faults for the running instance")
    parser.add_argument("--no-verify", action="store_true", help="serve unverified, here and live: that must fail")
    parser.add_argument("--port-base", type=int, default=18900)
    return parser


def campaigns(names: list[str], seed: int, *, quick: bool) -> Tally:
    """Run campaigns in this process, one after another."""
    total = Tally()
    for name in names:
        began = time.monotonic()
        tally = run(CAMPAIGNS[name], seed, quick=quick)
        counts = f"{sum(tally.effective.values())} of {sum(tally.performed.values())} faults effective"
        bad = "" if tally.ok else f", {tally.num_wrong} WRONG BLOCKS, {tally.num_broken} broken"
        _say(f"  {name}: {counts}, {tally.blocks_compared} blocks compared{bad}, {time.monotonic() - began:.1f} s")
        for violation in tally.violations:
            _say(f"    {violation}")
        total.add(tally)
    return total


def here(args: argparse.Namespace) -> dict[str, Any]:
    """The half without other programs: returns its figures."""
    names = [args.only] if args.only else list(CAMPAIGNS)
    if args.no_verify:
        with unverified():
            total = campaigns(names, args.seed, quick=args.quick)
    else:
        total = campaigns(names, args.seed, quick=args.quick)
    found = {} if args.only or args.no_verify else self_check(args.seed, _say)
    effective = sum(total.effective.values())
    enough = args.only or args.quick or effective >= LEAST_HERE
    return {
        "faults_performed": sum(total.performed.values()),
        "faults_effective": effective,
        "by_kind": dict(sorted(total.effective.items())),
        "blocks_compared": total.blocks_compared,
        "wrong_blocks": total.num_wrong,
        "ledgers": total.ledgers,
        "num_violations": total.num_broken,
        "violations": total.violations,
        "skipped": total.skipped,
        "found_without_verification": found,
        "ok": bool(total.ok and enough and all(found.values())),
    }


def between(args: argparse.Namespace) -> dict[str, Any]:
    """The part with two hosts: returns its figures."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-chaos-kv-"))
    count = max(8, hosts.COUNT // 3) if args.quick else hosts.COUNT
    whole = hosts.run(
        args.seed, count, port_base=args.port_base + 20, say=_say, history=directory / "history.jsonl"
    )
    try:
        figures = asyncio.run(whole)
    except (InstanceFailed, RuntimeError, TimeoutError, KeyError) as exc:
        return {"ok": False, "error": f"{type(exc).__name__}: {exc}", "num_violations": 1}
    enough = figures["faults_effective"] >= LEAST_HOSTS or args.quick
    return {**figures, "ok": bool(enough and not figures["num_violations"])}


def elsewhere(args: argparse.Namespace) -> dict[str, Any]:
    """The half with a running instance: returns its figures."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-chaos-kv-"))
    count = max(10, args.faults // 8) if args.quick else args.faults
    history = directory / "history.jsonl"
    if args.no_verify:
        whole = blind.run(args.seed, port_base=args.port_base, say=_say, history=history)
    else:
        whole = live.run(args.seed, count, port_base=args.port_base, say=_say, history=history)
    try:
        figures = asyncio.run(whole)
    except (InstanceFailed, RuntimeError, TimeoutError, KeyError) as exc:
        return {"ok": False, "error": f"{type(exc).__name__}: {exc}", "num_violations": 1}
    enough = figures["faults_effective"] >= LEAST_LIVE or args.quick or args.no_verify or args.faults < LEAST_LIVE
    return {**figures, "ok": bool(enough and not figures["num_violations"])}


def main() -> int:
    """Run the command line; the last line printed is one JSON object."""
    args = _arguments().parse_args()
    result: dict[str, Any] = {"check": "chaos-kv", "seed": args.seed, "quick": args.quick}
    began = time.monotonic()
    if args.part in (None, "here"):
        _say("in this process")
        result["here"] = here(args)
    if args.part in (None, "live") and not args.only:
        _say("in a running instance")
        result["live"] = elsewhere(args)
    if args.part in (None, "hosts") and not args.only and not args.no_verify:
        _say("on two hosts")
        result["hosts"] = between(args)
    names = [name for name in ("here", "live", "hosts") if name in result]
    parts = [result[name] for name in names]
    result["faults_effective"] = sum(part.get("faults_effective", 0) for part in parts)
    result["seconds"] = round(time.monotonic() - began, 1)
    result["ok"] = all(part["ok"] for part in parts)
    if args.no_verify:
        result["could_not_fail"] = [name for name in names if result[name]["ok"]]
    print(json.dumps(result))
    if result.get("could_not_fail"):
        return 2
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
