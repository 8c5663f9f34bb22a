"""Time to the first token of prompts that another host has computed, beside prompts that are new to both.

Two hosts on one bus, as processes of this machine: the first one computes and stores the prompts; then its engine is
frozen, and the second one, with an engine and a store of its own, gets them again. Their blocks come over TCP, as the
counters of both sides must show; answers are those of the first host, or there is no figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench import cpu, load, servers
from bench.client import LoadFailed
from bench.kv import plan, probe
from bench.load import GateFailed
from bench.questions import ROOT, long_text
from bench.servers import Server
from headrace.instance import find
from kvstore.block import BLOCK_TOKENS
from schemas.settings import load as load_settings

APART = 1000  # numbers of prompts of one length
FIRST, SECOND = "first host", "second host"
FETCHED, SERVED, KNOWN = "kv_remote_fetched_total", "transfer_serve_bytes_total", "kv_remote_known"
LEAVE_LIMIT_S = 30.0


async def measure(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Measure the path; returns a row per length for new prompts and for those of the other host.

    Raises:
        GateFailed: if a text differs from that of the first host.
        LoadFailed: if a request fails, or its blocks come from elsewhere than they should.
    """
    tokens = int(sum(args.lengths) * (2 * args.repetitions + 2) * plan.SPARE * plan.SPARE)
    device = plan.pool_blocks(args.lengths) * BLOCK_TOKENS
    room = {"HEADRACE_HOST_TIER_TOKENS": str(tokens), "HEADRACE_POOL_TOKENS": str(device)}
    env = room | {"HEADRACE_HOST": "first", "HEADRACE_FROZEN_KILL_S": "3600"}
    port = args.port_base + 20
    spec = servers.ours(args.model, port, ["--decode=1", *args.up], env)
    samples: list[plan.Sample] = []
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(spec, directory / "first.log"))
        await probe.until(server, (probe.HOST_BLOCKS,))
        asked = [(plan.COLD, length, number) for number in range(args.repetitions) for length in args.lengths]
        await _run(server, FIRST, [(plan.WARM_UP, args.lengths[0], APART - 1), *asked], samples, args)
        for kinds in (("kv", "transfer"), ("decode",)):
            await stack.enter_async_context(_Node(args, kinds, f"bench-{port}", room, directory))
        stored = (await probe.at_rest(server))["kv_stored"]
        await _knows(server, stored)
        frozen = _engine(server)
        os.kill(frozen, signal.SIGSTOP)
        stack.callback(os.kill, frozen, signal.SIGCONT)
        await asyncio.sleep(3.0)  # its silence is noticed after 1.2 s
        again: list[tuple[str, int, int]] = [(plan.WARM_UP, args.lengths[0], APART - 2)]
        for number in range(args.repetitions):
            for length in args.lengths:
                again += [(plan.COLD, length, args.repetitions + number), (plan.OTHER, length, number)]
        await _run(server, SECOND, again, samples, args)
    if differing := plan.differing(samples):
        raise GateFailed("prompts from another host", differing, len(samples))
    return plan.table(samples, (FIRST, SECOND))


async def _run(
    server: Server, phase: str, requests: Iterable[tuple[str, int, int]], samples: list[plan.Sample],
    args: argparse.Namespace,
) -> None:  # fmt: skip
    before = await probe.at_rest(server)
    for path, length, number in requests:
        text = long_text(args.lengths.index(length) * APART + 500_000 + number, length)
        timing = await load.one(server.base, server.model, text, args.tokens)
        after = await probe.at_rest(server)
        loaded, fetched, served = (round(after.get(n, 0) - before.get(n, 0)) for n in (probe.LOADED, FETCHED, SERVED))
        sample = plan.Sample(
            phase, path, length, number, timing.ttft_s, timing.prompt_tokens, timing.cached_tokens, loaded, fetched,
            served, timing.text,
        )  # fmt: skip
        if sample.fault:
            raise LoadFailed(sample.fault)
        samples.append(sample)
        before = after


async def _knows(server: Server, stored: float) -> None:
    for _ in range(600):
        if (await probe.metrics(server)).get(KNOWN, 0.0) >= stored:
            return
        await asyncio.sleep(probe.POLL_S)
    raise LoadFailed(f"the second host does not know of the {stored:g} blocks of the first")


def _engine(server: Server) -> int:
    for process in server.processes():
        if cpu.title(process).startswith("decode"):
            return process.pid
    raise LoadFailed("no process of the instance is an engine")


class _Node:
    """A node of the second host, on the bus of the first."""

    def __init__(
        self, args: argparse.Namespace, kinds: tuple[str, ...], instance: str, env: dict[str, str], directory: Path
    ) -> None:
        state = find(load_settings({}).settings.runtime_path, instance)
        self._argv = [
            sys.executable, "-m", "headrace.cli", "actor", *kinds, "--bus", state.bus_url, "--model", str(args.model),
            "--node", f"second-{kinds[0]}",
        ]  # fmt: skip
        mine = {"HEADRACE_HOST": "second", "HEADRACE_INSTANCE": f"{instance}-b", "HEADRACE_BUS_TOKEN": state.bus_token}
        self._env, self._log = {**os.environ, **env, **mine}, directory / f"second-{kinds[0]}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> _Node:
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, stdout=out, stderr=out, env=self._env, cwd=ROOT
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(LEAVE_LIMIT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
