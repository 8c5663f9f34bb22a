"""A second decode process is started by hand while traffic runs, takes part, and leaves again by SIGTERM.

It must hold requests within two seconds of its ready line, and its leaving must lose nothing: every text equals that of
an undisturbed run. The last line is one JSON object.
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

from chaos import invariants
from chaos.clients import bare_id, http_chat, native_chat
from chaos.history import Recorder
from chaos.instance import COMMAND, Address, InstanceFailed, add_options, report, serving
from chaos.watch import Watch
from chaos.workload import Load, streams

BOUND_S = 2.0
NODE = "by-hand"


class Traffic:
    """Keeps streams running until told to stop."""

    def __init__(self, recorder: Recorder, loads: list[Load], http: httpx.AsyncClient, nats: Any) -> None:
        self._recorder = recorder
        self._loads = loads
        self._http = http
        self._nats = nats
        self.stopping = False

    async def send(self, load: Load, name: str, recorder: Recorder | None = None) -> None:
        """Run one request."""
        recorder = recorder or self._recorder
        if load.client == "http":
            await http_chat(recorder, self._http, name, load.key, load.body)
        else:
            await native_chat(recorder, self._nats, name, load.key, load.body)

    async def references(self) -> dict[str, invariants.Answer]:
        """Run every request once, undisturbed."""
        recorder = Recorder(time.monotonic)
        await asyncio.gather(*(self.send(load, load.key, recorder) for load in self._loads))
        failed = [e.data for e in recorder.events if e.kind == "terminal" and e.data["error"] is not None]
        if failed:
            raise InstanceFailed(f"the undisturbed run failed: {failed[0]}")
        return {
            load.key: invariants.answer(e for e in recorder.events if e.request == load.key) for load in self._loads
        }

    async def run(self) -> None:
        """Send again and again, each worker its own request."""

        async def worker(load: Load) -> None:
            turn = 0
            while not self.stopping:
                await self.send(load, f"{load.key}/{turn}")
                turn += 1

        await asyncio.gather(*(worker(load) for load in self._loads))


class ByHand:
    """One decode node, started the way a person would: from a terminal, which is where its ready line goes."""

    def __init__(self) -> None:
        self._terminal, self._other_end = os.openpty()
        self._seen = b""
        self._ready = asyncio.Event()
        self.process: asyncio.subprocess.Process
        self.ready_at = 0.0

    async def start(self, where: Address, args: argparse.Namespace) -> None:
        """Start it."""
        argv = [*COMMAND, "actor", "decode", "--bus", where.bus, "--node", NODE, "--engine", args.engine]
        env = {**os.environ, "HEADRACE_BUS_TOKEN": where.token}
        self.process = await asyncio.create_subprocess_exec(*argv, stdout=self._other_end, env=env)
        os.close(self._other_end)
        asyncio.get_running_loop().add_reader(self._terminal, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._terminal, 4096)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._terminal)
            self._ready.set()
            return
        self._seen += data
        if b"ready" in self._seen and not self.ready_at:
            self.ready_at = time.monotonic()
            print(f"  {self._seen.decode(errors='replace').strip()}", flush=True)
            self._ready.set()

    async def ready(self, limit_s: float = 90.0) -> float:
        """Wait for its ready line; returns when it came.

        Raises:
            InstanceFailed: if the process ends first.
            TimeoutError: if it does not come in time.
        """
        async with asyncio.timeout(limit_s):
            await self._ready.wait()
        if not self.ready_at:
            raise InstanceFailed(f"the node ended with {await self.process.wait()} before it was ready")
        return self.ready_at


async def check(where: Address, args: argparse.Namespace) -> dict[str, Any]:
    """Scale out and in again under traffic."""
    recorder = Recorder(time.monotonic)
    nats = await where.connect("check-scale-out")
    watch = Watch(time.monotonic)
    await watch.start(nats)
    async with where.client() as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        # Different lengths, so that requests do not all begin at once.
        loads = [streams(model, at + 1, args.tokens + 7 * at)[at] for at in range(args.streams)]
        traffic = Traffic(recorder, loads, http, nats)
        references = await traffic.references()
        running = asyncio.create_task(traffic.run())
        node = ByHand()
        await node.start(where, args)
        process = node.process
        try:
            ready_at = await node.ready()

            def mine(w: Watch) -> frozenset[str]:
                return frozenset().union(*(s.held for s in w.live("decode") if s.beat.node == NODE))

            await watch.until(mine, timeout_s=30.0, what="the new node holding a request")
            takes_part_s = time.monotonic() - ready_at
            # Leave while it is in the middle of streams.
            await watch.until(
                lambda w: any(recorder.done[n] >= 4 for n, i in recorder.ids.items()
                              if n not in recorder.ended and bare_id(i) in mine(w)),
                timeout_s=30.0, what="the new node in the middle of a stream",
            )  # fmt: skip
            held = len(mine(watch))
            left_at = time.monotonic()
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60.0):
                code = await process.wait()
            leaving_s = time.monotonic() - left_at
        finally:
            traffic.stopping = True
            if process.returncode is None:
                process.kill()
        await running
    await nats.close()
    events = recorder.events
    found = (
        invariants.one_ending(events)
        + invariants.no_gap_no_repeat(events)
        + invariants.same_text(events, references)
    )
    for violation in found[:10]:
        print(violation)
    ends = [e for e in events if e.kind == "terminal"]
    failed = [e for e in ends if e.data["error"] is not None]
    for event in failed[:10]:
        print(f"{event.request} failed: {event.data['error']}")
    return {
        "check": "scale_out", "takes_part_ms": round(takes_part_s * 1000), "held_at_sigterm": held,
        "leaving_s": round(leaving_s, 2), "exit_code": code, "texts_compared": len(ends) - len(failed),
        "failed": len(failed), "violations": len(found),
        "ok": takes_part_s <= BOUND_S and held > 0 and code == 0 and not failed and not found,
    }  # fmt: skip


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find or start an instance with one decode node and check it."""
    async with serving(args, "--prefill", "1", "--decode", "1") as where:
        return await check(where, args)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, port_base=18680)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    return report("scale_out", run(parser.parse_args()), httpx.HTTPError, TimeoutError)


if __name__ == "__main__":
    sys.exit(main())
