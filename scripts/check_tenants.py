"""What a tenant's time to the first token tells of other tenants: nothing, or the check fails.

One tenant asks for prompts. Then another asks for as many, all new to it: half of them the first one's, half of them
nobody's, in random order. Neither the count of cached tokens nor the times (a rank test over at least 200 of each) may
tell which is which. To show that the test can fail, fewer of the same are asked by the first tenant itself, and these
must be told apart. `--same-tenant` does so in place of the whole check, which then ends with exit code 1. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from chaos.instance import Address, report, serving
from chaos.telling import compare

HEADER = "x-tenant"
BLOCK_TOKENS = 16
PROMPT_TOKENS = 12 * BLOCK_TOKENS + 1  # of the byte vocabulary of scripted engines
PREFILL_S_PER_TOKEN = 0.0003  # a prompt takes some sixty milliseconds: what is found saves nearly all of them
BATCH = 20  # prompts of the first tenant, then as many of the other: all fit into the engines' pools
SETTLE_S = 0.5  # for stores and placement to hear of them: a leak would be at its largest
AT_ONCE = 4


@dataclass(slots=True)
class Seen:
    """Times to the first token and cached tokens of one kind of request."""

    times: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


def prompt(name: str) -> str:
    """Return a prompt that shares no block with any other."""
    return (name + " is what this prompt begins with. " + "The water comes down the headrace. " * 10)[:PROMPT_TOKENS]


async def ask(http: httpx.AsyncClient, model: str, tenant: str, text: str) -> tuple[float, int]:
    """Ask; returns the time to the first token and the cached tokens."""
    body = {
        "model": model, "prompt": text, "max_tokens": 2, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    first, cached, began = None, 0, time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body, headers={HEADER: tenant}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line.removeprefix("data: "))
            if first is None and any(choice.get("text") for choice in part.get("choices", ())):
                first = time.perf_counter() - began
            if part.get("usage"):
                cached = int((part["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))
    if first is None:
        raise RuntimeError("a request ended without a token")
    return first, cached


async def measure(
    http: httpx.AsyncClient, model: str, draw: random.Random, *, name: str, runs: int, tenants: tuple[str, str]
) -> tuple[Seen, Seen]:
    """Return what the second tenant sees of prompts that the first one has asked for, and of others."""
    asked, new = Seen(), Seen()
    gate = asyncio.Semaphore(AT_ONCE)

    async def before(text: str) -> None:
        async with gate:
            await ask(http, model, tenants[0], text)

    for start in range(0, runs, BATCH):
        known = [prompt(f"{name} {number:05d} known") for number in range(start, min(runs, start + BATCH))]
        fresh = [prompt(f"{name} {number:05d} fresh") for number in range(start, min(runs, start + BATCH))]
        await asyncio.gather(*map(before, known))
        await asyncio.sleep(SETTLE_S)
        kinds = [(asked, text) for text in known] + [(new, text) for text in fresh]
        draw.shuffle(kinds)
        for seen, text in kinds:
            first, cached = await ask(http, model, tenants[1], text)
            seen.times.append(first)
            seen.cached.append(cached)
    return asked, new


def figures(asked: Seen, new: Seen) -> dict[str, Any]:
    """Return what two kinds came to."""
    found = compare(asked.times, new.times)
    return {
        "runs": len(asked.times),
        "cached_tokens": sum(asked.cached),
        "cached_tokens_new": sum(new.cached),
        "median_ms": round(sorted(asked.times)[len(asked.times) // 2] * 1000, 2),
        "median_new_ms": round(sorted(new.times)[len(new.times) // 2] * 1000, 2),
        "sooner": round(found.sooner, 4),
        "chance": float(f"{found.chance:.3g}"),
        "tells": found.tells,
    }


async def check(args: argparse.Namespace) -> dict[str, Any]:
    """Run both halves on a private instance."""
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as directory:
        script = Path(directory) / "script.json"
        script.write_text(json.dumps({"pace_s": 0.001, "prefill_s_per_token": PREFILL_S_PER_TOKEN}))
        args.engine, args.instance = f"scripted:{script}", None
        env = {"HEADRACE_TENANT_HEADER": HEADER, "HEADRACE_LOG_LEVEL": "warning"}
        async with serving(args, "--decode", "2", env=env) as where:
            return await drive(where, args)


async def drive(where: Address, args: argparse.Namespace) -> dict[str, Any]:
    """Ask, compare, judge."""
    draw = random.Random(args.seed)
    async with where.client() as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        await measure(http, model, draw, name="warm", runs=8, tenants=("warm", "warmer"))
        pair = ("one", "one") if args.same_tenant else ("one", "two")
        apart = figures(*await measure(http, model, draw, name="apart", runs=args.runs, tenants=pair))
        print(f"two tenants: {apart}", flush=True)
        shared = figures(
            *await measure(http, model, draw, name="shared", runs=args.shared_runs, tenants=("one", "one"))
        )
        print(f"one tenant: {shared}", flush=True)
    problems = []
    if apart["cached_tokens"] or apart["cached_tokens_new"]:
        problems.append("a tenant found blocks of another one")
    if apart["tells"]:
        problems.append("times tell whether another tenant has asked before")
    if not shared["tells"] or not shared["cached_tokens"]:
        problems.append("within one tenant nothing is told either: this check could not fail")
    return {"check": "tenants", "seed": args.seed, "apart": apart, "shared": shared, "problems": problems,
            "ok": not problems}  # fmt: skip


def main() -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port-base", type=int, default=18960, help="ports of the private instance")
    parser.add_argument("--runs", type=int, default=200, help="prompts of each kind for two tenants")
    parser.add_argument("--shared-runs", type=int, default=40, help="prompts of each kind for one tenant")
    parser.add_argument("--same-tenant", action="store_true", help="one tenant in place of two: must fail")
    parser.add_argument("--seed", type=int, default=1)
    return report("tenants", check(parser.parse_args()), httpx.HTTPError, RuntimeError)


if __name__ == "__main__":
    sys.exit(main())
