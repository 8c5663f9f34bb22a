"""Clients and edges that are gone, each noticed by whoever is left to notice, in whole instances in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_adoption import check, simulate
from test_system import add_edge, submit
from virtual_fleet import Fleet, Stream

from runtime.bus import BusMessage
from schemas.codec import encode_hot, split
from schemas.items import ACKS, ITEMS, Item, ItemBatch, items_body, parse_acks
from schemas.record import Fence
from schemas.subjects import Ref, hot

PROMPT = "the water that turns the wheel comes down the headrace " * 4


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines run on the loop by design; real time does not pass."""
    yield


async def unsubscribe(f: Fleet, stream: Stream) -> None:
    for member in list(f.system.outside._members):
        if member.pending.pattern == stream.inbox:
            await member.unsubscribe()


async def waiting(f: Fleet) -> Stream:
    """Return a request that was accepted and waits for an engine: nothing is written to its client."""
    await f.system.clock.sleep(3.0)  # nobody is taken for gone just after the bus was joined
    stream = await f.ask(PROMPT, max_tokens=30)
    await f.system.until(lambda: stream.accepted is not None, limit_s=1.0)
    await f.kill("decode-0", again_after_s=None)
    await f.system.clock.sleep(0.3)
    assert stream.num_items == 0
    return stream


@pytest.mark.slow
def test_a_client_that_leaves_while_nothing_is_sent_is_noticed(tmp_path: Path) -> None:
    """R6. Scenario: no frame is due, so that nobody would ever hear that the reply subject has no listener."""

    async def scenario(f: Fleet) -> None:
        stream = await waiting(f)
        await unsubscribe(f, stream)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path, prefill=0, decode=1)


@pytest.mark.slow
def test_a_client_that_misses_one_keepalive_keeps_its_request(tmp_path: Path) -> None:
    """R6. Scenario: "no responders" to one keepalive; a second later the client listens again."""

    async def scenario(f: Fleet) -> None:
        stream = await waiting(f)
        await unsubscribe(f, stream)
        await f.system.clock.sleep(1.1)
        await f.system.outside.subscribe(stream.inbox, lambda message: f._take(stream, message))
        await f.system.start(f.make("decode", 0))
        await f.end(stream, limit_s=10.0)
        check(stream, PROMPT, 30)

    simulate(scenario, tmp_path, prefill=0, decode=1)


def test_items_of_a_request_that_nobody_knows_are_acknowledged_as_done(tmp_path: Path) -> None:
    """R5. Scenario: the engine's `Close` was lost; it would repeat its items, and keep its blocks, until D."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=5)
        await f.system.until(lambda: stream.num_items > 0, limit_s=3.0)
        detok = f.actor(f.serving("detokenize", stream))
        fence = detok._sessions[stream.request_id].fence
        await f.end(stream)
        await f.rest()
        ghost = Ref("decode", "ghost", "0" * 16)
        got: list[tuple[str, str]] = []

        def take(message: BusMessage) -> None:
            _, kind, _, body = split(message.payload)
            if kind == ACKS:
                got.extend((ack.request_id, ack.status) for ack in parse_acks(body))

        await f.system.outside.subscribe(hot(ghost), take)
        ids = {stream.request_id: fence, "never-heard-of": Fence(0, "x.y", 0)}
        batches = [ItemBatch(request_id, at, [Item(0, 0, 65, None)], 0, []) for request_id, at in ids.items()]
        f.system.outside.publish(hot(detok.ref), encode_hot(ITEMS, ghost, items_body(batches)))
        await f.system.clock.sleep(1.0)
        assert sorted(got) == sorted((request_id, "done") for request_id in ids)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_an_owner_drops_what_a_dead_edge_asked_for_before_anybody_else_has_it(tmp_path: Path) -> None:
    """R6. Scenario: prompts wait for a tokenizer; no detokenizer knows of these requests, nor will one."""

    async def scenario(f: Fleet) -> None:
        await f.system.start(add_edge(f))
        await f.system.clock.sleep(0.5)
        for number in range(2):
            await f.kill(f"tokenize-{number}", again_after_s=None)
        for number in range(4):
            submit(f, f"{number} {PROMPT}", 100)
        owners = [f.actor(f"admission-{number}") for number in range(2)]
        await f.system.until(lambda: sum(o.load()["running"] for o in owners) == 4, limit_s=1.0)
        await f.kill("edge-0", again_after_s=None)
        await f.system.until(lambda: all(o.load()["running"] == 0 for o in owners), limit_s=1.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_detokenizer_ends_what_a_dead_edge_asked_for_when_no_owner_is_left(tmp_path: Path) -> None:
    """R6. Scenario: the edge and both admission actors die; engines would compute for nobody until an owner is back."""

    async def scenario(f: Fleet) -> None:
        await f.system.start(add_edge(f))
        await f.system.clock.sleep(0.5)
        for number in range(4):
            submit(f, f"{number} {PROMPT}", 1000)
        await f.system.until(lambda: sum(e.load()["running"] for e in f.engines()) == 4, limit_s=2.0)
        for name in ("admission-0", "admission-1", "edge-0"):
            await f.kill(name, again_after_s=None)
        await f.system.until(lambda: not any(e.works for e in f.engines()), limit_s=1.0)

    simulate(scenario, tmp_path, prefill=0)
