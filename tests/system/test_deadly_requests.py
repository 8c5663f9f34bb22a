"""A request of which engines really die, beside streams that have done nothing (R12): real processes and signals."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.system.cases import assert_drained
from tests.system.launch import System
from tests.system.test_dead_workers import pid_of, texts

pytestmark = pytest.mark.slow

ENGINES = ("prefill-0", "decode-0", "decode-1")


def counter(system: System, name: str) -> float:
    """A counter's sum over all nodes."""
    page = httpx.get(system.url + "/metrics", timeout=10.0).text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"headrace_{name}"))


def test_a_request_of_which_engines_die_is_refused_and_takes_nobody_along(split: System) -> None:
    """R12. Scenario: each failover hands it to the next engine, which dies of it: two do, then it is refused (422).

    Eight streams run on these engines and go on with the text of an undisturbed run.
    """
    prompts = [f"beside it {n}" for n in range(8)]
    expected = asyncio.run(texts(split, prompts))
    before = {node: pid_of(split, node) for node in ENGINES}
    refused = counter(split, "requests_poisoned_total")

    async def run() -> tuple[list[str], httpx.Response]:
        going = asyncio.Event()
        task = asyncio.create_task(texts(split, prompts, going))
        await going.wait()
        async with split.address.client(40.0) as http:
            body = {"model": split.model, "prompt": "CASE-DEADLY", "max_tokens": 32, "temperature": 0.0}
            answer = await http.post("/v1/completions", json=body)
        return await task, answer

    said, answer = asyncio.run(run())

    assert said == expected
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "request_poisoned")
    assert sum(pid_of(split, node) != pid for node, pid in before.items()) == 2
    assert counter(split, "requests_poisoned_total") == refused + 1
    assert_drained(split)
