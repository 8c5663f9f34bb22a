"""One tenant's crowd and another's few requests, on whole instances in virtual time whose engines keep a pace."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paced_fleet import Pace, PacedRunner
from paced_fleet import paced_engines as paced_engines
from virtual_fleet import Fleet, Stream, fleet

from actors.decode import in_turn
from actors.refusal import Asked, Queue, Standing, tokens_ahead, tokens_behind
from runtime.virtual_clock import VirtualClock, run_virtual

AT_MOST = 2.0  # times the time to the first token alone, in a run too short for the 1.5 of `make bench-fairness`
RATE, TIMES = 1.5, 10
SECONDS = 12.0


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def test_whoever_has_the_least_running_gets_blocks_next() -> None:
    """Over its weight; of equals, and of one tenant, what came first."""
    assert in_turn(["a", "b", "a"], {"a": 5}, {}) == [(0.0, 1), (5.0, 0)]
    assert in_turn(["a", "a"], {"a": 5}, {}) == [(5.0, 0)]
    assert in_turn(["a", "b"], {"a": 4, "b": 3}, {"a": 2.0}) == [(2.0, 0), (3.0, 1)]
    assert in_turn(["a", "b"], {}, {}) == [(0.0, 0), (0.0, 1)]


def test_another_tenants_crowd_is_not_ahead_of_the_first_request_of_one_with_nothing_there() -> None:
    """With something there, as much of the crowd is ahead as of its own."""
    engine = Standing((Queue("a", 0, 1000.0),), computing=50.0, rate=100.0, busy=True)
    mine = Standing((*engine.queues, Queue("b", 0, 100.0)), 50.0, 100.0, True)

    assert tokens_ahead(engine, Asked("b", 0, 100), {}) == 50
    assert tokens_behind(engine, Asked("b", 0, 100), {}) == 1000
    assert tokens_ahead(mine, Asked("b", 0, 100), {}) == 50 + 100 + 100
    assert tokens_behind(engine, Asked("a", 0, 100), {}) == 0


async def offered(f: Fleet, name: str, rate: float, seed: int) -> list[tuple[float, Stream]]:
    """Ask at seeded moments; returns when, and the streams."""
    clock, source = f.system.clock, random.Random(seed)
    until, out = clock.now() + SECONDS, []
    at = clock.now()
    while (at := at + source.expovariate(rate)) < until:
        await clock.sleep(max(0.0, at - clock.now()))
        text = f"{name}{len(out)} " + "".join(source.choices("the water turns", k=104))
        out.append((clock.now(), await f.ask(text[:110], max_tokens=32, headers={"x-tenant": name})))
    return out


def first_tokens(directory: Path, rates: dict[str, float]) -> dict[str, list[float]]:
    """Return each tenant's times to first tokens, in order of size."""

    async def main(clock: VirtualClock) -> dict[str, list[float]]:
        pace, firsts, out = Pace(), {}, {}
        async with fleet(clock, directory, make_runner=lambda: PacedRunner(pace), whole_below=512) as f:
            take = f._take

            def noted(stream: Stream, message: Any) -> None:
                take(stream, message)
                if stream.num_items:
                    firsts.setdefault(stream.inbox, clock.now())

            f._take = noted  # type: ignore[method-assign]
            for name in ("admission-0", "admission-1"):
                f.actor(name).config = replace(f.actor(name).config, tenant_header="x-tenant")
            for number in range(6):  # engines learn what steps take
                await f.end(await f.ask(f"{number} {'x' * 100}", max_tokens=8, headers={"x-tenant": "b"}))
            found = await asyncio.gather(*(offered(f, name, rate, at) for at, (name, rate) in enumerate(rates.items())))
            for name, streams in zip(rates, found, strict=True):
                for _, stream in streams:
                    await f.end(stream, limit_s=120.0)
                    assert stream.error is None, stream.error
                out[name] = sorted(firsts[stream.inbox] - at for at, stream in streams)
        return out

    return run_virtual(main, seed=3)


@pytest.mark.slow
@pytest.mark.usefixtures("paced_engines")
def test_a_crowd_ten_times_as_large_makes_the_crowd_wait(tmp_path: Path) -> None:
    """The other's first tokens come within twice of what they take alone (nine of ten), though there is no room."""
    alone = first_tokens(tmp_path, {"b": RATE})["b"]
    both = first_tokens(tmp_path, {"b": RATE, "a": TIMES * RATE})

    assert len(both["b"]) == len(alone) > 10
    at = int(0.9 * len(alone))
    assert both["b"][at] <= AT_MOST * alone[at], (both["b"], alone)
    assert both["a"][len(both["a"]) // 2] > 1.3 * both["b"][len(alone) // 2], "the crowd waits for itself"
