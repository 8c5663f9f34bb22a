"""Runs a storm: all actors of an instance in virtual time, the plan's requests and faults, and what clients saw."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, assert_never

from chaos.history import Event, Recorder
from chaos.judge import Verdict, judge
from chaos.virtual.clients import SCRIPT, EdgeClient, NativeClient
from chaos.virtual.nodes import LIGHT, MODEL, Nodes, at_once
from chaos.virtual.plan import SETTLE_S, Arrival, Blow, StormPlan
from chaos.virtual.system import MemorySystem
from edge.actor import EdgeActor
from engine.scripted_runner import ScriptedRunner
from runtime.memory_bus import Faults, MemoryBus
from runtime.node import Node
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas.errors import BusUnavailable

AGAIN_S = 0.3  # after which a supervisor starts a process again that could not start


class StormNodes(Nodes):
    """The nodes of a storm, an edge without sockets among them; beside light nodes it has its own light actors."""

    private: tuple[str, ...] = ()

    def make(self, kind: str, number: int) -> Node:
        """Make a node."""
        if kind != "edge":
            return super().make(kind, number)
        name = f"edge-{number}"
        node = self.nodes[name] = self.system.node(name)
        node.add("edge", str(number), lambda context: EdgeActor(context, models=(MODEL,), listen=False))
        for each in self.private:
            node.add(each, name, functools.partial(self._actor, each), private=True)
        return node


class Storm:
    """One storm under way."""

    def __init__(self, nodes: StormNodes, plan: StormPlan, recorder: Recorder) -> None:
        self._nodes = nodes
        self._system = nodes.system
        self._clock = nodes.system.clock
        self._plan = plan
        self._recorder = recorder
        self._frozen: set[str] = set()
        self._offline: dict[str, int] = {}
        self._bus_down = 0
        self._weather: list[Blow] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clients: list[asyncio.Task[Any]] = []

    async def run(self) -> None:
        """Let everything happen, and wait until it is over."""
        steps: list[tuple[float, Blow | Arrival]] = [(b.at, b) for b in self._plan.blows]
        steps += [(a.at, a) for a in self._plan.arrivals]
        began = self._clock.now()
        for at, step in sorted(steps, key=lambda s: s[0]):
            await self._clock.sleep(max(0.0, began + at - self._clock.now()))
            if isinstance(step, Blow):
                self._strike(step)
            else:
                self._clients.append(self._spawn(self._client(step)))
        if self._clients:
            await asyncio.wait(self._clients)
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._rest()

    def _spawn(self, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._clock.spawn(coro, name="storm")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _client(self, arrival: Arrival) -> None:
        if arrival.client == "native":
            await NativeClient(self._recorder, self._system.outside, self._clock, arrival).run()
        else:
            await EdgeClient(self._recorder, self._nodes.actor("edge-0"), self._clock, arrival).run()

    async def _rest(self) -> None:
        try:
            await self._system.until(lambda: not self._nodes.busy(), limit_s=SETTLE_S)
        except TimeoutError:
            pass
        busy, errors = self._nodes.busy(), [repr(e) for e in [*self._system.errors, *self._system.broker.errors]]
        if not busy:
            for engine in self._nodes.engines():
                try:
                    engine.stepped.core.check_integrity()
                except AssertionError as exc:
                    errors.append(f"{engine.ref}: {exc!r}")
        self._recorder.add("", "rest", busy=busy, errors=errors)

    # --- faults ---------------------------------------------------------------------------------

    def _strike(self, blow: Blow) -> None:
        running = len(self._recorder.done) - len(self._recorder.ended)
        struck = self._perform(blow)
        self._recorder.add(
            "", "fault", fault=blow.kind, victim=blow.victim or "bus", pid=0, at=self._clock.now(), streams=running,
            effective=struck and running > 0, scenario=f"storm-{blow.kind}", for_s=blow.for_s,
        )  # fmt: skip

    def _perform(self, blow: Blow) -> bool:
        """Do it; false if its victim is down already."""
        if blow.victim and self._system.is_gone(blow.victim):
            return False
        match blow.kind:
            case "kill":
                self._spawn(self._kill(blow))
            case "freeze":
                if blow.victim in self._frozen or not self._nodes.has_started(blow.victim):
                    return False
                self._spawn(self._freeze(blow, self._nodes.nodes[blow.victim]))
            case "cut":
                if self._system.is_gone(blow.other):
                    return False
                self._spawn(self._cut(blow))
            case "offline":
                self._spawn(self._take_offline(blow))
            case "bus":
                self._spawn(self._stop_bus(blow))
            case "delay" | "loss":
                self._spawn(self._worsen(blow))
            case _:
                assert_never(blow.kind)
        return True

    async def _kill(self, blow: Blow) -> None:
        kind, _, number = blow.victim.partition("-")
        node = self._nodes.nodes[blow.victim]
        self._frozen.discard(blow.victim)
        self._offline.pop(blow.victim, None)
        await self._system.kill(node)
        await self._clock.sleep(blow.for_s)
        while True:
            while self._bus_down:
                await self._clock.sleep(0.1)  # no node starts without its bus
            node = self._nodes.make(kind, int(number))
            try:
                await self._system.start(node)
                return
            except BusUnavailable:  # it went away meanwhile: the process ends, and its supervisor starts another one
                await self._system.kill(node)
                await self._clock.sleep(AGAIN_S)

    async def _freeze(self, blow: Blow, node: Node) -> None:
        self._frozen.add(blow.victim)
        self._nodes.freeze(blow.victim)
        await self._clock.sleep(blow.for_s)
        if self._nodes.nodes[blow.victim] is node and not self._system.is_gone(blow.victim):
            self._frozen.discard(blow.victim)
            self._nodes.thaw(blow.victim)

    async def _cut(self, blow: Blow) -> None:
        pairs = [(f"{blow.victim}-{a}", f"{blow.other}-{b}") for a in LINES for b in LINES]
        for pair in pairs:
            self._system.broker.partition(*pair)
        await self._clock.sleep(blow.for_s)
        for pair in pairs:
            self._system.mend(*pair)

    async def _take_offline(self, blow: Blow) -> None:
        node = self._nodes.nodes[blow.victim]
        buses = self._system.buses(blow.victim)
        self._offline[blow.victim] = self._offline.get(blow.victim, 0) + 1
        _disconnect(buses)
        await self._clock.sleep(blow.for_s)
        if self._nodes.nodes[blow.victim] is node and blow.victim in self._offline:
            self._offline[blow.victim] -= 1
            if not self._offline[blow.victim]:
                del self._offline[blow.victim]
                if not self._bus_down:
                    _reconnect(buses)

    async def _stop_bus(self, blow: Blow) -> None:
        self._bus_down += 1
        self._recorder.add("", "away", for_s=blow.for_s)
        _disconnect([self._system.outside, *self._system.buses()])
        await self._clock.sleep(blow.for_s)
        self._bus_down -= 1
        if not self._bus_down:
            _reconnect([self._system.outside])
            _reconnect([b for n in self._nodes.nodes if n not in self._offline for b in self._system.buses(n)])

    async def _worsen(self, blow: Blow) -> None:
        self._weather.append(blow)
        self._set_weather()
        await self._clock.sleep(blow.for_s)
        self._weather.remove(blow)
        self._set_weather()

    def _set_weather(self) -> None:
        drop = max((b.amount for b in self._weather if b.kind == "loss"), default=0.0)
        delay = max((b.amount for b in self._weather if b.kind == "delay"), default=0.0)
        self._system.broker.default_faults = Faults(delay_s=(0.0, delay), drop=drop)


LINES = ("control", "stream")


def _disconnect(buses: list[MemoryBus]) -> None:
    for bus in buses:
        bus.disconnect()


def _reconnect(buses: list[MemoryBus]) -> None:
    for bus in buses:
        bus.reconnect()


def run_storm(plan: StormPlan, history: Path | None = None) -> tuple[Verdict, list[Event]]:
    """Run a storm in virtual time; returns what was found, and what the clients saw.

    The same plan gives the same run if Python hashes strings the same way (`PYTHONHASHSEED`).
    """
    with tempfile.TemporaryDirectory(prefix="headrace-storm-") as directory:
        if history is not None:
            history.unlink(missing_ok=True)

        async def main(clock: VirtualClock) -> list[Event]:
            loop = asyncio.get_running_loop()
            loop.run_in_executor = at_once  # type: ignore[method-assign, assignment]  # nothing waits for a thread
            recorder = Recorder(clock.now, history)
            recorder.add("", "run", made="storm", **plan.to_json())
            async with MemorySystem(clock=clock, strict=False) as system:
                system.broker.re_raise = True  # errors are kept for the end of the storm
                system.broker.faults["outside"] = Faults()
                nodes = StormNodes(system, Path(directory), lambda: ScriptedRunner(SCRIPT))
                nodes.private = LIGHT if "light" in plan.layout else ()
                for kind, count in plan.layout.items():
                    for number in range(count):
                        nodes.make(kind, number)
                await system.start()
                await clock.sleep(1.0)
                await Storm(nodes, plan, recorder).run()
            recorder.close()
            return recorder.events

        events = run_virtual(main, seed=plan.seed)
    return judge(events, {}), events
