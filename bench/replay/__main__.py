"""`python -m bench.replay TRACE`: hit rates by eviction policy, and time to first token by placement, in virtual time.

The real policies, the real index with its events, and the real estimate are driven by a published trace. Mooncake's
traces name blocks of 512 tokens, so hits can be told; Azure's name none, so with them only placements by load are
compared.

The offered load is the prefill work that arrives, were nothing ever stored, over what the fleet can do; recorded times
are divided by one factor to reach it. At 1.0 a fleet without a cache would never catch up, and under least-load it is
busy yet stable thanks to what it happens to find: the share of time that replicas are busy is printed. Without hashes
nothing is ever found, so the load is 0.8 there. What a replica and the sender are is stated in `bench/replay/fleet.py`,
what a prefill costs in `bench/replay/model.py` and in the command's first lines.

The last line is one JSON object. The exit code is 1 if a target of a known trace is missed, 2 if there is no trace to
replay; a part of a trace (`--quick`) and other traces have no targets.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.replay.facts import Facts, Verdict, facts_of
from bench.replay.fleet import Fleet, Load, offered
from bench.replay.model import Deployment
from bench.replay.parts import NEED_HASHES, PARTS, Setting
from bench.replay.store import DEFAULT_EVICTION, POLICIES
from bench.replay.trace import TraceError, read

QUICK = 0.1  # of the trace
LOAD, LOAD_WITHOUT_HASHES = 1.0, 0.8


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description="Replay a trace in virtual time.")
    parser.add_argument("trace", type=Path, help="Mooncake's JSON lines, or Azure's CSV")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to run, by commas (default: %(default)s)")
    parser.add_argument("--replicas", default="8,16", help="sizes of the fleet (default: %(default)s)")
    parser.add_argument("--cache-tokens", type=int, default=3_000_000, help="of each replica (default: %(default)s)")
    parser.add_argument("--load", type=float, help=f"offered (default: {LOAD}, without hashes {LOAD_WITHOUT_HASHES})")
    parser.add_argument("--load-gbs", type=float, default=100.0, help="GB/s of loads (default: %(default)s)")
    parser.add_argument("--copy-gbs", type=float, default=25.0, help="GB/s between replicas (default: %(default)s)")
    parser.add_argument("--eviction", choices=sorted(POLICIES), default=DEFAULT_EVICTION, help="of the fleets' stores")
    parser.add_argument("--bunched", action="store_true", help="leave requests of one recorded moment together")
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK:.0%} of the trace, without targets")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    options.parts = [part for part in options.parts.split(",") if part]
    options.replicas = [int(number) for number in options.replicas.split(",")]
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    load = LOAD if options.load is None else options.load
    rates = (options.cache_tokens, load, options.load_gbs, options.copy_gbs, *options.replicas)
    if min(rates) <= 0:
        parser.error("sizes, loads and rates are positive")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay; returns the exit code."""
    options = parse(arguments)
    console = Console()
    try:
        trace = read(options.trace)
    except (OSError, TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    facts = facts_of(trace)
    trace = trace.first(QUICK) if options.quick else trace
    trace = trace if options.bunched else trace.spread(options.seed)
    if trace.span_s <= 0:
        print(f"{options.trace}: all requests come at once", file=sys.stderr)
        return 2
    deployment = Deployment()
    setting = Setting(
        trace=trace,
        facts=None if options.quick else facts,
        costs=deployment.costs(options.load_gbs * 1e9, options.copy_gbs * 1e9),
        replicas=options.replicas,
        cache_tokens=options.cache_tokens,
        load=options.load or (LOAD if trace.has_hashes else LOAD_WITHOUT_HASHES),
        eviction=options.eviction,
        bunched=options.bunched,
        seed=options.seed,
        console=console,
        verdict=Verdict(),
    )
    gc.freeze()  # the trace stays: no collection needs to walk it
    started = time.monotonic()
    figures = state(setting, deployment, facts, options)
    for part in options.parts:
        figures[part] = None if part in NEED_HASHES and not trace.has_hashes else PARTS[part](setting)
    show_targets(console, setting.verdict)
    figures |= {
        "targets": [target.row() for target in setting.verdict.targets],
        "met": setting.verdict.met,
        "took_s": round(time.monotonic() - started, 1),
    }
    print(json.dumps(figures))
    return 0 if setting.verdict.met else 1


def state(
    setting: Setting, deployment: Deployment, facts: Facts | None, options: argparse.Namespace
) -> dict[str, object]:
    """Print what is replayed on what, and return it."""
    trace, name = setting.trace, facts.name if facts is not None else "not a known trace: no targets"
    per_s = len(trace.arrivals) / trace.span_s
    recorded = {
        str(count): round(offered(Load(trace), Fleet(count, setting.cache_tokens, setting.eviction, setting.costs)), 3)
        for count in setting.replicas
    }
    for line in (
        f"{trace.path.name} ({name}{', its first part: no targets' if options.quick else ''}): "
        f"{len(trace.arrivals):,} requests, {trace.input_tokens:,} prompt tokens, {per_s:.2f} requests per second",
        f"model: {deployment.describe()}",
        f"replicas store {setting.cache_tokens:,} tokens each ({setting.eviction}), load {options.load_gbs:g} GB/s, "
        f"copy {options.copy_gbs:g} GB/s; offered load as recorded: "
        + ", ".join(f"{load} on {count} replicas" for count, load in recorded.items()),
    ):
        setting.console.print(line, highlight=False, soft_wrap=True)
    if not trace.has_hashes:
        setting.console.print("no hashes in this trace: no hits, no longest prefix, and ours sees load alone")
    return {
        "trace": trace.path.name,
        "known_as": None if facts is None else facts.name,
        "quick": options.quick,
        "requests": len(trace.arrivals),
        "prompt_tokens": trace.input_tokens,
        "model": deployment.describe(),
        "cache_tokens": setting.cache_tokens,
        "eviction": setting.eviction,
        "load_gbs": options.load_gbs,
        "copy_gbs": options.copy_gbs,
        "offered_load": setting.load,
        "offered_load_as_recorded": recorded,
    }


def show_targets(console: Console, verdict: Verdict) -> None:
    """Print targets and whether they are met."""
    if not verdict.targets:
        return
    table = Table("target", "value", "bounds", "met", title="targets")
    for target in verdict.targets:
        limits = (("≥", target.least), ("≤", target.most))
        bounds = " ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
        table.add_row(target.name, f"{target.value:.4g}", bounds, "yes" if target.met else "NO")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
