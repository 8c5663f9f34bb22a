"""Restarts by hand: a node that is asked to leave loses nothing, whatever it holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, Stream, answer, fleet

from runtime.virtual_clock import VirtualClock, run_virtual

PROMPT = "the water that turns the wheel comes down the headrace " * 4


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, **layout: int) -> None:
    """Run `scenario(fleet)` on a fresh instance."""

    async def main(clock: VirtualClock) -> None:
        async with fleet(clock, directory, **layout) as f:
            await scenario(f)

    run_virtual(main)


async def restart(f: Fleet, name: str) -> int:
    """SIGTERM, wait for the exit, start it again; returns the exit code."""
    node = f.nodes[name]
    node.request_drain()
    code = await node.wait()
    await node.stop()
    f.system._slots[name].gone = True
    kind, _, number = name.partition("-")
    await f.system.start(f.make(kind, int(number)))
    return code


def check(stream: Stream, prompt: str, count: int) -> None:
    """The stream is the undisturbed one."""
    assert stream.error is None
    assert stream.text == answer(prompt, count)
    assert stream.finish == {0: "length"}


@pytest.mark.slow
def test_a_rolling_restart_of_every_node_under_load_fails_no_request(tmp_path: Path) -> None:
    """Requests come every 0.5 s while one node after another leaves and comes back; each has its own text."""

    async def scenario(f: Fleet) -> None:
        asked: list[tuple[str, Stream]] = []
        done = False

        async def ask() -> None:
            while not done:
                prompt = f"{len(asked)} {PROMPT}"
                asked.append((prompt, await f.ask(prompt, max_tokens=60)))
                await f.system.clock.sleep(0.5)

        asking = f.system.clock.spawn(ask(), name="load")
        for name in list(f.nodes):
            await f.system.clock.sleep(0.2)
            assert await restart(f, name) == 0
        done = True
        await asking
        for prompt, stream in asked:
            await f.end(stream)
            check(stream, prompt, 60)
        assert len(asked) > 5
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path, admission=0, tokenize=0, detokenize=0, light=2)


def test_a_draining_admission_actor_hands_new_requests_on(tmp_path: Path) -> None:
    """Scenario: a request was sent to it before its sender heard of the drain."""

    async def scenario(f: Fleet) -> None:
        f.actor("admission-0").drain()
        for _ in range(4):  # the queue group still picks it as often as the other
            stream = await f.ask(PROMPT, max_tokens=5)
            await f.end(stream)
            check(stream, PROMPT, 5)
        assert f.actor("admission-0").idle

    simulate(scenario, tmp_path)


@pytest.mark.parametrize("another", [False, True])
def test_a_draining_detokenizer_cuts_no_stream(another: bool, tmp_path: Path) -> None:
    """It is the only one: its streams end there before it goes, or move to one that comes meanwhile."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=100)
        await f.items(stream, 20)
        node = f.nodes["detokenize-0"]
        node.request_drain()
        await f.system.clock.sleep(0.3)
        if another:
            await f.system.start(f.make("detokenize", 1))
            assert await node.wait() == 0
            assert stream.terminal is None and stream.num_items < 100
        await f.end(stream, limit_s=4.0)
        check(stream, PROMPT, 100)
        assert sum(a.stepped.steps for a in f.engines()) <= 105
        assert await node.wait() == 0
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path, detokenize=1)
