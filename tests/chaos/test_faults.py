"""Faults strike real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from chaos.faults import Faults, Target, send_signal

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process that counts on its standard output until it is stopped."""
    code = "import itertools\nfor i in itertools.count():\n  print(i, flush=True)\n  __import__('time').sleep(0.01)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


async def test_a_killed_process_is_dead_at_once(victim: subprocess.Popen[bytes]) -> None:
    """SIGKILL, and the fault says when and whom."""
    done = await Faults(time.monotonic).perform("kill", Target("decode/0", victim.pid))

    assert victim.wait(5) == -signal.SIGKILL
    assert (done.victim, done.pid, done.fault) == ("decode/0", victim.pid, "kill")


async def test_a_frozen_process_stands_still_and_is_thawed(victim: subprocess.Popen[bytes]) -> None:
    """It is stopped until the thaw, and runs afterwards."""
    faults = Faults(time.monotonic)

    await faults.perform("freeze", Target("decode/0", victim.pid, for_s=0.2))
    states = []
    while not states or (states[-1] != psutil.STATUS_STOPPED and len(states) < 1000):
        states.append(psutil.Process(victim.pid).status())
    await faults.settle()

    assert states[-1] == psutil.STATUS_STOPPED
    assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED


async def test_a_process_that_is_gone_is_no_error(victim: subprocess.Popen[bytes]) -> None:
    """A supervisor may have been quicker."""
    victim.kill()
    victim.wait()

    assert send_signal(victim.pid, signal.SIGCONT) is False
