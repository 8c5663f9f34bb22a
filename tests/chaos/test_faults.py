"""Faults strike real processes."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
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


class KillsWhoeverComputes:
    """Where an instance answers: a process dies of the request, which is then refused."""

    def __init__(self, dies: subprocess.Popen[bytes] | None, status: int = 422) -> None:
        self.address = self
        self._dies, self._status = dies, status

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if self._dies is not None:
            self._dies.kill()
            self._dies.wait()
        await asyncio.sleep(0.1)
        return httpx.Response(self._status, json={})

    def client(self, limit_s: float) -> httpx.AsyncClient:
        transport = httpx.MockTransport(self._answer)
        return httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=limit_s)


async def test_who_died_of_a_poisonous_request_is_told_whoever_was_expected(victim: subprocess.Popen[bytes]) -> None:
    """Placement chooses whom it meets. When nobody has died it does not count, and it must be refused."""
    bystander = Target("decode/0", os.getpid(), others=(("decode/1", victim.pid),))
    began = time.monotonic()

    done = await Faults(time.monotonic, instance=KillsWhoeverComputes(victim)).perform("poison", bystander)  # type: ignore[arg-type]  # that part of it alone

    assert (done.victim, done.pid) == ("decode/1", victim.pid) and began < done.at < time.monotonic()
    alone = Target("decode/0", os.getpid())
    harmless = KillsWhoeverComputes(None)
    done = await Faults(time.monotonic, instance=harmless).perform("poison", alone)  # type: ignore[arg-type]
    assert math.isinf(done.at) and done.victim == "decode/0"
    served = KillsWhoeverComputes(None, status=200)
    with pytest.raises(RuntimeError, match="ended with 200"):
        await Faults(time.monotonic, instance=served).perform("poison", alone)  # type: ignore[arg-type]
