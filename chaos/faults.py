"""Performs faults on processes: kill, freeze and thaw, and whatever else is registered in `FAULTS`."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from chaos.proxy import Delay, Proxy
from chaos.workload import POISON

if TYPE_CHECKING:
    from chaos.bus import ProxiedBus
    from chaos.instance import Instance


SLOW_S = 0.05  # the most that a piece takes through a slow line; far below what counts as silence
POISON_LIMIT_S = 60.0
POISONED_STATUS = 422


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was performed."""

    fault: str
    victim: str
    pid: int
    at: float  # monotonic seconds, when the victim stopped working


@dataclass(frozen=True, slots=True)
class Target:
    """Who is struck, on which node, and for how long if the fault passes."""

    victim: str
    pid: int
    for_s: float = 5.0
    node: str = ""
    others: tuple[tuple[str, int], ...] = ()  # names and process ids of those that may be met in its place


def send_signal(pid: int, signum: signal.Signals) -> bool:
    """Signal a process; false if it is gone already."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


class Faults:
    """Strikes processes; frozen ones are thawed in the end, whatever happens.

    Args:
        now: monotonic seconds.
        instance: the private system under test; absent when it is somebody else's.
        bus: a NATS server with a proxy before it, where a scenario needs one.
    """

    def __init__(
        self, now: Callable[[], float], *, instance: Instance | None = None, bus: ProxiedBus | None = None
    ) -> None:
        self.now = now
        self.instance = instance
        self.bus = bus
        self._passing: set[asyncio.Task[None]] = set()

    def kill(self, pid: int, victim: str) -> Done:
        """SIGKILL."""
        at = self.now()
        send_signal(pid, signal.SIGKILL)
        return Done("kill", victim, pid, at)

    def freeze(self, pid: int, victim: str, *, for_s: float = 5.0) -> Done:
        """SIGSTOP now and SIGCONT later; a supervisor may have killed the process by then, which is its right."""
        at = self.now()
        send_signal(pid, signal.SIGSTOP)
        self.later(for_s, lambda: send_signal(pid, signal.SIGCONT), victim)
        return Done("freeze", victim, pid, at)

    def later(self, after_s: float, undo: Callable[[], Any], victim: str) -> None:
        """Call `undo` after a while, or at once if this is torn down before."""

        async def wait() -> None:
            try:
                await asyncio.sleep(after_s)
            finally:
                undo()

        task = asyncio.create_task(wait(), name=f"end the fault of {victim}")
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def settle(self) -> None:
        """Wait until every passing fault is over."""
        if self._passing:
            await asyncio.wait(list(self._passing))

    async def perform(self, name: str, target: Target) -> Done:
        """Perform a fault by its name.

        Raises:
            KeyError: if there is no such fault.
        """
        return await FAULTS[name](self, target)


Perform = Callable[[Faults, Target], Awaitable[Done]]


async def _kill(faults: Faults, target: Target) -> Done:
    return faults.kill(target.pid, target.victim)


async def _freeze(faults: Faults, target: Target) -> Done:
    return faults.freeze(target.pid, target.victim, for_s=target.for_s)


async def _drain(faults: Faults, target: Target) -> Done:
    """SIGTERM: the process hands over what it has, and leaves by itself; its supervisor starts it again."""
    at = faults.now()
    send_signal(target.pid, signal.SIGTERM)
    return Done("drain", target.victim, target.pid, at)


async def _restart_nats(faults: Faults, target: Target) -> Done:
    """SIGKILL of the system's NATS server, which comes back at once, and nothing is left of what it stored."""
    at = faults.now()
    if faults.bus is not None:
        return Done("restart-nats", target.victim, await faults.bus.restart(), at)
    server = _server(faults)
    storage = Path(server.cmdline()[-1]).parent / "jetstream"
    server.kill()
    shutil.rmtree(storage, ignore_errors=True)
    return Done("restart-nats", target.victim, server.pid, at)


def _server(faults: Faults) -> psutil.Process:
    if faults.bus is not None:
        return psutil.Process(faults.bus.pid)
    if faults.instance is None:
        raise RuntimeError("the bus of somebody else's instance is left alone")
    children = psutil.Process(faults.instance.pid).children()
    return next(c for c in children if c.name() == "nats-server")


async def _freeze_nats(faults: Faults, target: Target) -> Done:
    """SIGSTOP of the NATS server: connections look open, and nothing passes."""
    done = faults.freeze(_server(faults).pid, target.victim, for_s=target.for_s)
    return Done("freeze-nats", target.victim, done.pid, done.at)


def _proxy(faults: Faults) -> Proxy:
    if faults.bus is None:
        raise RuntimeError("this fault needs a proxy before NATS, and there is none")
    return faults.bus.proxy


async def _cut(faults: Faults, target: Target) -> Done:
    """Let nothing pass between a node and the bus for a while."""
    at, proxy = faults.now(), _proxy(faults)
    proxy.cut(target.node)
    faults.later(target.for_s, lambda: proxy.heal(target.node), target.victim)
    return Done("cut", target.victim, target.pid, at)


async def _break(faults: Faults, target: Target) -> Done:
    """Reset a node's connections to the bus; they come back by themselves."""
    at = faults.now()
    _proxy(faults).reset(target.node)
    return Done("break", target.victim, target.pid, at)


async def _break_all(faults: Faults, target: Target) -> Done:
    """Reset every connection to the bus, clients' too: what was under way is lost, and the server lives."""
    at = faults.now()
    _proxy(faults).reset()
    return Done("break-all", target.victim, target.pid, at)


async def _slow_bus(faults: Faults, target: Target) -> Done:
    """Let each piece between anybody and the bus take up to `SLOW_S` for a while; the proxy's seed decides each."""
    at, proxy = faults.now(), _proxy(faults)
    before, proxy.delay = proxy.delay, Delay(0.0, SLOW_S)

    def undo() -> None:
        proxy.delay = before

    faults.later(target.for_s, undo, target.victim)
    return Done("slow-bus", target.victim, target.pid, at)


async def _poison(faults: Faults, target: Target) -> Done:
    """Send a request that kills the engines that run it; it must be refused, having killed two.

    Placement chooses whom it meets: the victim that is told is the first to die.

    Raises:
        RuntimeError: if it ends otherwise.
    """
    if faults.instance is None:
        raise RuntimeError("somebody else's instance has no engine that dies on demand")
    met = Done("poison", target.victim, target.pid, math.inf)  # nobody has died: such a fault does not count

    async def watch() -> None:
        nonlocal met
        alive = ((target.victim, target.pid), *target.others)
        while math.isinf(met.at):
            for victim, pid in alive:
                if not psutil.pid_exists(pid):
                    met = Done("poison", victim, pid, faults.now())
                    return
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch(), name="watch the victim of a poisonous request")
    try:
        async with faults.instance.address.client(POISON_LIMIT_S) as http:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            body = {"model": model, "prompt": POISON, "max_tokens": 64, "temperature": 0.0}
            answer = await http.post("/v1/completions", json=body)
    finally:
        watching.cancel()
    if answer.status_code != POISONED_STATUS:
        raise RuntimeError(f"a request that kills engines ended with {answer.status_code}: {answer.text[:200]}")
    return met


FAULTS: dict[str, Perform] = {
    "kill": _kill, "freeze": _freeze, "drain": _drain, "poison": _poison,
    "restart-nats": _restart_nats, "freeze-nats": _freeze_nats,
    "cut": _cut, "break": _break, "break-all": _break_all, "slow-bus": _slow_bus,
}  # fmt: skip
