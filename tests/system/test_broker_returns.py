"""The bus goes away under load and comes back: every request is answered, by the same processes."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.support.nats_server import NatsServer
from tests.system.cases import assert_drained
from tests.system.launch import System, wait_until

pytestmark = pytest.mark.slow

SMALL = ("--prefill", "0", "--decode", "0", "--both", "1")
HOWS = [
    pytest.param("kill", 1.0),
    pytest.param("pause", 3.0, marks=pytest.mark.soak),
    pytest.param("stop", 1.0, marks=pytest.mark.soak),
    pytest.param("stop", 10.0, marks=pytest.mark.soak),
    pytest.param("kill", 10.0, marks=pytest.mark.soak),
    pytest.param("pause", 10.0, marks=pytest.mark.soak),
    pytest.param("kill", 60.0, marks=pytest.mark.soak),
]


async def ask(http: httpx.AsyncClient, model: str, text: str, tokens: int) -> httpx.Response:
    """Send one chat request; an edge that is cut off says 503, and is asked again as it wishes."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0.0}
    return await http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(("how", "away_s"), HOWS)
def test_all_is_answered_after_the_bus_comes_back(
    how: str, away_s: float, own_nats: NatsServer, script_file: Path, tmp_path: Path
) -> None:
    """Eight streams run when it goes; a hundred requests follow when it is back; no process is started anew."""
    options = (*SMALL, "--engine", f"scripted:{script_file}", "--bus", own_nats.url)
    system = System(tmp_path, *options, env={"HEADRACE_BUS_WAIT_S": "90"})
    system.start()
    try:
        pids = {(row["node"], row["pid"]) for row in system.rows()}

        async def run() -> None:
            async with system.address.client() as http:
                model = (await http.get("/v1/models")).json()["data"][0]["id"]
                expected = [(await ask(http, model, f"s{n}", 200)).json() for n in range(2)]
                running = [asyncio.create_task(ask(http, model, f"s{n % 2}", 200)) for n in range(8)]
                await asyncio.sleep(0.5)
                {"kill": own_nats.kill, "stop": own_nats.stop, "pause": lambda: own_nats.signal(signal.SIGSTOP)}[how]()
                until, statuses = time.monotonic() + away_s, set()
                while time.monotonic() < until:
                    statuses.add((await http.get("/health/ready")).status_code)
                    await asyncio.sleep(0.05)
                if how == "pause":
                    own_nats.signal(signal.SIGCONT)
                else:
                    own_nats.start()
                assert away_s < 2.5 or 503 in statuses, "readiness says that the bus is away"
                ends = await asyncio.gather(*running)
                for number, end in enumerate(ends):
                    assert end.status_code == 200, end.text
                    assert end.json()["choices"] == expected[number % 2]["choices"]
                async with asyncio.timeout(20.0):
                    while (await http.get("/health/ready")).status_code != 200:
                        await asyncio.sleep(0.02)
                answers = await asyncio.gather(*(ask(http, model, f"after {n}", 8) for n in range(100)))
                assert [a.status_code for a in answers] == [200] * 100

        asyncio.run(run())
        assert_drained(system)
        same = "the same processes"
        wait_until(lambda: {(r["node"], r["pid"]) for r in system.rows()} == pids, limit_s=5.0, what=same)
    finally:
        assert (system.stop(), system.leftovers()) == (0, []), system.tail()
