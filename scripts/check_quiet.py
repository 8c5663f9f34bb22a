"""Nothing breaks, so nobody fails over: many streams for minutes, and the system must count zero failovers.

On a machine with few cores everything is late all the time; lateness is not death. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from chaos import invariants
from chaos.clients import http_chat, native_chat
from chaos.history import Recorder
from chaos.instance import Address, add_options, report, serving
from chaos.probe import Probe
from chaos.watch import Watch
from chaos.workload import streams

FAILOVERS = "headrace_failovers_total"


def total(text: str, name: str) -> float | None:
    """Return the sum of one counter over all nodes and labels, or None if no node declares it.

    A counter with labels that never counted has no samples, only its declaration: that is zero.
    """
    families = [f for f in text_string_to_metric_families(text) if f.name == name.removesuffix("_total")]
    return float(sum(s.value for f in families for s in f.samples if s.name == name)) if families else None


async def failovers(watch: Watch, probe: Probe) -> float | None:
    """Ask the admission nodes how many failovers there have been: from them, since a merged page leaves out zeros."""
    texts = await probe.texts({seen.beat.node for seen in watch.ready("admission")}, timeout_s=10.0)
    counts = [total(text, FAILOVERS) for text in texts.values()]
    return None if not counts or None in counts else sum(count for count in counts if count is not None)


async def check(where: Address, args: argparse.Namespace) -> dict[str, Any]:
    """Keep the streams running for the time asked for."""
    recorder = Recorder(time.monotonic)
    nats = await where.connect("check-quiet")
    watch, probe = Watch(time.monotonic), Probe(nats)
    await watch.start(nats)
    await probe.start()
    await watch.until(lambda w: w.ready("admission"), timeout_s=30.0, what="admission heard")
    await asyncio.sleep(1.0)
    async with where.client() as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        loads = streams(model, args.streams, args.tokens)
        before = await failovers(watch, probe)
        until = time.monotonic() + args.minutes * 60
        answers: dict[str, set[invariants.Answer]] = {load.key: set() for load in loads}
        found: list[invariants.Violation] = []
        figures = {"requests": 0, "failed": 0, "items": 0}

        async def worker(at: int) -> None:
            turn = 0
            while turn == 0 or time.monotonic() < until:
                load = loads[at]
                own, name = Recorder(time.monotonic), f"{load.key}/{turn}"
                if load.client == "http":
                    await http_chat(own, http, name, load.key, load.body, deadline_s=args.deadline_s)
                else:
                    await native_chat(own, nats, name, load.key, load.body, deadline_s=args.deadline_s)
                ends = [e for e in own.events if e.kind == "terminal"]
                failed = not ends or ends[0].data["error"] is not None
                if failed:
                    print(f"{name} failed: {[e.data for e in ends]}", flush=True)
                else:
                    answers[load.key].add(invariants.answer(own.events))
                found.extend(invariants.one_ending(own.events) + invariants.no_gap_no_repeat(own.events))
                figures["requests"] += 1
                figures["failed"] += failed
                figures["items"] += sum(e.kind == "item" for e in own.events)
                turn += 1

        began = time.monotonic()
        await asyncio.gather(*(worker(at) for at in range(len(loads))))
        elapsed = time.monotonic() - began
        after = await failovers(watch, probe)
    await nats.close()
    recorder.close()
    for violation in found[:10]:
        print(violation)
    result = {
        "check": "quiet", "streams": args.streams, "seconds": round(elapsed, 1), **figures,
        "items_per_s": round(figures["items"] / elapsed, 1),
        "differing": sum(len(seen) > 1 for seen in answers.values()),
        "violations": len(found),
        "failovers": None if before is None or after is None else after - before,
    }  # fmt: skip
    ok = result["failovers"] == 0 and not (figures["failed"] or found or result["differing"])
    return result | {"ok": ok}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find or start an instance and check it."""
    async with serving(args) as where:
        return await check(where, args)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, port_base=18640)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--deadline-s", type=float, default=300.0)
    return report("quiet", run(parser.parse_args()), httpx.HTTPError)


if __name__ == "__main__":
    sys.exit(main())
