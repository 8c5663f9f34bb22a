"""The third part of `chaos-kv`: two hosts on one bus, whose stores fetch from each other while they are hurt.

The first host is an instance under its supervisor. The second one's processes were started by hand, as anybody may, and
are started again when they die; each host serves blocks on a loopback address of its own. Stores, transfer actors and
engines of both are killed and frozen, one at a time, and bits of what the stores hold are flipped: a fetch then ends
anywhere, or brings what is not right. Scripted engines compare each block that they use.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.gremlin import draw
from chaos.history import Recorder
from chaos.instance import COMMAND, Address, Instance, leftovers
from chaos.kv.live import PACE_S, SCRIPT, WORKERS, Live, Result
from chaos.kv.plan import Growth, Kind, Strike
from chaos.probe import Probe, parse
from chaos.watch import Watch
from schemas.settings import load

KINDS = ("kv", "transfer", "decode")
EACH: tuple[Kind, ...] = ("flip", "flip", "freeze", "freeze", "kill")
COUNT = 30
LIMIT_S = 30.0
STOP_LIMIT_S = 20.0
JOIN_LIMIT_S = 60.0
# All far smaller than what is asked for: engines come back to the stores, and the stores hold different things.
SETTINGS = {"HEADRACE_HOST_TIER_TOKENS": "3072", "HEADRACE_POOL_TOKENS": "2048", "HEADRACE_LOG_LEVEL": "warning"}
COUNTED = (
    "remote_fetches", "remote_fetched", "remote_kept", "remote_failures", "remote_late", "remote_dearer", "hits",
    "corrupt",
)  # fmt: skip


def strikes(seed: int, count: int) -> list[Strike]:
    """Return what to do; a longer list of the same seed begins like a shorter one."""
    out = []
    for at in range(count):
        kind = EACH[int(draw(seed, "hosts", at, "kind") * len(EACH))]
        victim, place = draw(seed, "hosts", at, "victim"), draw(seed, "hosts", at, "place")
        seconds = 0.1 + 0.8 * draw(seed, "hosts", at, "seconds")
        out.append(Strike(kind, victim, place, int(draw(seed, "hosts", at, "bit") * 8), seconds))
    return out


class Far:
    """The second host's processes, each started again when it has ended."""

    def __init__(self, name: str, bus: Address, options: tuple[str, ...], log: Path) -> None:
        """Nothing runs yet; `name` is that of its own shared-memory files."""
        self.name, self._options, self._log = name, options, log
        access = {"HEADRACE_BUS_TOKEN": bus.token} if bus.token else {}
        own = {"HEADRACE_HOST": "second", "HEADRACE_INSTANCE": name, "HEADRACE_KV_LISTEN": "127.0.0.2"}
        self._env, self._bus = {**os.environ, **SETTINGS, **access, **own}, bus.bus
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._over = False

    def start(self) -> None:
        """Start one process per kind."""
        self._keepers = [asyncio.create_task(self._keep(kind)) for kind in KINDS]

    async def _keep(self, kind: str) -> None:
        argv = [*COMMAND, "actor", kind, "--bus", self._bus, "--node", f"far-{kind}", *self._options]
        while not self._over:
            with self._log.open("ab") as out:
                process = await asyncio.create_subprocess_exec(
                    *argv, stdout=out, stderr=out, stdin=asyncio.subprocess.DEVNULL, env=self._env
                )
            self._running[kind] = process
            await process.wait()

    async def stop(self) -> list[str]:
        """End them; returns what did not end well."""
        self._over = True
        problems = []
        for process in self._running.values():
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        for kind, process in self._running.items():
            try:
                async with asyncio.timeout(STOP_LIMIT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                problems.append(f"far-{kind} does not stop")
        await asyncio.gather(*self._keepers)
        return problems


class Hosts(Live):
    """Traffic and faults on both hosts."""

    def aim(self, instances: list[str]) -> None:
        """Say whose stores' memory may be hurt, and take the actors of both hosts as victims."""
        self._instances = instances
        self._shm = Path(load().settings.shm_dir)
        self._names = sorted(seen.name for seen in self._watch.ready(*KINDS))
        self._by_node: dict[str, Growth] = {}
        self._note_births()

    async def hurt(self, count: int) -> None:
        """Do what the seed says, while requests run."""
        workers = [asyncio.create_task(self._work(worker)) for worker in range(WORKERS)]
        counting = asyncio.create_task(self._count())
        try:
            end = time.monotonic() + LIMIT_S
            for strike in strikes(self._seed, count):
                if time.monotonic() > end:
                    break
                effective = await self._strike(strike)
                self.result.performed[strike.kind] += 1
                self.result.effective[strike.kind] += effective
                await asyncio.sleep(PACE_S)
        finally:
            self._over = True
            await asyncio.gather(*workers, counting)

    def _segments(self) -> list[Path]:
        """What is hurt by flips: the memory of the stores, of which each copy is verified."""
        return sorted(path for name in self._instances for path in self._shm.glob(f"headrace-{name}-kv-*"))

    async def _count(self) -> None:
        while not self._over:
            try:
                nodes = {seen.beat.node for seen in self._watch.live("kv")}
                for node, text in (await self._probe.texts(nodes, timeout_s=0.5)).items():
                    figures = {name: value for (name, _), value in parse(text).items()}
                    growth = self._by_node.setdefault(node, Growth())
                    growth.take({n: figures.get(f"headrace_kv_{n}_total", 0.0) for n in COUNTED})
            except TimeoutError:
                pass  # one is dead or frozen now
            await asyncio.sleep(0.3)

    def counted(self) -> dict[str, int]:
        """Return the stores' counters, of both and over all their incarnations."""
        return {n: sum(int(each.total[n]) for each in self._by_node.values()) for n in COUNTED}


async def run(seed: int, count: int, *, port_base: int, say: Callable[[str], None], history: Path) -> dict[str, Any]:
    """Start two hosts, hurt them so many times, stop them; returns the figures."""
    directory = history.parent
    script = directory / "script.json"
    script.write_text(json.dumps(SCRIPT))
    engine = ("--engine", f"scripted:{script}")
    instance = Instance(f"chaos-kv-near-{port_base}", log=directory / "near.log")
    env = {**SETTINGS, "HEADRACE_HOST": "first", "HEADRACE_KV_LISTEN": "127.0.0.1"}
    far: Far | None = None
    problems: list[str] = []
    try:
        await instance.start("--isolate", "--decode", "1", *engine, port_base=port_base, env=env)
        far = Far(f"chaos-kv-far-{port_base}", instance.address, engine, directory / "far.log")
        far.start()
        result, store = await _drive(instance.address, [instance.name, far.name], seed, count, say, history)
    finally:
        if far is not None:
            problems += await far.stop()
        code = await instance.stop()
    left = leftovers(instance.name) + (leftovers(far.name) if far is not None else [])
    if code or left:
        problems.append(f"the first host stopped with {code}, and {left} is left")
    if not store["remote_fetched"]:
        problems.append("no block went from one host to the other")
    result.violations += problems
    return result.report(store=store)


async def _drive(
    where: Address, instances: list[str], seed: int, count: int, say: Callable[[str], None], history: Path
) -> tuple[Result, dict[str, int]]:
    recorder = Recorder(time.monotonic, history)
    nats = await where.connect("chaos-kv-hosts")
    try:
        async with where.client() as http:
            watch, probe = Watch(time.monotonic), Probe(nats)
            await watch.start(nats)
            await probe.start()
            await watch.until(
                lambda w: all(len(w.ready(kind)) == 2 for kind in KINDS), timeout_s=JOIN_LIMIT_S,
                what="both hosts heard",
            )  # fmt: skip
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            hosts = Hosts(
                http, nats, watch, probe, recorder, model, Path("/nonexistent"), seed=seed, mounted=False, say=say
            )
            hosts.aim(instances)
            await hosts.refer()
            say(f"references: {len(hosts.references)} requests ran undisturbed on two hosts")
            await hosts.hurt(count)
            await hosts.judge()
            return hosts.result, hosts.counted()
    finally:
        recorder.close()
        await nats.close()
