"""Every process but the edge is restarted by SIGTERM, one after another, under load; then the edge too.

No request may fail while the others leave, and none of those that the edge had accepted before it was asked to: every
text equals that of an undisturbed run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from typing import Any

import httpx
from check_scale_out import Traffic

from chaos import invariants
from chaos.clients import http_chat
from chaos.history import Recorder
from chaos.instance import Address, add_options, report, serving
from chaos.watch import Watch
from chaos.workload import chat, streams

AGAIN_S = 60.0


def nodes_of(watch: Watch) -> dict[str, int]:
    """The nodes that speak, and their processes."""
    return {s.beat.node: s.beat.pid for s in watch.ready()}


async def restart(watch: Watch, node: str) -> float:
    """SIGTERM to a node's process; returns the seconds until its next incarnation is ready."""
    began = time.monotonic()
    old = nodes_of(watch)[node]
    kinds = {s.beat.ref.kind for s in watch.live() if s.beat.node == node and s.beat.pid == old}
    os.kill(old, signal.SIGTERM)

    def again(w: Watch) -> bool:
        return kinds <= {s.beat.ref.kind for s in w.ready() if s.beat.node == node and s.beat.pid != old}

    await watch.until(again, timeout_s=AGAIN_S, what=f"{node} being back")
    return time.monotonic() - began


def judge(recorder: Recorder, references: dict[str, invariants.Answer]) -> tuple[int, int, int]:
    """Return the numbers of texts compared, failed requests, and broken promises; says which."""
    events = recorder.events
    found = (
        invariants.one_ending(events) + invariants.no_gap_no_repeat(events) + invariants.same_text(events, references)
    )
    ends = [e for e in events if e.kind == "terminal"]
    failed = [e for e in ends if e.data["error"] is not None]
    for line in [*map(str, found), *(f"{e.request} failed: {e.data['error']}" for e in failed)][:10]:
        print(line, flush=True)
    return len(ends) - len(failed), len(failed), len(found)


async def rolling(traffic: Traffic, watch: Watch, rounds: int) -> dict[str, float]:
    """Restart all nodes but the edge under load."""
    running = asyncio.create_task(traffic.run())
    took: dict[str, float] = {}
    try:
        for _ in range(rounds):
            for node in sorted(n for n in nodes_of(watch) if n != "edge"):
                await asyncio.sleep(0.5)
                took[node] = round(await restart(watch, node), 2)
                print(f"  {node} is back after {took[node]:.2f} s", flush=True)
    finally:
        traffic.stopping = True
    await running
    return took


async def restart_edge(where: Address, watch: Watch, model: str, tokens: int) -> tuple[Recorder, Any, float]:
    """Restart the edge in the middle of answers: those that it has accepted come to their end."""
    bodies = [chat(model, f"Tell me about bridge number {i}.", tokens, seed=None, stream=bool(i % 2)) for i in range(6)]
    references, recorder = Recorder(time.monotonic), Recorder(time.monotonic)
    async with where.client() as http:
        await asyncio.gather(*(http_chat(references, http, f"edge-{i}", f"edge-{i}", b) for i, b in enumerate(bodies)))
    undisturbed = {
        f"edge-{i}": invariants.answer(e for e in references.events if e.request == f"edge-{i}")
        for i in range(len(bodies))
    }
    async with where.client() as http:
        sent = [
            asyncio.create_task(http_chat(recorder, http, f"edge-{i}/0", f"edge-{i}", body))
            for i, body in enumerate(bodies)
        ]
        # A whole answer shows nothing before its end; the streams, sent with it, say that all have been accepted.
        while not all(recorder.done.get(f"edge-{i}/0") for i in range(1, len(bodies), 2)):
            await asyncio.sleep(0.01)
        took = await restart(watch, "edge")
        await asyncio.gather(*sent)
    return recorder, undisturbed, round(took, 2)


async def check(where: Address, args: argparse.Namespace) -> dict[str, Any]:
    """Restart everything under load."""
    recorder = Recorder(time.monotonic)
    nats = await where.connect("check-rolling")
    watch = Watch(time.monotonic)
    await watch.start(nats)
    everybody = {"kv", "transfer", "decode", "admission", "tokenize", "detokenize", "edge"}
    await watch.until(lambda w: everybody <= {s.beat.ref.kind for s in w.ready()}, timeout_s=20.0, what="all kinds")
    await asyncio.sleep(1.0)
    async with where.client() as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        loads = [streams(model, at + 1, args.tokens + 7 * at)[at] for at in range(args.streams)]
        traffic = Traffic(recorder, loads, http, nats)
        references = await traffic.references()
        took = await rolling(traffic, watch, args.rounds)
    compared, failed, violations = judge(recorder, references)
    edge_recorder, edge_references, took["edge"] = await restart_edge(where, watch, model, args.tokens)
    edge_compared, edge_failed, edge_violations = judge(edge_recorder, edge_references)
    await nats.close()
    total = violations + edge_violations
    return {
        "check": "rolling", "restarted": took, "rounds": args.rounds, "texts_compared": compared + edge_compared,
        "failed": failed, "failed_at_edge": edge_failed, "violations": total,
        "ok": compared > 0 and edge_compared > 0 and not failed and not edge_failed and not total,
    }  # fmt: skip


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find or start an instance and check it."""
    async with serving(args) as where:
        return await check(where, args)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, port_base=18720)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    return report("rolling", run(parser.parse_args()), httpx.HTTPError, TimeoutError)


if __name__ == "__main__":
    sys.exit(main())
