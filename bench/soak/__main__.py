"""`python -m bench.soak`: mixed traffic of two tenants on a store one tenth of its working set, compared text by text.

Conversations that resend what was said, documents that come once, one and two choices, streamed and whole, some given
up; then the same requests run on an instance without a store, each from its first token on. The last line is one JSON
object; the exit code is 1 if a text differs, a request fails, a tenant found what was another's, memory grew, or a
ledger does not balance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from bench import servers
from bench.client import LoadFailed
from bench.kv import probe
from bench.servers import Server, ServerFailed
from bench.soak import memory, plan, traffic
from bench.soak.forger import forge
from chaos.instance import address
from chaos.kv.live import unbalanced
from chaos.probe import Probe, parse
from chaos.watch import Watch
from headrace.fetch import ensure_model
from kvstore.block import BLOCK_TOKENS
from kvstore.record import HEADER_NBYTES
from models.source import open_model

SHARE = 10  # the working set over each of the tiers
POOL_TOKENS = 2048
REST_LIMIT_S = 30.0
ENGINES = ("prefill", "decode", "both")
SHOWN = 10  # problems that are printed
LEAST_FOR_DISK = 2.0  # minutes


def block_nbytes(model: Path) -> int:
    """Return the size of a block of the engine that serves this model: bfloat16."""
    with open_model(model) as source:
        return source.config.num_layers * 2 * BLOCK_TOKENS * source.config.kv_width * 2


def _say(line: str) -> None:
    print(line, flush=True)


async def soak(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the traffic with a store, then without, and judge it.

    Raises:
        LoadFailed: if a request without a store fails.
        ServerFailed: if an instance does not start.
    """
    tokens = plan.working_set(args.talks) // SHARE // BLOCK_TOKENS * BLOCK_TOKENS
    disk, blocks = directory / "disk", tokens // BLOCK_TOKENS
    # Segments take whole pages of the file system, and one page more each.
    disk_nbytes = blocks * (block_nbytes(args.model) + HEADER_NBYTES + 4096)
    env = {
        "HEADRACE_HOST_TIER_TOKENS": str(tokens), "HEADRACE_KV_DISK_DIR": str(disk),
        "HEADRACE_KV_DISK_BYTES": str(disk_nbytes), "HEADRACE_KV_DISK_ADMISSION": "all",
        "HEADRACE_TENANT_HEADER": plan.TENANT_HEADER, "HEADRACE_LOG_LEVEL": "warning",
        **dict(line.split("=", 1) for line in args.env),
    }  # fmt: skip
    options = [f"--pool-tokens={POOL_TOKENS}", *args.up]
    async with Server(servers.ours(args.model, args.port_base, options, env), directory / "store.log") as server:
        _say(f"working set of {tokens * SHARE} tokens and documents; {tokens} in host memory, as many on the disk")
        answers, samples, found = await _with_store(args, server, disk)
    requests = {answer.sent.request.key: answer.sent.request for answer in answers}
    plain = {"HEADRACE_HOST_TIER_TOKENS": "0", "HEADRACE_LOG_LEVEL": "warning"}
    spec = servers.ours(args.model, args.port_base + 5, [f"--pool-tokens={POOL_TOKENS}", *args.up], plain)
    async with Server(spec, directory / "plain.log") as server:
        _say(f"{len(answers)} answers; {len(requests)} requests run without a store")
        references = await traffic.refer(server, requests.values())
    wrong = plan.problems(answers, references)
    for line in wrong[:SHOWN]:
        _say(f"  {line[:300]}")
    grown = memory.judge(samples, limit_mb=args.limit_mb, disk_limit=disk_nbytes, answers=len(answers))
    return {**_figures(args, answers, tokens, wrong), "memory": grown, **found}


async def _with_store(
    args: argparse.Namespace, server: Server, disk: Path
) -> tuple[list[plan.Answer], list[memory.Sample], dict[str, Any]]:
    where = address(f"bench-{args.port_base}")
    nats = await where.connect("soak")
    try:
        watch, asked = Watch(time.monotonic), Probe(nats)
        await watch.start(nats)
        await asked.start()
        await probe.until(server, (probe.HOST_BLOCKS,))
        forger = await forge(nats) if args.forge else None
        watcher = memory.Watcher(server, disk, max(0.5, args.minutes * 60 / 400))
        watching = asyncio.create_task(watcher.watch())
        try:
            answers = await traffic.run(
                server, plan.Traffic(server.model, args.seed, args.talks), args.minutes * 60, _progress()
            )
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        found = await probe.at_rest(server)
        ledgers, problems = await _ledgers(watch, asked)
    finally:
        await nats.close()
    tiers = {
        "device": sum(found.get(f"{kind}_blocks_matched_total", 0.0) for kind in ENGINES),
        "host": found.get("kv_hits_total", 0.0),
        "disk": found.get(probe.FROM_DISK, 0.0),
    }
    evicted = {"host": found.get("kv_evicted_total", 0.0), "disk": found.get("kv_disk_evicted_total", 0.0)}
    return answers, watcher.samples, {
        "hits_blocks": {tier: round(count) for tier, count in tiers.items()},
        "evicted_blocks": {tier: round(count) for tier, count in evicted.items()},
        "loaded_blocks": round(found.get(probe.LOADED, 0.0)), "stored_blocks": round(found.get(probe.STORED, 0.0)),
        "lookups_failed": round(found.get("kv_lookups_failed_total", 0.0)),
        "damaged_blocks": round(found.get("kv_blocks_damaged_total", 0.0)),
        "forged_blocks": forger.stored if forger is not None else 0,
        "ledgers": ledgers, "unbalanced": problems,
    }  # fmt: skip


def _progress() -> Any:
    """Say now and then how far it is."""
    count, said = 0, time.monotonic()

    def on_answer(answer: plan.Answer) -> None:
        nonlocal count, said
        count += 1
        if answer.error:
            _say(f"  {answer.sent.request.key} of {answer.sent.tenant} failed: {answer.error[:200]}")
        if time.monotonic() - said >= 30.0:
            said = time.monotonic()
            _say(f"  {count} answers")

    return on_answer


async def _ledgers(watch: Watch, asked: Probe) -> tuple[int, list[str]]:
    """Hold the ledgers of all pools to their sums, once everything rests; how many, and what is wrong."""
    end = time.monotonic() + REST_LIMIT_S
    while True:
        nodes = {seen.beat.node: seen.beat.ref.kind for seen in watch.ready("kv", *ENGINES)}
        problems = []
        for node, text in (await asked.texts(set(nodes), timeout_s=10.0)).items():
            head = f"headrace_{nodes[node]}_"
            figures = {name.removeprefix(head): v for (name, _), v in parse(text).items() if name.startswith(head)}
            problems += [f"{node}: {problem}" for problem in unbalanced(nodes[node], figures)]
        if not problems or time.monotonic() > end:
            return len(nodes), problems
        await asyncio.sleep(0.5)


def _figures(args: argparse.Namespace, answers: list[plan.Answer], tokens: int, wrong: list[str]) -> dict[str, Any]:
    sizes: dict[tuple[str, str], int] = {}
    for answer in answers:
        chain = (answer.sent.tenant, answer.sent.request.chain)
        sizes[chain] = max(sizes.get(chain, 0), answer.prompt_tokens)
    kinds = Counter(answer.sent.request.key.partition("-")[0] for answer in answers)
    return {
        "requests": len(answers), "distinct": len({answer.sent.request.key for answer in answers}),
        "kinds": dict(kinds), "left": sum(answer.sent.leaves for answer in answers),
        "two_choices": sum(answer.sent.request.choices > 1 for answer in answers),
        "failed": sum(bool(answer.error) for answer in answers),
        "texts_compared": sum(len(answer.texts) for answer in answers if not answer.error),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "crossings": sum(answer.crossed for answer in answers),
        "working_set_tokens": sum(sizes.values()), "tier_tokens": tokens,
        "problems": len(wrong), "first_problems": [line[:300] for line in wrong[:3]],
    }  # fmt: skip


def verdict(result: dict[str, Any]) -> list[str]:
    """Return why a run is not a good one, one reason each; a short one may end before anything came from the disk."""
    reasons = []
    if result["problems"]:
        reasons.append(f"{result['problems']} answers are wrong")
    if not result["texts_compared"]:
        reasons.append("nothing was compared")
    if not result["crossings"]:
        reasons.append("no tenant asked for what the other one had asked before")
    needed = {tier for tier in result["hits_blocks"] if tier != "disk" or result["minutes"] >= LEAST_FOR_DISK}
    reasons += [f"no hit in the tier {tier}" for tier in sorted(needed) if not result["hits_blocks"][tier]]
    reasons += [f"nothing was evicted from the tier {tier}" for tier, n in result["evicted_blocks"].items() if not n]
    if not result["memory"]["ok"]:
        reasons.append("memory grew, or files passed their bounds")
    if result["unbalanced"] or not result["ledgers"]:
        reasons.append("ledgers do not balance")
    return reasons


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of traffic with the store")
    parser.add_argument("--talks", type=int, default=16, help="conversations of each tenant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-mb", type=float, default=32.0, help="growth of all processes that counts as flat")
    parser.add_argument("--forge", action="store_true", help="store wrong blocks meanwhile: the command must then fail")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--port-base", type=int, default=18840)
    parser.add_argument("--directory", type=Path, default=None, help="where the disk tier lies meanwhile")
    parser.add_argument("--up", action="append", default=[], help="one more argument for `headrace up`")
    parser.add_argument("--env", action="append", default=[], help="one more setting of the store's: HEADRACE_X=VALUE")
    return parser


def main() -> int:
    """Run the command line."""
    args = _arguments().parse_args()
    result: dict[str, Any] = {"check": "soak-kv", "seed": args.seed, "minutes": args.minutes}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-soak-", dir=args.directory) as directory:
        try:
            args.model = args.model or ensure_model()
            result |= asyncio.run(soak(args, Path(directory)))
            result["why"] = verdict(result)
        except* (ServerFailed, LoadFailed, httpx.HTTPError, OSError, TimeoutError, KeyError) as several:
            first = several.exceptions[0]
            result |= {"why": [f"{type(first).__name__}: {first}"]}
    result |= {"seconds": round(time.monotonic() - began, 1), "ok": not result["why"]}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
