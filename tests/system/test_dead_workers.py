"""SIGKILL of every type of process under streams and waiting prompts: what clients, readiness and metrics say."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import pytest

from tests.system.cases import Alive, assert_drained
from tests.system.launch import System, wait_until

pytestmark = pytest.mark.slow

LONG = "wait " * 110  # part of a second of prefill
TOKENS = 100


def pid_of(system: System, node: str) -> int:
    """Process id of a node that is ready."""
    found = wait_until(
        lambda: [r["pid"] for r in system.rows() if r["node"] == node and r["state"] == "ready"],
        limit_s=30.0, what=f"{node} is ready",
    )  # fmt: skip
    return int(found[0])


async def texts(system: System, prompts: list[str], meanwhile: asyncio.Event | None = None) -> list[str]:
    """Send all at once; returns what each said. Sets `meanwhile` when all are on their way."""
    async with system.address.client() as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def ask(prompt: str) -> str:
            body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS}
            response = await http.post("/v1/chat/completions", json=body | {"temperature": 0.0})
            assert response.status_code == 200, response.text
            return str(response.json()["choices"][0]["message"]["content"])

        tasks = [asyncio.create_task(ask(prompt)) for prompt in prompts]
        if meanwhile is not None:
            await asyncio.sleep(0.5)
            meanwhile.set()
        return list(await asyncio.gather(*tasks))


def test_readiness_follows_the_only_engine_and_nothing_is_lost(joined: System) -> None:
    """Five streams run and five prompts wait when it dies: 503 while it is away, then all end as undisturbed."""
    prompts = [f"stream {n}" for n in range(5)] + [f"{n} {LONG}" for n in range(5)]
    expected = asyncio.run(texts(joined, prompts))
    alive, children = Alive(joined), len(joined.processes())
    pid = pid_of(joined, "both-0")
    seen: list[int] = []

    async def run() -> list[str]:
        going = asyncio.Event()
        task = asyncio.create_task(texts(joined, prompts, going))
        await going.wait()
        os.kill(pid, signal.SIGKILL)
        async with httpx.AsyncClient(base_url=joined.url, timeout=5.0) as http:
            end = time.monotonic() + 20.0
            while time.monotonic() < end and (503 not in seen or seen[-1] != 200):
                seen.append((await http.get("/health/ready")).status_code)
                await asyncio.sleep(0.02)
        return await task

    assert asyncio.run(run()) == expected
    assert set(seen) == {200, 503} and seen[-1] == 200
    assert pid_of(joined, "both-0") != pid
    assert_drained(joined)
    assert alive._ask() == alive._before
    assert len(joined.processes()) == children, "no orphans"


def test_streams_do_not_notice_the_death_of_what_stands_beside_them(split: System) -> None:
    """Store, mover of blocks and an owner die one after another under streams and waiting prompts: no text differs."""
    prompts = [f"beside {n}" for n in range(5)] + [f"beside {n} {LONG}" for n in range(5)]
    pids = {node: pid_of(split, node) for node in ("kv-0", "transfer-0", "admission-0")}

    async def run() -> list[str]:
        going = asyncio.Event()
        task = asyncio.create_task(texts(split, prompts, going))
        await going.wait()
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.5)
        return await task

    disturbed = asyncio.run(run())
    assert all(pid_of(split, node) != pid for node, pid in pids.items())
    assert disturbed == asyncio.run(texts(split, prompts))
    assert_drained(split)


@pytest.mark.parametrize(("signum", "limit_s"), [(signal.SIGKILL, 5.0), (signal.SIGSTOP, 8.0)])
def test_the_death_of_the_edge_stops_what_it_asked_for(split: System, signum: signal.Signals, limit_s: float) -> None:
    """R15. Scenario: a frozen edge keeps its sockets open, and its clients would wait for ever; it is killed in 2 s.

    Clients see their connections break; engines come to rest; the next edge serves.
    """
    alive = Alive(split)
    pid, model = pid_of(split, "edge"), split.model

    async def run() -> list[BaseException | httpx.Response]:
        async with split.address.client() as http:
            body = {"model": model, "messages": [{"role": "user", "content": "never ending"}], "max_tokens": 4000}
            posts = [http.post("/v1/chat/completions", json=body | {"stream": n % 2 == 0}) for n in range(5)]
            tasks = [asyncio.ensure_future(post) for post in posts]
            await asyncio.sleep(0.5)
            os.kill(pid, signum)
            async with asyncio.timeout(limit_s):
                return list(await asyncio.gather(*tasks, return_exceptions=True))

    ends = asyncio.run(run())
    assert all(isinstance(end, httpx.HTTPError) for end in ends), ends
    assert_drained(split)
    wait_until(lambda: split.status("/health/ready") == 200, limit_s=30.0, what="the next edge is ready")
    assert alive._ask() == alive._before


def test_series_of_a_dead_worker_do_not_stay_frozen(split: System) -> None:
    """After a kill under load its gauges leave the page or are at rest."""

    def running() -> dict[str, str]:
        page = httpx.get(split.url + "/metrics", timeout=10.0).text
        names = ("headrace_decode_running{", "headrace_decode_pool_in_use{", "headrace_decode_waiting{")
        lines = [line for line in page.splitlines() if line.startswith(names)]
        return {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in lines}

    pid = pid_of(split, "decode-0")

    async def run() -> None:
        going = asyncio.Event()
        task = asyncio.create_task(texts(split, [f"series {n}" for n in range(8)], going))
        await going.wait()
        os.kill(pid, signal.SIGKILL)
        await task

    asyncio.run(run())
    wait_until(lambda: not any(float(v) for v in running().values()), limit_s=4.0, what="gauges at rest")
    assert pid_of(split, "decode-0") != pid
