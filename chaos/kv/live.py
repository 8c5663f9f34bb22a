"""The other half of `chaos-kv`: a running instance whose store is hurt under traffic, and what its clients saw.

Real processes, real NATS; scripted engines, which compare every block that they use with what it must hold. All
requests share beginnings with others, host memory is too small for them, and the disk is one of a few pages.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

import httpx
from nats.aio.client import Client as Nats

from chaos import invariants, workload
from chaos.clients import http_chat, native_chat
from chaos.faults import send_signal
from chaos.gremlin import draw
from chaos.history import Recorder
from chaos.instance import Address, Instance, leftovers
from chaos.invariants import Answer
from chaos.kv.damage import flip
from chaos.kv.faulty import fill, read_only, small_place
from chaos.kv.plan import ON_PROCESSES, Growth, Strike, pick, plan, ripe
from chaos.probe import Probe, parse
from chaos.watch import Watch

VICTIMS = ("kv", "transfer", "prefill", "decode")
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jon")
ENDINGS = 4
STEM_WORDS = 120
TOKENS = 24
WORKERS = 4
DEADLINE_S = 60.0
PACE_S = 0.2  # between two faults
LEAST_LIFE_S = 10.5  # after it a supervisor starts a node again at once
WAIT_S = 3.0  # for a victim
LIMIT_S = 270.0  # for all faults; what is left then is not done
READY_LIMIT_S = 60.0
REST_LIMIT_S = 20.0  # a write lease of a dead engine has to end
DISK_NBYTES = 2 << 20
NOT_STORED = "does not hold positions"  # what a scripted engine says of a wrong block
SCRIPT = {"pace_s": 0.01, "prefill_s_per_token": 0.0001, "block_nbytes": 2048}
SETTINGS = {
    "HEADRACE_HOST_TIER_TOKENS": "2048", "HEADRACE_POOL_TOKENS": "4096", "HEADRACE_KV_DISK_BYTES": str(1 << 20),
    "HEADRACE_KV_DISK_ADMISSION": "all", "HEADRACE_LOG_LEVEL": "warning",
}  # fmt: skip
COUNTED = (
    "disk_corrupt", "disk_dropped", "disk_failed_reads", "disk_failed_writes", "disk_loaded", "disk_inserted",
    "disk_evicted", "evicted", "inserted", "hits",
)  # fmt: skip


def loads(model: str) -> list[workload.Load]:
    """Return the requests: some beginnings of about forty blocks, each with several ends."""
    out: list[workload.Load] = []
    for name in NAMES:
        stem = f"{name} tells: " + workload.FILLER * (STEM_WORDS // 20)
        for end in range(ENDINGS):
            at = len(out)
            body = workload.chat(
                model, f"{stem} Now part {end} of it, at some length.", TOKENS, seed=at if at % 3 == 0 else None,
                stream=at % 4 != 3,
            )  # fmt: skip
            out.append(workload.Load(f"{name}-{end}", "native" if at % 2 == 0 else "http", body))
    return out


@dataclass(slots=True)
class Result:
    """What came of it."""

    performed: Counter[str] = field(default_factory=Counter)
    effective: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    differing: int = 0
    wrong: int = 0  # requests whose engine was given a block that is not what was stored
    failed: int = 0
    ledgers: int = 0
    violations: list[str] = field(default_factory=list)
    store: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def report(self, **more: object) -> dict[str, Any]:
        """Return the figures as the result line tells them; `more` stands before what was broken."""
        return {
            "faults_performed": sum(self.performed.values()),
            "faults_effective": sum(self.effective.values()),
            "by_kind": dict(sorted(self.effective.items())),
            "texts_compared": self.compared,
            "differing": self.differing,
            "wrong_blocks": self.wrong,
            "failed": self.failed,
            "ledgers": self.ledgers,
            **more,
            "num_violations": len(self.violations),
            "violations": self.violations[:20],
        }


class Live:
    """Drives traffic and faults against one instance."""

    def __init__(
        self, http: httpx.AsyncClient, nats: Nats, watch: Watch, probe: Probe, recorder: Recorder, model: str,
        disk: Path, *, seed: int, mounted: bool, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._http, self._nats, self._watch, self._probe, self._recorder = http, nats, watch, probe, recorder
        self._loads = loads(model)
        self._disk, self._seed, self._mounted, self._say = disk, seed, mounted, say
        self._names = sorted(seen.name for seen in watch.ready(*VICTIMS))
        self._born: dict[str, tuple[int, float]] = {}  # process id and when it was first heard
        self._dead: set[int] = set()  # processes whose last heartbeats may still look fresh
        self._thawed: dict[str, float] = {}  # who has to speak again first
        self._open = 0
        self._over = False
        self._growth = Growth()
        self.references: dict[str, Answer] = {}
        self.result = Result()

    # --- traffic --------------------------------------------------------------------------------

    async def _send(self, load: workload.Load, name: str, recorder: Recorder) -> None:
        self._open += 1
        try:
            if load.client == "http":
                await http_chat(recorder, self._http, name, load.key, load.body, deadline_s=DEADLINE_S)
            else:
                await native_chat(recorder, self._nats, name, load.key, load.body, deadline_s=DEADLINE_S)
        finally:
            self._open -= 1

    async def refer(self) -> None:
        """Run every request undisturbed.

        Raises:
            RuntimeError: if one fails.
        """
        recorder = Recorder(time.monotonic)
        for first in range(0, len(self._loads), WORKERS):
            await asyncio.gather(*(self._send(load, load.key, recorder) for load in self._loads[first:][:WORKERS]))
        broken = invariants.one_ending(recorder.events) + invariants.no_gap_no_repeat(recorder.events)
        errors = [e.data["error"] for e in recorder.events if e.kind == "terminal" and e.data["error"] is not None]
        if broken or errors:
            raise RuntimeError(f"the undisturbed run failed: {[str(v) for v in broken]} {errors}")
        for load in self._loads:
            self.references[load.key] = invariants.answer(e for e in recorder.events if e.request == load.key)

    async def _work(self, worker: int) -> None:
        turn = 0
        while not self._over:
            load = self._loads[int(draw(self._seed, "load", worker, turn) * len(self._loads))]
            await self._send(load, f"{worker}.{turn}/{load.key}", self._recorder)
            turn += 1

    # --- faults ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        """Let requests run."""
        workers = [asyncio.create_task(self._work(worker)) for worker in range(WORKERS)]
        counting = asyncio.create_task(self._count())
        try:
            yield
        finally:
            self._over = True
            await asyncio.gather(*workers, counting)

    async def storm(self, count: int) -> None:
        """Do what the plan of the seed says, while requests run."""
        async with self.traffic():
            end = time.monotonic() + LIMIT_S
            for number, strike in enumerate(plan(self._seed, count)):
                if time.monotonic() > end:
                    self._say(f"  {count - number} faults are left out: time is over")
                    break
                effective = await self._strike(strike)
                self.result.performed[strike.kind] += 1
                self.result.effective[strike.kind] += effective
                if (number + 1) % 50 == 0:
                    self._say(f"  {number + 1} faults, {sum(self.result.effective.values())} of them effective")
                await asyncio.sleep(PACE_S)

    async def _strike(self, strike: Strike) -> bool:
        if strike.kind in ON_PROCESSES:
            await self._whole()
        kind = strike.kind
        match kind:
            case "flip" | "cut" | "remove":
                return await self._hurt_file(strike)
            case "kill":
                return await self._kill(strike)
            case "freeze":
                return await self._freeze(strike)
            case "full":
                return self._mounted and await self._full(strike)
            case "read-only":
                return self._mounted and await self._read_only(strike)
            case "vanish":
                busy = self._open > 0 and self._disk.is_dir()
                shutil.rmtree(self._disk, ignore_errors=True)
                return busy
            case _:
                assert_never(kind)

    async def _until(self, condition: Callable[[], Any], limit_s: float) -> Any:
        end = time.monotonic() + limit_s
        while not (found := condition()) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return found

    async def _whole(self) -> None:
        """Wait until all who can be hurt are there and ready: one at a time is promised."""

        def complete(watch: Watch) -> bool:
            self._note_births()
            there = {
                seen.name
                for seen in watch.ready(*VICTIMS)
                if seen.beat.pid not in self._dead and seen.t > self._thawed.get(seen.name, 0.0)
            }
            return there >= set(self._names)

        await self._watch.until(complete, timeout_s=READY_LIMIT_S, what="every replacement ready")

    def _note_births(self) -> None:
        now = time.monotonic()
        for seen in self._watch.live(*VICTIMS):
            if seen.beat.pid not in self._dead and self._born.get(seen.name, (0, 0.0))[0] != seen.beat.pid:
                self._born[seen.name] = (seen.beat.pid, now)

    async def _kill(self, strike: Strike) -> bool:
        def chosen() -> str | None:
            born = {name: since for name, (_, since) in self._born.items()}
            return ripe(strike.victim, born, time.monotonic(), LEAST_LIFE_S)

        victim = await self._until(chosen, WAIT_S)
        if victim is None or not await self._until(lambda: self._open > 0, WAIT_S):
            return False
        pid, _ = self._born.pop(victim)
        self._dead.add(pid)
        return send_signal(pid, signal.SIGKILL)

    async def _freeze(self, strike: Strike) -> bool:
        victim = pick(strike.victim, sorted(self._born))
        if victim is None or not await self._until(lambda: self._open > 0, WAIT_S):
            return False
        pid = self._born[victim][0]
        struck = send_signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(strike.seconds)
        finally:
            send_signal(pid, signal.SIGCONT)
            self._thawed[victim] = time.monotonic()
        return struck

    def segments(self) -> list[Path]:
        """The files in which the store's disk keeps its blocks now."""
        return sorted(self._disk.glob("*/segment-*"))

    async def _hurt_file(self, strike: Strike) -> bool:
        paths = await self._until(self.segments, WAIT_S)
        path = pick(strike.victim, [str(path) for path in paths])
        if path is None:
            return False
        try:
            nbytes = os.stat(path).st_size
            if nbytes == 0:
                return False
            match strike.kind:
                case "flip":
                    flip(Path(path), int(strike.place * nbytes), strike.bit)
                case "cut":
                    os.truncate(path, int(strike.place * nbytes))
                case _:
                    os.unlink(path)
        except OSError:
            return False  # evicted meanwhile, or not to be written now
        return self._open > 0

    async def _full(self, strike: Strike) -> bool:
        hog = self._disk.parent / "hog"
        code = fill(hog)
        await asyncio.sleep(strike.seconds)
        hog.unlink(missing_ok=True)
        return code == errno.ENOSPC and self._open > 0

    async def _read_only(self, strike: Strike) -> bool:
        if not self._disk.is_dir():
            return False
        with read_only(self._disk) as mounted:
            await asyncio.sleep(strike.seconds if mounted else 0.0)
            return mounted and self._open > 0

    # --- what is seen of it ---------------------------------------------------------------------

    async def _count(self) -> None:
        nodes = {seen.beat.node for seen in self._watch.live("kv")}
        while not self._over:
            try:
                for text in (await self._probe.texts(nodes, timeout_s=0.5)).values():
                    figures = {name: value for (name, _), value in parse(text).items()}
                    self._growth.take({n: figures.get(f"headrace_kv_{n}_total", 0.0) for n in COUNTED})
            except TimeoutError:
                pass  # it is dead or frozen now
            await asyncio.sleep(0.5)

    def wrong(self) -> int:
        """How many requests have ended because their engine saw that a block is not what was stored."""
        ends = (e.data["error"] for e in self._recorder.events if e.kind == "terminal")
        return sum(error is not None and NOT_STORED in str(error) for error in ends)

    async def judge(self) -> None:
        """Hold what clients saw to the promises, and the ledgers of all pools to their sums."""
        self.compare()
        await self._whole()
        end = time.monotonic() + REST_LIMIT_S
        while (problems := await self._unbalanced()) and time.monotonic() < end:
            await asyncio.sleep(0.5)
        self.result.violations += problems

    def compare(self) -> None:
        """Hold what clients saw to the promises."""
        result, events = self.result, self._recorder.events
        found = (
            invariants.one_ending(events)
            + invariants.no_gap_no_repeat(events)
            + invariants.same_text(events, self.references)
        )
        ends = [e for e in events if e.kind == "terminal"]
        failed = [e for e in ends if e.data["error"] is not None]
        result.compared = len(ends) - len(failed)
        result.differing = sum(v.invariant == "same_text" for v in found)
        result.wrong = self.wrong()
        result.failed = len({e.request for e in events if e.kind == "sent"}) - result.compared
        result.violations += [str(v) for v in found]
        result.violations += [f"{e.request} failed: {e.data['error']}" for e in failed]
        result.store = {name: int(count) for name, count in self._growth.total.items()}

    async def _unbalanced(self) -> list[str]:
        nodes = {seen.beat.node: seen.beat.ref.kind for seen in self._watch.ready("kv", "prefill", "decode")}
        out = []
        for node, text in (await self._probe.texts(set(nodes), timeout_s=5.0)).items():
            head = f"headrace_{nodes[node]}_"
            figures = {n.removeprefix(head): v for (n, _), v in parse(text).items() if n.startswith(head)}
            out += [f"{node}: {problem}" for problem in unbalanced(nodes[node], figures)]
        self.result.ledgers = len(nodes)
        return out


def unbalanced(kind: str, figures: dict[str, float]) -> list[str]:
    """Return what is wrong with the figures of a pool at rest: every block is in one state, and nobody holds one."""
    if "blocks_total" not in figures:
        return [] if kind == "kv" else ["it tells nothing of its pool"]  # a store without a pool yet
    states = [figures[f"blocks_{state}"] for state in ("free", "cached", "in_use", "quarantined")]
    out = []
    if sum(states) != figures["blocks_total"]:
        out.append(f"{states} blocks of {figures['blocks_total']:.0f}")
    if figures["blocks_quarantined"]:
        out.append(f"{figures['blocks_quarantined']:.0f} blocks are quarantined")
    held = figures["blocks_in_use"] - (figures["stored"] if kind == "kv" else 0)
    if held:
        out.append(f"{held:.0f} blocks are held by nobody")
    if kind == "kv":
        out += [f"{figures[n]:.0f} {n}" for n in ("reads", "writes", "unconfirmed") if figures[n]]
    return out


async def run(
    seed: int, count: int, *, port_base: int, say: Callable[[str], None], history: Path,
    settings: Mapping[str, str] = SETTINGS, hurt: Callable[[Live], Awaitable[None]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Start an instance, hurt its store so many times, stop it; returns the figures.

    Args:
        seed, count: of the faults.
        port_base: first of the instance's ports.
        say: told how it goes.
        history: where to write what clients saw.
        settings: of the instance.
        hurt: what to do instead of the plan's faults, and to judge it.
    """
    directory = history.parent
    script = directory / "script.json"
    script.write_text(json.dumps(SCRIPT))
    instance = Instance(f"chaos-kv-{port_base}", log=directory / "up.log")
    with small_place(directory / "disk", DISK_NBYTES) as mounted:
        disk = directory / "disk" / "kv"
        env = {**settings, "HEADRACE_KV_DISK_DIR": str(disk)}
        options = ("--isolate", "--prefill", "1", "--decode", "2", "--engine", f"scripted:{script}")
        try:
            await instance.start(*options, port_base=port_base, env=env)
            say(f"ready after {instance.ready_after_s:.1f} s; log {instance.log}, history {history}")
            result = await _drive(instance.address, seed, count, disk, mounted, say, history, hurt)
        finally:
            code = await instance.stop()
    left = leftovers(instance.name)
    if code or left:
        result.violations.append(f"the instance stopped with {code} and left {left}")
    if not mounted:
        result.skipped["full, read-only"] = "mounting is not allowed here"
    return result.report(store=result.store, skipped=result.skipped)


async def _drive(
    where: Address, seed: int, count: int, disk: Path, mounted: bool, say: Callable[[str], None], history: Path,
    hurt: Callable[[Live], Awaitable[None]] | None,
) -> Result:  # fmt: skip
    recorder = Recorder(time.monotonic, history)
    nats = await where.connect("chaos-kv")
    try:
        async with where.client() as http:
            watch, probe = Watch(time.monotonic), Probe(nats)
            await watch.start(nats)
            await probe.start()
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            await watch.until(
                lambda w: len(w.ready("decode")) == 2 and all(w.ready(kind) for kind in VICTIMS), timeout_s=30.0,
                what="heartbeats heard",
            )  # fmt: skip
            live = Live(http, nats, watch, probe, recorder, model, disk, seed=seed, mounted=mounted, say=say)
            await live.refer()
            say(f"references: {len(live.references)} requests ran undisturbed")
            if hurt is not None:
                await hurt(live)
            else:
                await live.storm(count)
                await live.judge()
            return live.result
    finally:
        recorder.close()
        await nats.close()
