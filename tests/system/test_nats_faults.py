"""The bus breaks under running streams of real processes: a restart, a node cut off, a lost server."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from chaos import invariants
from chaos.clients import bare_id, http_chat, native_chat
from chaos.history import Recorder
from chaos.proxy import Delay, Proxy
from chaos.watch import Watch
from chaos.workload import Load, streams
from tests.support.nats_server import NatsServer
from tests.support.ports import free_ports
from tests.system.cases import assert_drained
from tests.system.launch import System

pytestmark = pytest.mark.slow

TOKENS = 250  # at the script's pace of 10 ms
DEADLINE_S = 40.0


def failovers(system: System) -> dict[str, float]:
    """How many requests were moved off lost actors, by kind and reason, as all nodes count it."""
    text = httpx.get(system.url + "/metrics", timeout=10.0).text
    lines = [line for line in text.splitlines() if line.startswith("headrace_failovers_total{")]
    return {line.split("{")[1].split("}")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def under(system: System, fault: Callable[[Watch, dict[str, str]], Awaitable[None]]) -> None:
    """Run four streams undisturbed, then once more under a fault: nobody sees more than a pause.

    Args:
        fault: called when every stream has an item; gets who lives, and the ids of the requests by name.
    """
    recorder = Recorder(time.monotonic)
    nats = await system.address.connect("test-nats-faults")
    try:
        async with system.address.client() as http:
            watch = Watch(time.monotonic)
            await watch.start(nats)
            loads = streams(system.model, 4, TOKENS)

            async def send(load: Load, name: str) -> None:
                if load.client == "http":
                    await http_chat(recorder, http, name, load.key, load.body, deadline_s=DEADLINE_S)
                else:
                    await native_chat(recorder, nats, name, load.key, load.body, deadline_s=DEADLINE_S)

            await asyncio.gather(*(send(load, load.key) for load in loads))
            references = {
                load.key: invariants.answer(e for e in recorder.events if e.request == load.key) for load in loads
            }
            tasks = [asyncio.create_task(send(load, f"fault/{load.key}")) for load in loads]
            await asyncio.sleep(0.8)
            ids = {name: bare_id(i) for name, i in recorder.ids.items() if name.startswith("fault/")}
            await fault(watch, ids)
            await asyncio.gather(*tasks)
    finally:
        await nats.close()
    events = recorder.events
    found = invariants.one_ending(events) + invariants.no_gap_no_repeat(events)
    found += invariants.same_text(events, references)
    errors = [e.data for e in events if e.kind == "terminal" and e.data["error"] is not None]
    assert [str(v) for v in found] == [] and errors == [], system.tail()


def test_running_streams_survive_a_restart_of_nats_with_fresh_storage(split: System) -> None:
    """R7. Scenario: after the restart nobody was heard for a while: all timers begin anew, nobody is suspected."""
    before = failovers(split)

    async def restart(_: Watch, __: dict[str, str]) -> None:
        assert split.process is not None
        children = psutil.Process(split.process.pid).children()
        (server,) = [c for c in children if c.name() == "nats-server"]
        storage = Path(server.cmdline()[-1]).parent / "jetstream"
        server.kill()
        shutil.rmtree(storage, ignore_errors=True)

    asyncio.run(under(split, restart))

    assert failovers(split) == before
    assert_drained(split)


def test_a_cluster_of_three_may_lose_the_server_that_all_use(
    script_file: Path, tmp_path: Path, nats_binary: str
) -> None:
    """Scenario: only one address is known; the others are learnt from the cluster, and everybody goes there."""
    first = free_ports(3)
    routes = ", ".join(f"nats://127.0.0.1:{first + i}" for i in range(3))
    servers = []
    for number in range(3):
        directory = tmp_path / f"nats-{number}"
        directory.mkdir()
        extra = f"cluster {{ name: test, listen: 127.0.0.1:{first + number}, routes: [{routes}] }}"
        servers.append(NatsServer(nats_binary, directory, extra=extra))
        servers[-1].start()
    system = System(tmp_path, "--bus", servers[0].url, "--engine", f"scripted:{script_file}")
    try:
        system.start()

        async def lose(_: Watch, __: dict[str, str]) -> None:
            servers[0].kill()

        asyncio.run(under(system, lose))
        assert system.stop() == 0, system.tail()
    finally:
        system.stop(signal.SIGKILL)
        for server in servers:
            server.kill()


@pytest.mark.parametrize("kind", ["admission"])  # `chaos run bus` cuts off the others too
def test_a_node_that_is_cut_off_is_replaced_and_changes_nothing_when_it_returns(
    kind: str, script_file: Path, tmp_path: Path, nats_binary: str
) -> None:
    """R3, R7. Scenario: it hears nobody, not even itself, so it takes nobody for dead; its late words are refused.

    All connections go through a line with a little delay; the cut lasts longer than it takes to suspect.
    """
    server = NatsServer(nats_binary, tmp_path)
    server.start()

    async def run() -> None:
        proxy = Proxy("127.0.0.1", server.port, seed=3)
        proxy.delay = Delay(0.0, 0.002)
        url = f"nats://127.0.0.1:{await proxy.start(free_ports())}"
        system = System(tmp_path, "--isolate", "--bus", url, "--engine", f"scripted:{script_file}")
        cut_off: list[str] = []
        try:
            await asyncio.to_thread(system.start)

            async def cut(watch: Watch, ids: dict[str, str]) -> None:
                held = set(ids.values())
                victim = next(s for s in watch.live(kind) if s.held & held)
                cut_off.append(victim.beat.node)
                assert proxy.cut(victim.beat.node) >= 2
                await asyncio.sleep(3.0)
                proxy.heal(victim.beat.node)

            await under_thread(system, cut)
            counts = await asyncio.to_thread(failovers, system)
            moved = [labels for labels, n in counts.items() if n]
            # Only what the lost node had has moved, and it moved nothing itself.
            assert moved and all(f'kind="{kind}"' in labels for labels in moved), moved
            assert not any(f'node="{node}"' in labels for labels in moved for node in cut_off), moved
            assert await asyncio.to_thread(system.stop) == 0, system.tail()
        finally:
            await asyncio.to_thread(system.stop, signal.SIGKILL)
            await proxy.stop()

    try:
        asyncio.run(run())
    finally:
        server.kill()


async def under_thread(system: System, fault: Callable[[Watch, dict[str, str]], Awaitable[None]]) -> None:
    """As `under`, where this loop also carries the proxy: what blocks there runs in a thread."""
    model = await asyncio.to_thread(lambda: system.model)
    known = _Known(system, model)
    await under(known, fault)  # type: ignore[arg-type]


class _Known:
    """A system whose model's name has been asked for already."""

    def __init__(self, system: System, model: str) -> None:
        self.model = model
        self.address = system.address
        self.tail = system.tail
