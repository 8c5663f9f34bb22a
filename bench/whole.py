"""What bus and actors cost: the whole system beside its engine alone, the first token's way, and pauses of streams."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import client, load, servers
from bench.client import LoadFailed, Timing
from bench.questions import ROOT, long_text
from bench.servers import Server, ServerFailed
from bench.stats import percentile
from bench.targets import LONG, SHORT, Target

THROUGHPUT, ADDED_TTFT_MS, PAUSE = Target(0.9, True), Target(5.0, False), Target(3.0, False)
TURNS = 3
BURSTS = 7  # of the whole system; each takes some seconds, and machines have slow ones
TTFT_WARM_UP, TTFT_TURNS, TTFT_REQUESTS = 20, 7, 30  # one at a time; what is used for the first time takes longer
TTFT_REST_S = 3.0  # between turns: one of them takes a third of a second, and machines have slow seconds
RUNNING_TOKENS = 400  # of the streams that run while a long prompt comes in
POOL_TOKENS = 20_480  # room for the streams and the long prompt, however the engines are laid out
STEADY, POLL_S = 16, 0.01  # texts of each stream before that


def judged(value: float, target: Target) -> dict[str, Any]:
    """Return a figure with its target."""
    return {"value": round(value, 4), "target": str(target), "met": target.met(value)}


def pause(timings: Sequence[Timing], sent_at: float, first_at: float) -> tuple[float, float]:
    """Return the longest gap that overlaps the time of a long prompt, and the median gap before it, in seconds.

    Args:
        timings: of the streams that ran meanwhile.
        sent_at: when the long prompt was sent.
        first_at: when its first text came.

    Raises:
        LoadFailed: if no stream ran during that time, or none before it.
    """
    gaps = [(a, b) for t in timings for a, b in zip(t.chunks_at, t.chunks_at[1:], strict=False)]
    started = max(t.chunks_at[0] for t in timings)
    before = [b - a for a, b in gaps if a >= started and b <= sent_at]
    during = [b - a for a, b in gaps if b > sent_at and a < first_at]
    if not before or not during:
        raise LoadFailed("the streams did not run while the long prompt came in")
    return max(during), statistics.median(before)


async def admitted(server: Server, streams: int, first: int) -> dict[str, Any]:
    """Send a long prompt among running streams, and look at their gaps.

    The streams may not end early: past its end mark a model says marks that are no text, and each would show as a gap.
    """
    seen = [Timing(0.0) for _ in range(streams)]
    texts = [long_text(first + i, SHORT) for i in range(streams)]
    running = [
        asyncio.create_task(
            load.one(server.base, server.model, text, RUNNING_TOKENS, timing, min_tokens=RUNNING_TOKENS)
        )
        for text, timing in zip(texts, seen, strict=True)
    ]
    # Once all of them speak, none waits to be admitted any more; some texts of each give the median.
    while min(len(timing.chunks_at) for timing in seen) < STEADY and not any(task.done() for task in running):
        await asyncio.sleep(POLL_S)
    sent_at = time.monotonic()
    long = await load.one(server.base, server.model, long_text(first + streams, LONG), 4)
    longest, median = pause(await asyncio.gather(*running), sent_at, long.chunks_at[0])
    return {"longest_ms": round(longest * 1000, 2), "median_ms": round(median * 1000, 2), "over": longest / median}


async def first_texts(server: Server) -> tuple[float, float]:
    """Return how long one request's first text takes, and an answer of the same server that needs no bus.

    Both in milliseconds, measured alternately, one at a time, each on a connection of its own: medians of each turn,
    and of these. Their difference is what bus and actors add; what is left is the client, the socket and HTTP.
    """
    prompts = (long_text(50_000 + number, SHORT) for number in itertools.count())
    await load.run(server.base, server.model, [next(prompts) for _ in range(TTFT_WARM_UP)], 1, 4)
    medians = []
    for _ in range(TTFT_TURNS):
        await asyncio.sleep(TTFT_REST_S)
        first, bare = [], []
        for prompt in itertools.islice(prompts, TTFT_REQUESTS):
            first.append((await load.one(server.base, server.model, prompt, 4)).ttft_s * 1000)
            bare.append(await client.fetch_s(server.base, "/health/live") * 1000)
        medians.append((percentile(first, 0.5), percentile(bare, 0.5)))
    return statistics.median(f for f, _ in medians), statistics.median(b for _, b in medians)


def engine_alone(args: argparse.Namespace, runner: str) -> float:
    """Return the tokens per second of the same load on the engine alone, in a process of its own.

    Raises:
        ServerFailed: if that process fails.
    """
    threads = max(args.threads)
    command = [sys.executable, "-m", "bench.engine_child", "--model", str(args.model), "--runner", runner]
    command += ["--threads", str(threads), "--burst", str(args.streams), "--tokens", str(args.tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise ServerFailed(f"the engine alone: {(done.stdout + done.stderr)[-1500:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["burst_tokens_per_s"])


async def measure(args: argparse.Namespace, runner: str, directory: Path) -> dict[str, Any]:
    """Measure the three figures. The engine alone runs before and after the whole system, never beside it.

    Args:
        args: of `bench.engine`.
        runner: the engine alone that the system is compared with.
        directory: for logs.

    Raises:
        GateFailed: if the system's texts are not the same alone and together.
    """
    tokens, streams = args.tokens, args.streams
    rates, pauses = [], []
    alone = [engine_alone(args, runner)]
    up = [f"--pool-tokens={POOL_TOKENS}", *args.up]
    async with Server(servers.ours(args.model, args.port_base, up), directory / "whole.log") as server:
        gate = [long_text(900 + i, SHORT) for i in range(5)]
        if differing := await load.differing(server.base, server.model, gate, min(24, tokens)):
            raise load.GateFailed("the whole system", differing, len(gate))
        for turn in range(BURSTS):
            prompts = [long_text(1000 * (turn + 1) + i, SHORT) for i in range(streams)]
            rates.append((await load.measure(server.base, server.model, prompts, streams, tokens)).tokens_per_s)
        for turn in range(TURNS):
            pauses.append(await admitted(server, streams, 10_000 * (turn + 1)))
    alone.append(engine_alone(args, runner))
    null = servers.ours(args.model, args.port_base + 5, ["--engine", "null", *args.up])
    async with Server(null, directory / "null.log") as server:
        first, bare = await first_texts(server)
    rate, engine, over = statistics.median(rates), statistics.mean(alone), statistics.median(p["over"] for p in pauses)
    return {
        "streams": streams, "whole_tokens_per_s": round(rate, 1), "engine_tokens_per_s": round(engine, 1),
        "throughput_over_engine": judged(rate / engine, THROUGHPUT),
        "first_text_p50_ms": round(first, 2), "http_alone_p50_ms": round(bare, 2),
        "added_ttft_p50_ms": judged(first - bare, ADDED_TTFT_MS),
        "bursts_tokens_per_s": [round(r, 1) for r in rates], "alone_tokens_per_s": [round(r, 1) for r in alone],
        "pause_over_median_itl": judged(over, PAUSE), "pauses": pauses,
    }  # fmt: skip
