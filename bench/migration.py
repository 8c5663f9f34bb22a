"""`python -m bench.migration`: what a client sees when the engine of its stream is asked to leave, or is killed.

One stream at a time with a long context, on a private instance with two decode engines. In its middle the engine
that runs it gets SIGTERM (the stream moves), or SIGKILL (it is computed again elsewhere: cold; or loaded from the
store: warm). The gap is the longest time between two pieces of text from the strike on; in steps: over the median of
that stream. Every text is compared with an undisturbed run. The last line is one JSON object; the exit code is 1 if a
text differs, if not each drain moved its stream, or if the survivor of a warm round computed its prompt instead of
loading it, by the engines' own counters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.client import LoadFailed, Timing, stream
from bench.stats import percentile
from chaos.instance import Address, Instance, InstanceFailed
from chaos.watch import Watch
from chaos.workload import FILLER, SUBJECTS, chat
from kvstore.block import BLOCK_TOKENS

WAYS = ("drain", "cold", "warm")
PACED = {"pace_s": 0.01, "prefill_s_per_token": 0.0005}  # of the scripted engine
STRIKE_AFTER = 16  # pieces of text; guessed ids make them several tokens long
READY_S = 90.0
LOADED_SHARE = 0.9  # of the prompt's blocks: what counts as loaded; the last ones may not be stored yet
COUNTED = ("moves_total", "kv_blocks_loaded_total")


@dataclass(slots=True)
class Way:
    """What was measured of one kind of strike."""

    gaps_s: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    differing: int = 0
    moved: int = 0  # streams that went on elsewhere without being computed again
    shares: list[float] = field(default_factory=list)  # of the prompt's blocks: how many were loaded from the store

    def row(self) -> dict[str, Any]:
        """Return the figures for the result."""
        return {
            "rounds": len(self.gaps_s), "moved": self.moved, "loaded_share_min": round(min(self.shares), 3),
            "loaded_share_p50": round(statistics.median(self.shares), 3),
            "gap_ms_p50": round(1000 * statistics.median(self.gaps_s), 1),
            "gap_ms_max": round(1000 * max(self.gaps_s), 1),
            "gap_steps_p50": round(statistics.median(self.steps), 1),
            "gap_steps_max": round(max(self.steps), 1),
        }


def body_of(model: str, at: int, words: int, tokens: int, *, warm: bool) -> dict[str, Any]:
    """Return a request whose prompt begins unlike any other's."""
    text = f"Report {at} about {SUBJECTS[at % len(SUBJECTS)]}. " + FILLER * (words // 18) + "Answer at length."
    return {**chat(model, text, tokens, seed=None, stream=True), "warm_failover": warm}


async def strike(where: Address, watch: Watch, body: dict[str, Any], number: int) -> tuple[Timing, float]:
    """Run a stream, send its engine a signal in the middle; returns its times and when the signal was sent."""
    timing = Timing(time.monotonic())
    running = asyncio.create_task(stream(where.http, body, timing=timing))
    while len(timing.chunks_at) < STRIKE_AFTER and not running.done():
        await asyncio.sleep(0.002)
    await watch.until(
        lambda w: running.done() or any(s.held for s in w.live("decode")), timeout_s=10.0, what="an engine holding it"
    )
    victims = [s for s in watch.live("decode") if s.held]
    if running.done() or len(victims) != 1:
        await running
        raise LoadFailed(f"the answer ended before the strike, or {len(victims)} engines hold it")
    struck = time.monotonic()
    os.kill(victims[0].beat.pid, number)
    return await running, struck


Counters = dict[tuple[str, frozenset[tuple[str, str]]], float]


def counters(page: str) -> Counters:
    """Return the counters of a page of metrics that are needed here, by name and labels."""
    families = text_string_to_metric_families(page)
    samples = (one for family in families for one in family.samples if one.name.endswith(COUNTED))
    return {(one.name, frozenset(one.labels.items())): one.value for one in samples}


def grown(before: Counters, after: Counters, name: str, **labels: str) -> int:
    """Return by how much a counter has grown on all nodes together.

    A process that was started again begins at zero, and one that is gone is on the later page no more: neither takes
    anything off what the others have counted.
    """
    found = [key for key in after if key[0].endswith(name) and labels.items() <= dict(key[1]).items()]
    return int(sum(max(0.0, after[key] - before.get(key, 0.0)) for key in found))


def share_loaded(num_blocks: int, prompt_tokens: int) -> float:
    """Return the blocks that were loaded over those of a prompt; those of an answer count too."""
    return num_blocks / max(1, prompt_tokens // BLOCK_TOKENS)


def verdict(ways: Mapping[str, Way]) -> list[str]:
    """Return what went otherwise than each way's name says."""
    why = [f"{name}: {way.differing} texts differ" for name, way in ways.items() if way.differing]
    drain, warm = ways.get("drain"), ways.get("warm")
    if drain is not None and drain.moved != len(drain.gaps_s):
        why.append(f"drain: {drain.moved} of {len(drain.gaps_s)} streams moved")
    if warm is not None:
        computed = sum(share < LOADED_SHARE for share in warm.shares)
        if computed or len(warm.shares) != len(warm.gaps_s):
            why.append(f"warm: in {computed} of {len(warm.gaps_s)} rounds the prompt was computed instead of loaded")
    return why


async def measure(where: Address, args: argparse.Namespace) -> dict[str, Any]:
    """Strike again and again, by turns in each way."""
    nats = await where.connect("bench-migration")
    watch = Watch(time.monotonic)
    await watch.start(nats)
    http = httpx.AsyncClient(base_url=where.http, timeout=10.0)
    model = str((await http.get("/v1/models")).json()["data"][0]["id"])
    ways = {name: Way() for name in args.ways}
    prompt_tokens: list[int] = []
    for at in range(args.rounds * len(ways)):
        name = args.ways[at % len(ways)]
        await watch.until(lambda w: len(w.ready("decode")) == 2, timeout_s=READY_S, what="two engines")
        await asyncio.sleep(1.0)  # the engines follow what the store holds
        body = body_of(model, at, args.words, args.tokens, warm=name == "warm")
        before = counters((await http.get("/metrics")).text)
        timing, struck = await strike(where, watch, body, signal.SIGTERM if name == "drain" else signal.SIGKILL)
        pairs = zip(timing.chunks_at, timing.chunks_at[1:], strict=False)
        gap = max(later - sooner for sooner, later in pairs if later >= struck)
        step = statistics.median(
            b - a for a, b in zip(timing.chunks_at, timing.chunks_at[1:STRIKE_AFTER], strict=False)
        )
        ways[name].gaps_s.append(gap)
        ways[name].steps.append(gap / step)
        prompt_tokens.append(timing.prompt_tokens)
        print(f"  {name}: gap {1000 * gap:.0f} ms, {gap / step:.1f} steps of {1000 * step:.1f} ms", flush=True)
        await watch.until(lambda w: len(w.ready("decode")) == 2, timeout_s=READY_S, what="two engines")
        after = counters((await http.get("/metrics")).text)
        ways[name].moved += grown(before, after, "moves_total", outcome="moved")
        loaded = grown(before, after, "kv_blocks_loaded_total")
        ways[name].shares.append(share_loaded(loaded, timing.prompt_tokens))
        print(f"  {name}: {loaded} blocks loaded, the prompt has {timing.prompt_tokens // BLOCK_TOKENS}", flush=True)
        again = await stream(where.http, body)
        ways[name].differing += again.text != timing.text
    await http.aclose()
    await nats.close()
    result = {name: way.row() for name, way in ways.items()}
    why = verdict(ways)
    for line in why:
        print(line, flush=True)
    return {
        "bench": "migration", "engine": args.engine, "prompt_tokens": round(percentile(prompt_tokens, 0.5)),
        "output_tokens": args.tokens, **result, "texts_compared": args.rounds * len(ways),
        "differing": sum(way.differing for way in ways.values()), "why": why, "ok": bool(ways) and not why,
    }  # fmt: skip


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start an instance, measure, stop it."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-migration-"))
    engine = args.engine
    args.words = args.words or (180 if engine == "scripted" else 900)
    if engine == "scripted":  # a byte is a token
        script = directory / "script.json"
        script.write_text(json.dumps(PACED))
        engine = f"scripted:{script}"
    instance = Instance(f"migration-{args.port_base}", log=directory / "up.log")
    await instance.start("--engine", engine, "--decode", "2", port_base=args.port_base)
    try:
        return await measure(instance.address, args)
    finally:
        code = await instance.stop()
        if code:
            print(f"the instance stopped with {code}:\n{instance.tail()}", flush=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.migration", description=__doc__)
    parser.add_argument("--engine", default="auto", help="auto (the real model) or scripted")
    parser.add_argument("--rounds", type=int, default=5, help="of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--words", type=int, default=0, help="of the prompt; 0: about a thousand tokens")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--port-base", type=int, default=18760)
    try:
        figures = asyncio.run(run(parser.parse_args()))
    except (InstanceFailed, LoadFailed, TimeoutError, httpx.HTTPError, OSError) as exc:
        figures = {"bench": "migration", "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
