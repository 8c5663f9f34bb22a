"""All who own requests or hold their records die within a moment: who starts next takes over what still runs.

What is left is the edge, which asks again, and detokenizers and engines, which report what has no owner. All of them
reach whoever is started first, and they reach two of them where two are started: each request is to have one owner in
the end, and its whole text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_adoption import PROMPT, check
from test_system import add_edge, read, submit
from virtual_fleet import Fleet, answer, fleet

from edge.exchange import OpenRequest
from runtime.virtual_clock import VirtualClock, run_virtual

COUNT = 150
MOMENTS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0) -> Any:
    """Run `scenario(fleet)` on a fresh instance with an edge, whose decode engines run requests whole."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, whole_below=10_000) as f:
            await f.system.start(add_edge(f))
            await f.system.clock.sleep(0.5)
            return await scenario(f)

    return run_virtual(main, seed=seed)


async def whole(f: Fleet, request: OpenRequest, text: str = "") -> None:
    """The request comes to its end with the text of an undisturbed one."""
    limit = f.system.clock.now() + 20.0
    while not request.inflight.ended and f.system.clock.now() < limit:
        text += await read(f, request, until=sum(request.inflight.next) + 1)
    text += await read(f, request)
    assert request.inflight.error is None
    assert text == answer(PROMPT, COUNT)


async def ends(f: Fleet, requests: list[OpenRequest]) -> None:
    """All of them come to their ends well before their deadlines; says which did not."""
    limit = f.system.clock.now() + 15.0
    while f.system.clock.now() < limit and not all(r.inflight.ended for r in requests):
        await f.system.clock.sleep(0.05)
        for request in requests:
            f.actor("edge-0").exchange.taken(request)
    hung = [(r.id, r.inflight.next, r.inflight.accepted) for r in requests if not r.inflight.ended]
    assert not hung, f"{len(hung)} of {len(requests)} hang: {hung}"
    for request in requests:
        await whole(f, request)


def test_streams_go_on_when_all_admission_actors_were_gone_for_a_second(tmp_path: Path) -> None:
    """R2, R11. Scenario: the heir dies before its replacement is there; the edge's try meets the orphans' reports."""

    async def scenario(f: Fleet) -> None:
        requests = [submit(f, PROMPT, COUNT) for _ in range(4)]
        native = await f.ask(PROMPT, max_tokens=COUNT)
        await f.system.until(lambda: all(sum(r.inflight.next) > 20 for r in requests), limit_s=5.0)
        for number in range(2):
            await f.kill(f"admission-{number}", again_after_s=None)
        await f.system.clock.sleep(1.0)
        await f.system.start(f.make("admission", 0))
        await ends(f, requests)
        await f.end(native, limit_s=10.0)
        check(native, PROMPT, COUNT)

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_every_request_has_one_owner_in_the_end(seed: int, tmp_path: Path) -> None:
    """R3. Scenario: two owners start at any distance after two have died, in a third of the cases with an engine."""

    async def scenario(f: Fleet) -> None:
        draw, sleep = random.Random(seed), f.system.clock.sleep
        requests = [submit(f, PROMPT, COUNT) for _ in range(3)]
        native = [await f.ask(PROMPT, max_tokens=COUNT) for _ in range(2)]
        moment = draw.randrange(60)
        await f.system.until(lambda: sum(requests[0].inflight.next) >= moment, limit_s=5.0)
        await f.system.until(lambda: all(s.accepted is not None for s in native), limit_s=5.0)
        requests += [submit(f, PROMPT, COUNT) for _ in range(3)]
        await sleep(draw.choice(MOMENTS))
        first, second = draw.sample(["admission-0", "admission-1"], 2)
        await f.kill(first, again_after_s=None)
        await sleep(draw.choice([0.0, 0.005, 0.1, 0.5, 1.5]))
        requests += [submit(f, PROMPT, COUNT) for _ in range(2)]
        await sleep(draw.choice(MOMENTS))
        await f.kill(second, again_after_s=None)
        if draw.random() < 0.35:
            await sleep(draw.choice(MOMENTS))
            await f.kill(draw.choice(["decode-0", "decode-1", "detokenize-0", "detokenize-1", "prefill-0"]))
        await sleep(draw.choice([0.05, 0.3, 0.6, 1.2]))
        number = draw.randrange(2)
        await f.system.start(f.make("admission", number))
        if draw.random() < 0.5:
            await sleep(draw.choice([0.01, 0.3, 1.0]))
            await f.system.start(f.make("admission", 1 - number))
        await ends(f, requests)
        for stream in native:
            await f.end(stream, limit_s=10.0)
            check(stream, PROMPT, COUNT)

    simulate(scenario, tmp_path, seed=seed)
