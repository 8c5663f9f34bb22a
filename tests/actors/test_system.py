"""Whole instances in virtual time: real actors, scripted engines, a native client, and everything that may die."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import LAYOUT, MODEL, Fleet, Stream, answer, fleet

from edge.actor import EdgeActor
from edge.exchange import OpenRequest
from edge.inflight import HARD_LIMIT, Delta
from runtime.memory_bus import Faults
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas.openai import parse_request

PROMPT = "the water that turns the wheel comes down the headrace " * 4
LONG = PROMPT * 5  # about a thousand tokens: eight steps of prefill
COUNT = 60


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0, **layout: int) -> Any:
    """Run `scenario(fleet)` on a fresh instance."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, **layout) as f:
            return await scenario(f)

    return run_virtual(main, seed=seed)


def check(stream: Stream, prompt: str, count: int) -> None:
    """The stream is the undisturbed one: same text, one ending, right totals."""
    assert stream.error is None
    assert stream.text == answer(prompt, count)
    assert stream.finish == {0: "length"}
    assert stream.terminal is not None
    assert stream.terminal["usage"]["completion_tokens"] == count
    assert stream.terminal["usage"]["prompt_tokens"] == len(prompt)


def test_a_request_runs_through_all_hops_and_leaves_nothing(tmp_path: Path) -> None:
    """Admission, tokenize, prefill, transfer, decode, detokenize; afterwards nothing is held anywhere."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.end(stream)
        check(stream, PROMPT, COUNT)
        assert stream.accepted is not None
        await f.rest()
        assert f.actor("transfer-0").load()["running"] == 0

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 20])
@pytest.mark.parametrize("kind", ["decode", "prefill", "detokenize", "tokenize", "transfer", "kv"])
def test_the_text_is_the_same_when_a_node_is_killed(kind: str, after: int, tmp_path: Path) -> None:
    """SIGKILL of whoever serves the request, before its first item, just after it, and in mid-stream."""

    async def scenario(f: Fleet) -> None:
        streams = [await f.ask(LONG + str(i), max_tokens=COUNT) for i in range(3)]
        if after:
            await f.items(streams[0], after)
        else:
            await f.system.clock.sleep(0.11)
        await f.kill(f.serving(kind, streams[0]))
        for i, stream in enumerate(streams):
            await f.end(stream)
            check(stream, LONG + str(i), COUNT)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_kills_at_every_moment_of_a_request_change_nothing(tmp_path: Path) -> None:
    """Every 30 ms of a request's life each of the hops is killed once, hand-off and end included."""
    for tick in range(26):
        kind = ("decode", "prefill", "detokenize", "transfer")[tick % 4]
        directory = tmp_path / str(tick)
        directory.mkdir()

        async def scenario(f: Fleet, tick: int = tick, kind: str = kind) -> None:
            stream = await f.ask(LONG, max_tokens=20)
            await f.system.clock.sleep(0.03 * tick)
            await f.kill(f.serving(kind, stream))
            await f.end(stream)
            check(stream, LONG, 20)
            await f.rest(limit_s=5.0)

        simulate(scenario, directory, seed=tick)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 40])
@pytest.mark.parametrize("number", [0, 1])
def test_a_native_stream_survives_the_death_of_either_light_node(number: int, after: int, tmp_path: Path) -> None:
    """Owner and detokenizer of a request are on different nodes: whichever dies, the other carries it to its end."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.items(stream, after)
        await f.kill(f"light-{number}")
        await f.end(stream)
        check(stream, PROMPT, COUNT)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path, admission=0, tokenize=0, detokenize=0, light=2)


@pytest.mark.slow
def test_a_stream_longer_than_the_window_survives_its_detokenizer(tmp_path: Path) -> None:
    """Scenario: the client is further than the new detokenizer's first window reaches."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=600)
        await f.items(stream, 400)
        await f.kill(f.serving("detokenize", stream))
        before = f.system.clock.now()
        await f.items(stream, 420)
        assert f.system.clock.now() - before < 2.0
        await f.end(stream)
        check(stream, PROMPT, 600)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_frozen_decode_is_replaced_and_its_late_items_change_nothing(tmp_path: Path) -> None:
    """SIGSTOP in mid-stream, SIGCONT five seconds later: whatever it still sends is under a lower fence."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=400)
        await f.items(stream, 20)
        victim = f.serving("decode", stream)
        f.freeze(victim)
        before = f.system.clock.now()
        await f.items(stream, 40)
        gap = f.system.clock.now() - before
        await f.system.clock.sleep(5.0 - gap)
        f.thaw(victim)
        await f.end(stream)
        check(stream, PROMPT, 400)
        await f.rest(limit_s=5.0)
        assert gap < 4.0

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_twentieth_of_all_messages_may_be_lost(seed: int, tmp_path: Path) -> None:
    """Everything is repeated until it is answered: text and totals are right, and pools come back."""

    async def scenario(f: Fleet) -> None:
        f.system.broker.faults["outside"] = Faults()
        f.system.broker.default_faults = Faults(drop=0.05)
        streams = [await f.ask(PROMPT + str(i), max_tokens=COUNT) for i in range(6)]
        for i, stream in enumerate(streams):
            await f.end(stream)
            check(stream, PROMPT + str(i), COUNT)
        await f.rest(limit_s=15.0)

    simulate(scenario, tmp_path, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("away_s", [0.5, 3.0])
def test_a_bus_that_goes_away_and_comes_back_costs_nothing_but_time(away_s: float, tmp_path: Path) -> None:
    """All connections break in mid-stream and return: what was lost is repeated, and nobody is taken for dead."""

    async def scenario(f: Fleet) -> None:
        streams = [await f.ask(PROMPT + str(i), max_tokens=300) for i in range(3)]
        await f.items(streams[0], 30)
        buses = [f.system.outside, *(b for s in f.system._slots.values() for b in (s.control, s.stream))]
        for bus in buses:
            bus.disconnect()
        await f.system.clock.sleep(away_s)
        for bus in buses:
            bus.reconnect()
        for i, stream in enumerate(streams):
            await f.end(stream)
            check(stream, PROMPT + str(i), 300)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_no_transfer_is_done_twice_by_two_actors(tmp_path: Path) -> None:
    """Scenario: decode runs, its `Activated` is lost, the transfer actor dies: its successor must not copy again.

    It would write over what decode has added in the last block, or over blocks that serve another request by now.
    """

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(LONG, max_tokens=COUNT)
        await f.system.clock.sleep(0.08)
        for number in range(2):
            f.system.broker.partition(f"decode-{number}-control", "prefill-0-control")
        await f.items(stream, 5)
        await f.kill("transfer-0", again_after_s=0.1)
        await f.system.clock.sleep(0.7)
        f.system.broker.heal()
        await f.end(stream)
        check(stream, LONG, COUNT)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_blocks_of_a_failed_hand_off_wait_for_a_frozen_transfer_actor(tmp_path: Path) -> None:
    """R10. Scenario: a job is with a transfer actor that freezes; prefill gives the try up, the actor wakes and copies.

    Prefill's blocks must not be computed over until the actor says that it is done, although the try has failed.
    """

    async def scenario(f: Fleet) -> None:
        pool = f.actor("prefill-0").pool
        f.freeze("transfer-0")
        stream = await f.ask(LONG, max_tokens=COUNT)
        await f.system.clock.sleep(1.0)
        assert pool.num_quarantined == 0 and pool.in_use > 0
        await f.system.clock.sleep(2.0)
        assert pool.num_quarantined > 0
        f.thaw("transfer-0")
        await f.end(stream)
        check(stream, LONG, COUNT)
        await f.rest(limit_s=5.0)
        assert pool.num_quarantined == 0

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_several_choices_survive_a_kill(tmp_path: Path) -> None:
    """Choices share a prompt's blocks until they part; after the failover each goes on by itself."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=COUNT, n=3)
        await f.items(stream, 40)
        await f.kill(f.serving("decode", stream))
        await f.end(stream)
        assert ["".join(t) for t in stream.texts] == [answer(PROMPT, COUNT, choice=c) for c in range(3)]
        assert (stream.terminal or {})["usage"]["prompt_tokens"] == len(PROMPT)
        await f.rest()

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_stop_string_ends_decoding_within_a_step(tmp_path: Path) -> None:
    """The detokenizer finds it; the engine computes at most what was in flight."""

    async def scenario(f: Fleet) -> None:
        stop = answer(PROMPT, 30)[25:29]
        stream = await f.ask(PROMPT, max_tokens=500, stop=[stop])
        await f.end(stream)
        assert stream.text == answer(PROMPT, 500).split(stop)[0]
        assert stream.finish == {0: "stop"}
        await f.rest(limit_s=0.5)
        assert sum(a.stepped.steps for a in f.engines()) < 45

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_message_too_large_for_the_bus_ends_its_request_alone(tmp_path: Path) -> None:
    """A prompt of one character per token travels as text and not as ids: 413 at once, and neighbours go on."""

    async def scenario(f: Fleet) -> None:
        f.system.broker.max_payload = 24_000
        neighbour = await f.ask(PROMPT, max_tokens=100)
        await f.items(neighbour, 10)
        # A byte above 127 is an id of two bytes in a message.
        text = await f.ask(["\u0439" * 900] * 7, max_tokens=10)
        ids = await f.ask([[1] * 900] * 8, max_tokens=10)
        for refused in (text, ids):
            await f.system.until(lambda r=refused: r.terminal is not None, limit_s=3.0)
        assert text.error == "payload_too_large"
        await f.end(neighbour)
        check(neighbour, PROMPT, 100)
        await f.rest()

    simulate(scenario, tmp_path)


# --- through the edge -------------------------------------------------------------------------------


def add_edge(f: Fleet) -> Any:
    """A node with an edge that listens on no socket."""
    node = f.nodes["edge-0"] = f.system.node("edge-0")
    node.add("edge", "0", lambda context: EdgeActor(context, models=(MODEL,), listen=False))
    return node


def submit(f: Fleet, prompt: str, count: int, *, deadline_s: float = 60.0) -> OpenRequest:
    """What the HTTP side does with a body."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0}
    parsed = parse_request("completion", body, models=(MODEL,))
    edge = f.actor("edge-0")
    now = f.system.clock.now()
    request: OpenRequest = edge.exchange.open(
        parsed, body, received_at=now, deadline_s=deadline_s, request_class="interactive", traceparent=""
    )
    return request


async def read(f: Fleet, request: OpenRequest, *, until: int = 1 << 30) -> str:
    """Take text until so many items are there, or the end."""
    text = ""
    while not request.inflight.ended and sum(request.inflight.next) < until:
        await f.system.clock.sleep(0.01)
        text += "".join(e.text for e in request.inflight.take() if isinstance(e, Delta))
        f.actor("edge-0").exchange.taken(request)
    return text + "".join(e.text for e in request.inflight.take() if isinstance(e, Delta))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["admission", "detokenize", "decode"])
@pytest.mark.parametrize("after", [1, 40, 400])
def test_an_edges_stream_survives_its_servers(kind: str, after: int, tmp_path: Path) -> None:
    """Also when the new detokenizer begins far behind what the edge has, and when the owner dies."""

    async def scenario(f: Fleet) -> None:
        await f.system.start(add_edge(f))
        await f.system.clock.sleep(0.5)
        request = submit(f, PROMPT, 600)
        text = await read(f, request, until=after)
        victim = request.inflight.accepted.owner.id if request.inflight.accepted else "0"
        name = f"admission-{victim}"
        if kind != "admission":
            name = next(n for n in f.nodes if n.startswith(kind) and request.id in f.actor(n).load()["requests"])
        await f.kill(name)
        before = f.system.clock.now()
        text += await read(f, request, until=after + 20)
        assert f.system.clock.now() - before < 3.0
        text += await read(f, request)
        assert request.inflight.error is None
        assert text == answer(PROMPT, 600)
        f.actor("edge-0").exchange.close(request)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_streams_survive_a_storm(seed: int, tmp_path: Path) -> None:
    """One to three kills of any actors at moments of the seed's choosing, in some seeds with message loss besides."""
    draw = random.Random(seed)
    drop = draw.choice([0.0, 0.02])
    kinds = ["decode", "prefill", "detokenize", "transfer", "kv", "tokenize", "admission"]
    moments = sorted(draw.uniform(0.0, 1.2) for _ in range(draw.choice([1, 2, 3])))

    async def scenario(f: Fleet) -> None:
        await f.system.start(add_edge(f))
        await f.system.clock.sleep(0.5)
        f.system.broker.default_faults = Faults(drop=drop)
        prompts = [LONG[: draw.randrange(20, 1000)] + str(i) for i in range(4)]
        counts = [draw.randrange(1, 120) for _ in prompts]
        requests = [submit(f, p, n) for p, n in zip(prompts, counts, strict=True)]
        start = f.system.clock.now()
        readers = [f.system.clock.spawn(read(f, r), name="reader") for r in requests]
        for moment in moments:
            await f.system.clock.sleep(max(0.0, start + moment - f.system.clock.now()))
            kind = draw.choice(kinds)
            await f.kill(f"{kind}-{draw.randrange(LAYOUT[kind])}", again_after_s=draw.choice([0.1, 0.5, 1.0]))
        texts = [await reader for reader in readers]
        assert [r.inflight.error for r in requests] == [None] * 4
        assert texts == [answer(p, n) for p, n in zip(prompts, counts, strict=True)]
        assert f.system.clock.now() - start < 12.0
        for request in requests:
            f.actor("edge-0").exchange.close(request)
        await f.rest(limit_s=20.0 if drop else 8.0)

    simulate(scenario, tmp_path, seed=seed)


@pytest.mark.slow
def test_a_slow_reader_at_the_edge_holds_back_the_stream_and_loses_nothing(tmp_path: Path) -> None:
    """What waits for the reader is bounded; when it reads on everything comes."""

    async def scenario(f: Fleet) -> None:
        await f.system.start(add_edge(f))
        await f.system.clock.sleep(0.5)
        request = submit(f, PROMPT, 900)
        await f.system.clock.sleep(25.0)
        assert sum(request.inflight.next) <= HARD_LIMIT
        before = f.system.clock.now()
        assert await read(f, request) == answer(PROMPT, 900)
        assert f.system.clock.now() - before < 3.0

    simulate(scenario, tmp_path)


# --- cancels and deadlines in every phase -----------------------------------------------------------


@pytest.mark.slow
def test_a_cancel_at_any_moment_returns_everything(tmp_path: Path) -> None:
    """Every 10 ms of a request's life, through tokenizing, prefilling, transferring and decoding."""

    async def scenario(f: Fleet) -> None:
        for tick in range(1, 60):
            stream = await f.ask(f"{tick} {LONG}", max_tokens=400)
            await f.system.clock.sleep(0.01 * tick)
            before = sum(a.stepped.steps for a in f.engines())
            f.cancel(stream)
            await f.rest()
            assert sum(a.stepped.steps for a in f.engines()) - before <= 2

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_client_that_unsubscribes_is_noticed_in_every_phase(tmp_path: Path) -> None:
    """Frames and keepalives that nobody listens to end the work."""

    async def scenario(f: Fleet) -> None:
        for tick in (2, 15, 40):
            stream = await f.ask(f"{tick} {LONG}", max_tokens=2500)
            await f.system.clock.sleep(0.01 * tick)
            assert stream.terminal is None
            for member in list(f.system.outside._members):
                if member.pending.pattern == stream.inbox:
                    await member.unsubscribe()
            await f.rest(limit_s=6.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_deadline_in_any_phase_ends_with_one_terminal(tmp_path: Path) -> None:
    """No later than D + 1 s, and everything comes back."""

    async def scenario(f: Fleet) -> None:
        for ms in range(10, 900, 40):
            stream = await f.ask(f"{ms} {LONG}", max_tokens=2500, deadline_s=ms / 1000)
            await f.end(stream, limit_s=5.0)
            assert stream.error == "deadline_exceeded"
            assert stream.ended_at - stream.asked_at <= ms / 1000 + 1.0
            await f.rest(limit_s=3.0)
            assert stream.later_terminals == 0

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["detokenize", "decode", "prefill", "transfer"])
def test_a_deadline_holds_while_a_node_is_frozen(kind: str, tmp_path: Path) -> None:
    """The detokenizer ends at D; without it the owner at D + 0.3 s."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(LONG, max_tokens=2500, deadline_s=0.8)
        await f.system.clock.sleep(0.3)
        f.freeze(f.serving(kind, stream))
        await f.end(stream, limit_s=5.0)
        assert stream.error == "deadline_exceeded"
        assert stream.ended_at - stream.asked_at <= 1.8

    simulate(scenario, tmp_path)
