"""Time to the first token of prompts that are computed, found in the device pool, in host memory, or on the disk.

One engine, so that nobody has to guess whose pool a prompt lies in. Prompts leave the device pool because others need
its room, and host memory because the whole instance is stopped and started anew. Where a prompt's blocks came from is
told by the answer's usage and by counters; an answer that is not the first run's ends the measurement.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import load, servers
from bench.client import LoadFailed
from bench.kv import plan, probe
from bench.load import GateFailed
from bench.questions import long_text
from bench.servers import Server, ServerSpec
from kvstore.block import BLOCK_TOKENS

APART = 1000  # numbers of prompts of one length: no prompt is the beginning of another one


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Measure each path before and after a restart.

    Args:
        args: of `bench.kv`.
        directory: for logs and the disk tier.

    Raises:
        GateFailed: if a text differs from that of the same prompt's first run.
        LoadFailed: if a request fails, or its blocks come from elsewhere than they should.
    """
    disk = directory / "disk"
    spec = _instance(args, disk)
    samples: list[plan.Sample] = []
    async with Server(spec, directory / "before.log") as server:
        await probe.until(server, (probe.HOST_BLOCKS,))
        await _run(server, plan.BEFORE, plan.rounds(args.lengths, args.repetitions), samples, args, disk)
    counted = probe.counts_reads(directory)
    async with Server(spec, directory / "after.log") as server:
        found = await probe.until(server, ("kv_disk_records", "decode_kv_index_hashes"))
        records = round(found["kv_disk_records"])
        print(f"  restarted: {records} blocks on the disk, ready after {server.start_s:.1f} s", flush=True)
        await _run(server, plan.AFTER, plan.restarted(args.lengths, args.repetitions), samples, args, disk)
    if differing := plan.differing(samples):
        raise GateFailed("prompts from the store", differing, len(samples))
    return {"rows": plan.table(samples), "records": records, "reads_are_counted": counted}


def _instance(args: argparse.Namespace, disk: Path) -> ServerSpec:
    """Return an instance whose host memory holds all prompts before the restart, and half of those after it."""
    device = plan.pool_blocks(args.lengths) * BLOCK_TOKENS
    host = int(sum(args.lengths) * (args.repetitions + 2) * plan.SPARE * plan.SPARE)
    env = {"HEADRACE_KV_DISK_DIR": str(disk), "HEADRACE_HOST_TIER_TOKENS": str(host)}
    return servers.ours(args.model, args.port_base, ["--decode=1", f"--pool-tokens={device}", *args.up], env)


async def _run(
    server: Server,
    phase: str,
    requests: Iterable[tuple[str, int, int]],
    samples: list[plan.Sample],
    args: argparse.Namespace,
    disk: Path,
) -> None:
    """Send the requests one after another, each when the store is at rest; the samples are appended."""
    before = await probe.at_rest(server)
    pid = probe.store_pid(server)
    for path, length, number in requests:
        if path == plan.DISK:
            probe.forget(probe.segments(disk))
        read = probe.read_nbytes(pid)
        text = long_text(args.lengths.index(length) * APART + number, length)
        timing = await load.one(server.base, server.model, text, args.tokens)
        read_after = probe.read_nbytes(pid)
        after = await probe.at_rest(server)
        loaded, from_disk = (round(after[name] - before.get(name, 0)) for name in (probe.LOADED, probe.FROM_DISK))
        nbytes = None if read is None or read_after is None else read_after - read
        sample = plan.Sample(
            phase, path, length, number, timing.ttft_s, timing.prompt_tokens, timing.cached_tokens, loaded, from_disk,
            nbytes, timing.text,
        )  # fmt: skip
        if sample.fault:
            raise LoadFailed(sample.fault)
        samples.append(sample)
        before = after
