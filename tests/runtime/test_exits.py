"""How a child ended, and what it computed at that moment: read by its supervisor, of real processes (R12)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from runtime.bus import BusMessage
from runtime.clock import SystemClock
from runtime.exits import is_crash, oom_kills
from runtime.memory_bus import MemoryBroker
from runtime.restart import RestartLimits
from runtime.step_note import NBYTES, SLOT_NBYTES, NotePage, StepNote
from runtime.supervisor import NodeSpec, Supervisor
from schemas.codec import decode
from schemas.messages import ExitNotice
from schemas.subjects import EXIT

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "from runtime.step_note import StepNote; import os, sys, signal; n = StepNote.inherited(); n.begin(('a', 'b'));"


@pytest.mark.parametrize(
    ("code", "failed", "out_of_memory", "crash"),
    [
        (0, False, False, False),
        (-signal.SIGTERM, False, False, False),
        (-signal.SIGINT, False, True, False),
        (-signal.SIGKILL, False, False, False),  # by an operator, a test, or a supervisor that found it frozen
        (-signal.SIGKILL, False, True, True),
        (-signal.SIGKILL, True, False, True),  # a step that never ended
        (-signal.SIGSEGV, False, False, True),
        (-signal.SIGABRT, False, False, True),
        (-signal.SIGBUS, False, False, True),
        (-signal.SIGILL, False, False, True),
        (-signal.SIGFPE, False, False, True),
        (3, False, False, True),
    ],
)
def test_a_crash_is_what_a_process_does_to_itself(code: int, failed: bool, out_of_memory: bool, crash: bool) -> None:
    """R12. Scenario: an operator kills engines, and the requests on them are suspected for it."""
    assert is_crash(code, failed=failed, out_of_memory=out_of_memory) == crash


def test_kills_for_want_of_memory_are_read_from_the_own_control_group(tmp_path: Path) -> None:
    """R12. Scenario: the kernel ends an engine for want of memory by the very signal that an operator sends."""
    own, group = tmp_path / "cgroup", tmp_path / "root" / "here"
    group.mkdir(parents=True)
    own.write_text("0::/here\n")
    (group / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")

    assert oom_kills(own, tmp_path / "root") == 3
    assert oom_kills(tmp_path / "absent", tmp_path) == 0
    old = tmp_path / "root" / "memory"
    old.mkdir()
    (old / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    own.write_text("12:cpu,memory:/as/the/host/sees/it\n0::/absent\n")
    assert oom_kills(own, tmp_path / "root") == 2


def test_a_page_says_what_is_being_computed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """R12. Scenario: an engine dies between two steps, and the requests of the last one are blamed."""
    page = NotePage()
    monkeypatch.setenv("_STEP_NOTE_FD", str(page.fd))
    first, second = StepNote.inherited(), StepNote.inherited()
    assert first is not None and second is not None and page.read() == []

    first.begin(("a", "b"))
    second.begin(("c",))
    assert page.read() == ["a", "b", "c"]
    first.end()
    assert page.read() == ["c"]
    second.end()
    first.begin(("a", "b"))
    assert page.read() == ["a", "b"]

    many = tuple(f"request-{n:06}" for n in range(5000))
    first.begin(many)
    read = page.read()
    assert 2 < len(read) < SLOT_NBYTES // 14 and tuple(read) == many[: len(read)]

    page.clear()
    assert page.read() == []
    notes = [StepNote.inherited() for _ in range(NBYTES // SLOT_NBYTES + 1)]
    assert notes[-1] is None and None not in notes[:-1]
    page.close()
    assert StepNote.inherited() is None


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "code", "computing"),
    [
        ("os.abort()", -signal.SIGABRT, ["a", "b"]),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ["a", "b"]),
        ("os._exit(3)", 3, ["a", "b"]),
        ("n.end(); os.abort()", -signal.SIGABRT, []),
        ("sys.exit(1)", 1, []),  # it took its leave: whatever went wrong was not the step
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, []),
    ],
)
async def test_the_notice_of_a_crash_names_the_requests_of_its_step(does: str, code: int, computing: list[str]) -> None:
    """R12. Scenario: an engine dies in a step, says nothing any more, and all that it held is suspected for ever."""
    clock = SystemClock()
    broker = MemoryBroker(clock)
    bus, seen = broker.connect("supervisor"), asyncio.Queue[ExitNotice]()

    def take(message: BusMessage) -> None:
        body = decode(message.payload)[0]
        assert isinstance(body, ExitNotice)
        seen.put_nowait(body)

    await bus.subscribe(EXIT, take)
    argv = (sys.executable, "-c", BEGIN + does)
    spec = NodeSpec("engine", argv, {"PYTHONPATH": str(ROOT), **os.environ}, ("both",), noted=True)
    supervisor = Supervisor([spec], clock=clock, bus=bus, limits=RestartLimits(first_delay_s=60.0, max_delay_s=60.0))
    await supervisor.start()
    async with asyncio.timeout(20.0):
        notice = await seen.get()
    await supervisor.stop(5.0)
    await bus.close()

    assert (notice.code, notice.computing) == (code, computing)
