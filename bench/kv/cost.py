"""What write-back costs streams: tokens per second with the host tier, and the disk below it, against without.

One instance gets the same load by turns with all of its tiers, with the disk frozen, and with both frozen (`headrace kv
freeze`): of two instances one is up to a tenth faster than the other for as long as it runs, so that their ratio tells
nothing of a few per cent. The prompts of a round are new, and the same in each turn under another salt, so that nothing
is found. Guessing ahead is off, since what it tries depends on the time that steps take. A round whose texts differ, or
in which a tier stores nothing or a frozen one something, ends the measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import cpu, load, servers
from bench.client import LoadFailed
from bench.kv import plan, probe
from bench.load import GateFailed
from bench.questions import ROOT, long_text
from bench.servers import Server
from bench.speculation import Pair
from bench.targets import SHORT

OFF, HOST, DISK = "off", "host", "host and disk"
ARMS = (OFF, HOST, DISK)
DISK_NBYTES = 1 << 30  # the oldest segments make room
WARM_UP_ROUNDS = 1
FIRST = 100_000  # number of the first prompt
HEARD_S = 1.0  # until every engine has heard by heartbeats what is frozen


@dataclass(frozen=True, slots=True)
class Run:
    """One arm's part of a round: seconds and processor seconds until the last text, blocks until all is at rest.

    `store_cpu_s` is the part of `cpu_s` that the store's process took.
    """

    seconds: float
    cpu_s: float
    store_cpu_s: float
    texts: tuple[str, ...]
    stored_blocks: int
    disk_blocks: int


FROZEN: dict[str, tuple[str, ...]] = {OFF: ("host", "disk"), HOST: ("disk",), DISK: ()}


def environment(disk: Path) -> dict[str, str]:
    """Return the settings of the instance."""
    return {
        "HEADRACE_SPECULATION": "off",
        "HEADRACE_KV_DISK_DIR": str(disk),
        "HEADRACE_KV_DISK_BYTES": str(DISK_NBYTES),
        "HEADRACE_KV_DISK_ADMISSION": "all",
    }


async def freeze(server: Server, arm: str) -> None:
    """Freeze the tiers that an arm goes without, and thaw the others.

    Raises:
        LoadFailed: if the instance does not do it.
    """
    tiers = [f"--tier={tier}" for tier in FROZEN[arm]]
    argv = ["kv", "freeze" if tiers else "thaw", *tiers, "--json", *servers.instance_options(server.spec)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace.cli", *argv, cwd=ROOT, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    if process.returncode or tuple(json.loads(out)["frozen"]) != tuple(sorted(FROZEN[arm])):
        raise LoadFailed(f"{arm}: the tiers were not frozen: {(out + err).decode()}")
    await asyncio.sleep(HEARD_S)


async def measure(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Run all rounds; returns a row per tier.

    Args:
        args: of `bench.kv`.
        directory: for logs and the disk tier.

    Raises:
        GateFailed: if a text with a tier differs from that without.
        LoadFailed: if a request fails, or a tier stores nothing.
    """
    taken: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    spec = servers.ours(args.model, args.port_base, ["--decode=1", *args.up], environment(directory / "written"))
    async with Server(spec, directory / "cost.log") as server:
        await probe.until(server, (probe.HOST_BLOCKS,))
        per_round = args.streams * args.per_stream
        for number in range(WARM_UP_ROUNDS + args.rounds):
            texts = [long_text(FIRST + number * per_round + i, SHORT) for i in range(per_round)]
            for arm in plan.order(ARMS, number):
                await freeze(server, arm)
                taken[arm].append(await _run(server, texts, args.streams, args.cost_tokens, salt=arm))
            check({arm: runs[-1] for arm, runs in taken.items()})
    counted = {arm: runs[WARM_UP_ROUNDS:] for arm, runs in taken.items()}
    return [row(tier, counted[OFF], counted[tier], per_round * args.cost_tokens) for tier in (HOST, DISK)]


def check(found: dict[str, Run]) -> None:
    """Check a round: same texts in all arms, and each arm stored what it should and nothing else.

    Raises:
        GateFailed: if a text with a tier differs from that without.
        LoadFailed: if a tier stored nothing, or no tier something.
    """
    plain = found[OFF]
    for arm, run in found.items():
        if differing := sum(a != b for a, b in zip(run.texts, plain.texts, strict=True)):
            raise GateFailed(f"streams beside write-back ({arm})", differing, len(run.texts))
        wrong = (arm != OFF) != (run.stored_blocks > 0) or (arm == DISK) != (run.disk_blocks > 0)
        if wrong:
            raise LoadFailed(f"{arm}: {run.stored_blocks} blocks stored, {run.disk_blocks} written to the disk")


def row(tier: str, off: Sequence[Run], on: Sequence[Run], tokens: int) -> dict[str, Any]:
    """Return the figures of one tier against none."""
    pairs = [Pair(tokens, a.seconds, b.seconds, 0, 0, 0) for a, b in zip(off, on, strict=True)]
    total = tokens * len(pairs)
    return {
        "tier": tier, **plan.cost(pairs),
        "blocks_per_s": round(sum(r.stored_blocks for r in on) / sum(r.seconds for r in on), 1),
        "disk_blocks_per_s": round(sum(r.disk_blocks for r in on) / sum(r.seconds for r in on), 1),
        "cpu_ms_per_token_off": round(sum(r.cpu_s for r in off) / total * 1000, 3),
        "cpu_ms_per_token_on": round(sum(r.cpu_s for r in on) / total * 1000, 3),
        "store_share_off": _store_share(off), "store_share_on": _store_share(on),
    }  # fmt: skip


def _store_share(runs: Sequence[Run]) -> float:
    return round(sum(r.store_cpu_s for r in runs) / sum(r.cpu_s for r in runs), 4)


async def _run(server: Server, prompts: Sequence[str], streams: int, tokens: int, salt: str) -> Run:
    texts = [""] * len(prompts)

    async def worker(numbers: Iterator[int]) -> None:
        for number in numbers:
            timing = await load.one(server.base, server.model, prompts[number], tokens, cache_salt=salt)
            texts[number] = timing.text

    before, used = await probe.metrics(server), cpu.seconds(server.pid)
    numbers, began = iter(range(len(prompts))), time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(worker(numbers))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    seconds = time.monotonic() - began
    took = {name: cpu_s - used.get(name, 0.0) for name, cpu_s in cpu.seconds(server.pid).items()}
    store = sum(cpu_s for name, cpu_s in took.items() if name.startswith("kv"))
    after = await probe.at_rest(server)
    stored, written = (round(after.get(name, 0) - before.get(name, 0)) for name in (probe.STORED, probe.INSERTED))
    return Run(seconds, sum(took.values()), store, tuple(texts), stored, written)
