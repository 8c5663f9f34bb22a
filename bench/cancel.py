"""`python -m bench.cancel`: from a client's leaving to its blocks free and its computation stopped, in every phase.

Clients leave while their prompt is tokenized, waits for a place in an engine, is computed, is handed over, while they
are answered, and while they read nothing; over HTTP by closing the connection, natively by a word or silently. What the
actors say is heard on the bus: an engine says `Closed` when it has dropped a request between two steps and freed its
blocks; a copy that was under way frees its blocks when it is over. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nats.aio.client import Client as Nats
from rich.console import Console
from rich.table import Table

from bench.cancel_leaving import NEVER, HttpLeaver, Leaver, Ledger, NativeLeaver, Seen, until
from bench.failover import run
from bench.load import model_of, one
from bench.stats import percentile
from bench.tap import Tap
from chaos.gremlin import draw
from chaos.instance import Address, Instance, InstanceFailed, leftovers
from chaos.probe import Probe
from chaos.watch import Watch
from chaos.workload import FILLER, chat
from schemas.messages import Heartbeat

OVER_MS = 50.0  # beyond one step
SILENT_MS = 2500.0 + 50.0  # three unanswered frames within the detokenizer's window, and the bound
ENGINES = ("prefill", "decode", "both")
PHASES = ("tokenizing", "queued", "prefilling", "transferring", "decoding", "not-reading")
CLIENTS = ("http", "native")
MAX_RUNNING = 4
LIMIT_S = 10.0
LATE_S = 0.05
HEARTBEATS_S = 0.6  # two of them
NULL = "null:decode_s=0.005,prefill_s_per_token=0.0005"
HELD = ("running", "waiting", "held", "expected", "blocks_in_use", "blocks_quarantined")


class Unended(Exception):
    """Raised when a request came to nothing in time: it did not get to the phase, or was still held after its end."""


def waits_for_place(beat: Heartbeat) -> bool:
    """Whether an engine holds a computed prompt for one that decodes, or decodes and lets one wait."""
    return int(beat.load.get("held" if beat.ref.kind == "prefill" else "waiting", 0)) > 0


class Bench:
    """Leaves, and measures."""

    def __init__(
        self, where: Address, nats: Nats, args: argparse.Namespace, *, long_chars: int, huge_chars: int
    ) -> None:
        self._where = where
        self._nats = nats
        self._args = args
        self._ledger = Ledger()
        self._watch = Watch(time.monotonic)
        self._probe = Probe(nats)
        self._long, self._huge = long_chars, huge_chars
        self._turn = 0
        self.model = ""
        self.prefill_s = 0.0

    async def start(self) -> None:
        """Listen, warm up, and see how long a long prompt takes."""
        await self._watch.start(self._nats)
        await self._probe.start()
        await Tap(self._ledger.on_message, self._ledger.on_items).start(self._nats)
        self.model = await model_of(self._where.http)
        await one(self._where.http, self.model, "Good morning.", 8)
        took = [(await one(self._where.http, self.model, self._text(self._long), 1)).ttft_s for _ in range(2)]
        self.prefill_s = min(took)

    def _text(self, chars: int) -> str:
        self._turn += 1
        return f"{self._args.seed}/{self._turn}: " + (FILLER * (chars // len(FILLER) + 1))[:chars]

    async def _steps(self) -> tuple[float, float]:
        nodes = {seen.beat.node for seen in self._watch.ready(*ENGINES)}
        found = await self._probe.ask(nodes, timeout_s=10.0)
        total = sum(v for (name, _), v in found.items() if name == "headrace_engine_step_seconds_sum")
        return total, sum(v for (name, _), v in found.items() if name == "headrace_engine_step_seconds_count")

    async def rest(self) -> bool:
        """Wait until no engine holds anything; whether that came true."""

        def idle(watch: Watch) -> bool:
            live = watch.live(*ENGINES)
            return bool(live) and not any(seen.figure(name) for seen in live for name in HELD)

        try:
            await self._watch.until(idle, timeout_s=5.0, what="engines at rest")
        except TimeoutError:
            return False
        return True

    async def phase(self, phase: str, client: str) -> dict[str, Any]:
        """Let clients leave in one phase, one after the other; returns the row."""
        background: list[asyncio.Task[Any]] = []
        if phase == "queued":
            places = MAX_RUNNING * len(self._watch.ready("decode", "both"))
            background = [asyncio.create_task(self._occupy()) for _ in range(places)]
            await asyncio.sleep(max(0.5, self.prefill_s / 4))
            for _ in range(places):  # until all are taken: one engine may have got more than it has places
                await asyncio.sleep(HEARTBEATS_S)
                if all(seen.figure("running") >= MAX_RUNNING for seen in self._watch.ready("decode", "both")):
                    break
                background.append(asyncio.create_task(self._occupy()))
        before = await self._steps()
        free, stopped, missed, unended, late = [], [], 0, 0, 0
        for _ in range(self._args.count):
            try:
                found = await self._one(phase, client)
            except Unended:
                unended += 1
                continue
            if found is None:
                missed += 1
                continue
            free.append(found[0] * 1000)
            stopped.append(found[1] * 1000)
            late += found[2]
        after = await self._steps()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        at_rest = await self.rest()
        step_ms = (after[0] - before[0]) / max(1.0, after[1] - before[1]) * 1000
        bound = step_ms + (SILENT_MS if client == "native-silent" else OVER_MS)
        return {
            "phase": phase, "client": client, "count": len(free), "missed": missed, "unended": unended,
            "free_p50_ms": round(percentile(free, 0.5), 1), "free_p99_ms": round(percentile(free, 0.99), 1),
            "stopped_p50_ms": round(percentile(stopped, 0.5), 1),
            "stopped_p99_ms": round(percentile(stopped, 0.99), 1), "step_ms": round(step_ms, 1),
            "bound_ms": round(bound, 1), "met": bool(free) and percentile(free, 0.99) <= bound,
            "late_items": late, "at_rest": at_rest,
        }  # fmt: skip

    async def _occupy(self) -> None:
        while True:
            # Long answers: a prompt in between would be a step unlike the others.
            await one(self._where.http, self.model, self._text(40), 1500)

    def _parked(self, since: float) -> bool:
        """Whether an engine has said since then that it holds a prompt which waits for a place."""
        return any(seen.t > since and waits_for_place(seen.beat) for seen in self._watch.live(*ENGINES))

    def _leaver(self, phase: str, client: str) -> Leaver:
        reads = phase != "not-reading"
        if client == "http":
            return HttpLeaver(self._where.http, reads=reads)
        return NativeLeaver(self._nats, silent=client == "native-silent", acknowledges=reads)

    async def _one(self, phase: str, client: str) -> tuple[float, float, int] | None:
        """Send, leave in the phase, and wait; returns seconds to free, to stopped, and items that came afterwards.

        None if the moment was missed: the answer was over before.

        Raises:
            Unended: if nothing was heard in time.
        """
        chars = {"tokenizing": self._huge, "prefilling": self._long, "transferring": self._long}.get(phase, 40)
        text = self._text(chars)
        seen = self._ledger.expect(text.partition(":")[0] + ":")
        leaver = self._leaver(phase, client)
        tokens = 1500 if phase == "not-reading" else 400
        body = chat(self.model, text, tokens, seed=None, stream=self._turn % 2 == 0 or phase == "not-reading")
        await leaver.ask(body)
        try:
            if not await self._moment(phase, client, seen, leaver):
                if phase == "queued" and seen.last_items:  # a place was free
                    leaver.leave()
                    return None
                if seen.told == NEVER:
                    raise Unended
                return None
            left_at = leaver.leave()
            if not await until(lambda: seen.free_at(left_at) is not None, seen.news, LIMIT_S):
                raise Unended
            free_at = seen.free_at(left_at)
            assert free_at is not None
            if seen.told < left_at and phase != "tokenizing":
                return None  # it was over by itself
            stopped_at = seen.stopped_at(left_at)
            # Items come on another connection than what engines say of it, and may be heard a little later.
            await asyncio.sleep(2 * LATE_S)
            return free_at - left_at, stopped_at - left_at, int(seen.last_items > stopped_at + LATE_S)
        finally:
            await leaver.close()

    async def _moment(self, phase: str, client: str, seen: Seen, leaver: Leaver) -> bool:
        """Wait for the phase."""
        by_lot = draw(self._args.seed, self._turn, "moment")
        match phase:
            case "tokenizing":
                return await until(lambda: "tokenize" in seen.marks, seen.news, LIMIT_S)
            case "queued":
                # Not before its prompt is computed: a client that leaves during that step waits for its end.
                found = await until(lambda: "dispatched" in seen.marks, seen.news, LIMIT_S)
                since = time.monotonic()
                found = found and await until(lambda: self._parked(since) or seen.last_items > 0, seen.news, LIMIT_S)
                found = found and not seen.last_items
            case "transferring":
                return await until(lambda: "transfer" in seen.marks, seen.news, LIMIT_S)
            case "decoding" if client == "http" and self._turn % 2:  # not streamed: its client sees no item
                found = await until(lambda: seen.last_items > 0, seen.news, LIMIT_S)
            case "decoding":
                found = await until(lambda: leaver.num_items > 3, seen.news, LIMIT_S)
            case _:
                found = await until(lambda: "dispatched" in seen.marks, seen.news, LIMIT_S)
        waits = {"queued": 0.1, "prefilling": 0.6 * self.prefill_s, "not-reading": 1.0}
        await asyncio.sleep(by_lot * waits.get(phase, 0.1) + (0.5 if phase == "not-reading" else 0.0))
        return found


async def engine(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Measure one engine in a private instance with a prefill engine, so that every phase is there.

    Raises:
        InstanceFailed: if it does not start, or leaves something behind.
    """
    name = f"cancel-{args.port_base}"
    instance = Instance(name, log=Path(args.logs) / f"{name}.log")
    flags = ("--engine", kind, "--prefill", "1", "--isolate", *args.up)  # the bus then carries all that is said
    await instance.start(*flags, port_base=args.port_base, env={"HEADRACE_MAX_RUNNING": str(MAX_RUNNING)})
    fast = kind.startswith(("null", "scripted"))
    rows = []
    try:
        nats = await instance.address.connect("bench-cancel")
        try:
            chars = (2000, 6000) if fast else (6000, 24_000)
            bench = Bench(instance.address, nats, args, long_chars=chars[0], huge_chars=chars[1])
            await bench.start()
            for phase in args.phases:
                for client in (*args.clients, *(("native-silent",) if phase == "decoding" else ())):
                    rows.append(await bench.phase(phase, client))
                    print(f"  {kind} {rows[-1]}", flush=True)
        finally:
            await nats.close()
    finally:
        code, left = await instance.stop(), leftovers(name)
    if code or left:
        raise InstanceFailed(f"stopped with exit code {code}, left {left}:\n{instance.tail()}")
    return {"engine": kind, "prefill_s": round(bench.prefill_s, 3), "rows": rows}


def show(result: dict[str, Any]) -> None:
    """Print a table per engine."""
    names = ("phase", "client", "count", "free_p50_ms", "free_p99_ms", "stopped_p50_ms", "stopped_p99_ms", "step_ms",
             "bound_ms", "met")  # fmt: skip
    title = f"{result['engine']}: from leaving to blocks free and computation stopped"
    table = Table(*(n.replace("_", " ") for n in names), title=title, title_justify="left")
    for row in result["rows"]:
        table.add_row(*(str(row[n]) for n in names))
    Console(width=140).print(table)


async def _main(args: argparse.Namespace) -> dict[str, Any]:
    args.logs = args.logs or tempfile.mkdtemp(prefix="headrace-cancel-")
    if args.quick:
        args.count = 2
    found = []
    for kind in args.engines:
        found.append(await engine(args, kind))
        show(found[-1])
    rows = [row for one_engine in found for row in one_engine["rows"]]
    ok = all(row["at_rest"] and row["count"] and not row["late_items"] and not row["unended"] for row in rows)
    return {"check": "cancel", "engines": found, "ok": ok and bool(rows)}


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cancel", description=__doc__)
    parser.add_argument("--engines", type=lambda s: s.split(";"), default=["auto", NULL], help="by semicolons")
    parser.add_argument("--phases", type=lambda s: tuple(s.split(",")), default=PHASES)
    parser.add_argument("--clients", type=lambda s: tuple(s.split(",")), default=CLIENTS)
    parser.add_argument("--count", type=int, default=20, help="clients that leave, per phase and kind of client")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port-base", type=int, default=18780)
    parser.add_argument("--logs", default="", help="directory for the instances' logs")
    parser.add_argument("--up", action="append", default=[], help="one more argument for `headrace up`")
    parser.add_argument("--quick", action="store_true", help="a smoke test: two clients per phase")
    return parser


def main() -> int:
    """Run the command line."""
    args = _arguments().parse_args()
    return run(lambda: _main(args), "cancel")


if __name__ == "__main__":
    sys.exit(main())
