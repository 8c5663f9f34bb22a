"""The supervisor, over real child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.bus import BusMessage
from runtime.clock import SystemClock
from runtime.nats_bus import NatsBus
from runtime.restart import RestartLimits
from runtime.supervisor import Exit, NodeSpec, Supervisor
from schemas.codec import decode
from schemas.messages import ExitNotice, SupervisorReport
from schemas.subjects import EXIT, SUPERVISORS
from tests.support.nats_server import NatsServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
CLOCK = SystemClock()
PATIENT = RestartLimits(first_delay_s=0.05, crash_loop=4, crash_delay_s=60.0)


async def until(condition: Callable[[], Any], limit_s: float = 15.0) -> None:
    """Wait for a condition with a bound."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


def node(server: NatsServer, name: str, mode: str = "", *, frozen_kill_s: float = 10.0) -> NodeSpec:
    argv = (sys.executable, "-m", "tests.support.child_node", server.url, name, mode)
    return NodeSpec(name, argv, {"PYTHONPATH": str(ROOT)}, ("idle",), frozen_kill_s)


def sleeper(name: str) -> NodeSpec:
    return NodeSpec(name, ("sleep", "600"))


class Watch:
    """Collects exit notices with the time of their arrival."""

    def __init__(self) -> None:
        self.notices: list[tuple[float, ExitNotice]] = []

    def __call__(self, message: BusMessage) -> None:
        body = decode(message.payload)[0]
        assert isinstance(body, ExitNotice)
        if all((body.node, body.pid, body.code) != (n.node, n.pid, n.code) for _, n in self.notices):
            self.notices.append((time.perf_counter(), body))


@pytest.fixture
async def bus(own_nats: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(own_nats.url, name="supervisor", clock=CLOCK)
    yield bus
    await bus.close()


@pytest.fixture
async def supervise() -> AsyncIterator[Callable[..., Supervisor]]:
    """Make supervisors; whatever a failing test leaves behind is killed."""
    made: list[Supervisor] = []

    def make(specs: list[NodeSpec], **options: Any) -> Supervisor:
        made.append(Supervisor(specs, clock=CLOCK, **options))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.kill_all()
        await supervisor.stop(1.0)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def test_an_exit_is_announced_at_once_and_the_child_comes_back(
    own_nats: NatsServer, bus: NatsBus, supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1. Scenario: streams stand still until the exit is known. Everyone has the notice at once, not by a repeat.

    It names the actors of that process; a new epoch gets ready.
    """
    monkeypatch.setattr("runtime.supervisor.REPEAT_NOTICE_S", ())
    watcher = await NatsBus.connect(own_nats.url, name="watcher", clock=CLOCK)
    watch = Watch()
    await watcher.subscribe(EXIT, watch)
    await watcher.flush()
    exits: list[Exit] = []
    supervisor = supervise([node(own_nats, "n1")], bus=bus, limits=PATIENT, on_exit=exits.append)
    await supervisor.start()
    assert await supervisor.wait_ready(15)
    before = supervisor.status()[0]
    assert before.pid is not None

    started = time.perf_counter()
    os.kill(before.pid, signal.SIGKILL)
    await until(lambda: watch.notices)

    at, notice = watch.notices[0]
    assert at - started < 1.0
    assert (notice.node, notice.pid, notice.code, tuple(notice.refs)) == ("n1", before.pid, -9, before.refs)
    assert not supervisor.membership.is_up(before.refs[0])
    await until(lambda: supervisor.status()[0].ready)
    after = supervisor.status()[0]
    assert after.restarts == 1 and after.pid != before.pid
    assert after.refs[0].epoch != before.refs[0].epoch
    assert exits[0].code == -9 and exits[0].restart_in_s is not None and not exits[0].planned
    assert await supervisor.stop(10) == {"n1": 0}
    await watcher.close()


async def test_a_frozen_child_is_killed_and_one_that_was_never_heard_is_not(
    own_nats: NatsServer, bus: NatsBus, supervise: Callable[..., Supervisor]
) -> None:
    """Silence counts after the first heartbeat only."""
    mute = NodeSpec("mute", ("sleep", "600"), kinds=("idle",), frozen_kill_s=0.2)
    supervisor = supervise([node(own_nats, "n1", frozen_kill_s=1.0), mute], bus=bus, limits=PATIENT)
    watch = Watch()
    await bus.subscribe(EXIT, watch)
    await supervisor.start()
    await until(lambda: supervisor.status()[0].ready)
    await until(supervisor.well)
    pid = supervisor.status()[0].pid
    assert pid is not None

    os.kill(pid, signal.SIGSTOP)
    started = time.perf_counter()
    await until(lambda: watch.notices)

    assert 0.7 < time.perf_counter() - started < 5
    assert (watch.notices[0][1].pid, watch.notices[0][1].code) == (pid, -9)
    await until(lambda: supervisor.status()[0].ready)
    first, second = supervisor.status()
    assert first.kills == 1 and first.pid != pid
    assert second.state == "running" and second.kills == 0
    await supervisor.stop(5)


async def test_a_child_that_says_it_has_failed_is_started_again_and_the_bus_hears_why(
    own_nats: NatsServer, bus: NatsBus, supervise: Callable[..., Supervisor]
) -> None:
    """A wedged engine speaks on; after a second of `failed` it is killed, and the report says the reason."""
    reports: list[SupervisorReport] = []

    def heard(message: BusMessage) -> None:
        body = decode(message.payload)[0]
        assert isinstance(body, SupervisorReport)
        reports.append(body)

    await bus.subscribe(SUPERVISORS, heard)
    supervisor = supervise([node(own_nats, "n1", "wedged")], bus=bus, limits=PATIENT)
    await supervisor.start()

    await until(lambda: supervisor.status()[0].restarts >= 1)

    row = supervisor.status()[0]
    assert (row.kills, row.exit_code, row.reason) == (1, -9, "idle failed: no step for 31 s")
    await until(lambda: reports and reports[-1].children[0].restarts >= 1)
    child = reports[-1].children[0]
    assert (child.name, child.exit_code, child.reason) == ("n1", -9, "idle failed: no step for 31 s")


async def test_a_child_that_is_asked_to_leave_comes_back_without_a_strike(
    own_nats: NatsServer, bus: NatsBus, supervise: Callable[..., Supervisor]
) -> None:
    """SIGTERM from outside: exit 0, started again at once, and never a crash loop."""
    supervisor = supervise([node(own_nats, "n1")], bus=bus, limits=PATIENT)
    await supervisor.start()
    assert await supervisor.wait_ready(15)
    first = supervisor.status()[0].pid
    assert first is not None
    await asyncio.sleep(1.0)  # it has to have lived for a moment
    os.kill(first, signal.SIGTERM)

    await until(lambda: supervisor.status()[0].pid not in (first, None))

    row = supervisor.status()[0]
    assert (row.exit_code, row.reason, row.state) == (0, "it was asked to leave", "running")


async def test_nobody_is_killed_for_silence_while_the_bus_is_away(
    own_nats: NatsServer, bus: NatsBus, supervise: Callable[..., Supervisor]
) -> None:
    """A server that is gone for longer than the limit costs no child."""
    supervisor = supervise([node(own_nats, "n1", frozen_kill_s=0.8)], bus=bus, limits=PATIENT)
    await supervisor.start()
    assert await supervisor.wait_ready(15)
    pid = supervisor.status()[0].pid
    own_nats.kill()
    await until(lambda: not bus.connected)
    await asyncio.sleep(1.5)
    own_nats.start()
    await until(supervisor.well)
    await asyncio.sleep(0.5)
    assert supervisor.status()[0].pid == pid
    assert supervisor.status()[0].kills == 0
    assert await supervisor.stop(10) == {"n1": 0}


async def test_nobody_is_killed_for_silence_while_the_bus_is_frozen(
    own_nats: NatsServer, bus: NatsBus, supervise: Callable[..., Supervisor]
) -> None:
    """R15. Scenario: connections look open and nothing comes; all are silent at once, which is no frozen edge."""
    nodes = [node(own_nats, name, frozen_kill_s=3.0) for name in ("n1", "n2")]
    supervisor = supervise(nodes, bus=bus, limits=PATIENT)
    await supervisor.start()
    assert await supervisor.wait_ready(15)
    await until(supervisor.well)
    own_nats.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(4.5)
    finally:
        own_nats.signal(signal.SIGCONT)
    await until(supervisor.well)
    await asyncio.sleep(0.3)
    assert [(row.kills, row.restarts) for row in supervisor.status()] == [(0, 0), (0, 0)]
    assert await supervisor.stop(10) == {"n1": 0, "n2": 0}


async def test_stop_asks_then_kills_and_leaves_nothing(
    own_nats: NatsServer, bus: NatsBus, supervise: Callable[..., Supervisor]
) -> None:
    """A stopped (SIGSTOP) child leaves on request, one that ignores SIGTERM is killed at the limit; no zombies."""
    supervisor = supervise(
        [node(own_nats, "good"), node(own_nats, "bad", "stubborn"), sleeper("plain")],
        bus=bus, limits=PATIENT,
    )  # fmt: skip
    await supervisor.start()
    await until(lambda: supervisor.status()[0].ready)
    pids = [row.pid for row in supervisor.status()]
    os.kill(pids[0] or 0, signal.SIGSTOP)

    started = time.perf_counter()
    codes = await supervisor.stop(2.0, order=[["plain"], ["good"]])

    assert codes == {"good": 0, "bad": -9, "plain": -15}
    assert time.perf_counter() - started < 8
    assert not [p for p in children() if p.pid in pids]
    assert all(row.state == "stopped" for row in supervisor.status())


async def test_a_second_sigterm_ends_a_busy_node_at_once(
    own_nats: NatsServer, bus: NatsBus, supervise: Callable[..., Supervisor]
) -> None:
    """The first one waits for the work that is held, the second does not; both exit with 0."""
    supervisor = supervise([node(own_nats, "busy", "busy")], bus=bus, limits=PATIENT)
    await supervisor.start()
    assert await supervisor.wait_ready(15)
    pid = supervisor.status()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    await until(lambda: [m.state for m in supervisor.membership.members(states=("draining",))] == ["draining"])
    assert supervisor.status()[0].pid == pid
    assert await supervisor.stop(5) == {"busy": 0}


async def test_a_child_that_keeps_dying_is_a_crash_loop(tmp_path: Path, supervise: Callable[..., Supervisor]) -> None:
    """Its last words are in its log, and the status says so."""
    log = tmp_path / "logs" / "bad.log"
    argv = (sys.executable, "-c", "import sys; print('cannot start', file=sys.stderr); sys.exit(3)")
    supervisor = supervise([NodeSpec("bad", argv, log=log)], limits=PATIENT)
    await supervisor.start()
    await until(lambda: supervisor.status()[0].state == "crash_loop")
    assert not await supervisor.wait_ready(1)
    row = supervisor.status()[0]
    assert row.exit_code == 3 and row.pid is None
    assert log.read_text().count("cannot start") == 4
    await supervisor.stop(1)


async def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path, supervise: Callable[..., Supervisor]) -> None:
    """It is raised at the start, not found out later."""
    supervisor = supervise([NodeSpec("none", (str(tmp_path / "none"),))])
    with pytest.raises(OSError):
        await supervisor.start()
    await supervisor.stop(1)


async def test_children_of_a_child_die_with_it(supervise: Callable[..., Supervisor]) -> None:
    """What a killed child had started does not live on."""
    argv = ("sh", "-c", "sleep 601 & sleep 602")
    supervisor = supervise([NodeSpec("parent", argv)], limits=RestartLimits(first_delay_s=60.0))
    await supervisor.start()
    await until(lambda: len([p for p in children() if "sleep" in p.name()]) >= 2)
    family = [p for p in children() if "sleep" in p.name()]
    pid = supervisor.status()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family))
    await supervisor.stop(1)


async def test_the_bus_server_itself_comes_back_on_its_port(
    nats_binary: str, tmp_path: Path, supervise: Callable[..., Supervisor]
) -> None:
    """Killed like any other child, restarted by the policy; connections find it again."""
    server = NatsServer(nats_binary, tmp_path)
    spec = NodeSpec("nats", (nats_binary, "-c", str(server.write_config())), stop_last=True)
    supervisor = supervise([spec], limits=PATIENT)
    await supervisor.start()
    bus = await NatsBus.connect(server.url, name="x", clock=CLOCK)
    await supervisor.attach(bus)
    await supervisor.add(node(server, "n1"))
    assert await supervisor.wait_ready(15)
    rows = supervisor.status()

    os.kill(rows[0].pid or 0, signal.SIGKILL)

    await until(lambda: supervisor.status()[0].restarts == 1 and bus.connected and bus.statistics()["reconnects"] == 1)
    assert supervisor.status()[1].pid == rows[1].pid
    assert await supervisor.stop(10) == {"nats": 0, "n1": 0} or supervisor.status()[1].exit_code == 0
    await bus.close()


_ORPHANER = """
import asyncio, sys
from runtime.clock import SystemClock
from runtime.supervisor import NodeSpec, Supervisor

async def main():
    supervisor = Supervisor([NodeSpec("a", ("sleep", "603")), NodeSpec("b", ("sleep", "604"))], clock=SystemClock())
    await supervisor.start()
    print(*[row.pid for row in supervisor.status()], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_children_die_with_their_supervisor() -> None:
    """SIGKILL of the supervisor leaves no child, without anybody's help."""
    with subprocess.Popen(
        [sys.executable, "-c", _ORPHANER], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in (await asyncio.to_thread(process.stdout.readline)).split()]
        assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
        process.kill()
    await until(lambda: not any(_alive(pid) for pid in pids), 3.0)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
