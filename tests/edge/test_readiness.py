"""Ready means ready: what the health routes say, and what happens to requests meanwhile."""

from __future__ import annotations

import asyncio
import socket

import pytest

from edge.actor import EdgeActor
from edge.health import degraded, missing
from edge.server import AddressUnavailable
from runtime.membership import Member
from schemas.subjects import Ref
from tests.edge.sse import events
from tests.support.edge_peer import MODEL, Answer, DecodePresent, Reading, chat, edge_setup
from tests.support.memory_system import MemorySystem

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def member(kind: str, state: str = "ready", reason: str = "") -> Member:
    """Return a member of a kind."""
    return Member(Ref(kind, f"{kind}-0", "e"), "n", "h", 1, state, {}, 0.0, reason=reason)


def test_every_part_of_the_path_must_be_there() -> None:
    """One reason for each that is missing; a prefill engine is not needed, and `both` is a decode engine."""
    parts = [member("admission"), member("tokenize"), member("detokenize"), member("both")]

    assert missing(parts) == []
    assert missing([*parts[:3], member("decode")]) == []
    assert missing([*parts[:3], member("prefill")]) == ["no decode engine is running"]
    for absent in range(4):
        assert len(missing(parts[:absent] + parts[absent + 1 :])) == 1
    assert len(missing([])) == 4


def test_a_reason_names_the_state_or_the_failure() -> None:
    """A failed load says why, for as long as it lasts."""
    rest = [member("admission"), member("tokenize"), member("detokenize")]

    assert missing([*rest, member("decode", "starting")]) == ["no decode engine is ready: starting"]
    failed = missing([*rest, member("decode", "failed", "model file is truncated")])
    assert failed == ["no decode engine is ready: model file is truncated"]


def test_a_part_that_is_not_well_is_named() -> None:
    """A store whose disk is full still serves; whoever looks is told."""
    well = Member(Ref("kv", "kv-0", "e"), "n", "h", 1, "ready", {"unhealthy": ""}, 0.0)
    full = Member(Ref("kv", "kv-1", "e"), "n", "h", 1, "ready", {"unhealthy": "disk tier: full"}, 0.0)

    assert degraded([member("admission"), well]) == []
    assert degraded([full, well]) == ["kv kv-1: disk tier: full"]


async def test_nothing_but_liveness_is_promised_before_the_first_engine_is_ready() -> None:
    """Live at once; ready, models and chat say 503 with a time to come back; afterwards all serve."""
    async with edge_setup(engines=False) as s:
        assert (await s.http.get("/health/live")).status_code == 200
        for path in ("/health", "/health/ready", "/v1/models", "/v1/models/tiny"):
            response = await s.http.get(path)
            assert response.status_code == 503, path
            assert "retry-after" in response.headers and "decode engine" in response.json()["error"]["message"]
        refused = await s.http.post(CHAT, json=chat())
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
        assert (await s.http.post(CHAT, json=chat(temperature=9))).status_code == 400, "a bad request stays one"

        engine = s.system.node("engine")
        engine.add("decode", "decode-0", DecodePresent)
        await engine.start()
        await s.ready()

        assert (await s.http.get("/health/ready")).json() == {"status": "ready"}
        engine.actors[0].load = lambda: {"unhealthy": "no memory"}  # type: ignore[method-assign]
        await s.until(lambda: s.edge.degraded() == ["decode decode-0: no memory"])
        assert (await s.http.get("/health")).json() == {"status": "ready", "degraded": ["decode decode-0: no memory"]}
        assert (await s.http.post(CHAT, json=chat())).status_code == 200
        await s.system.kill(engine)
        await s.until(lambda: s.edge.not_ready() is not None)
        assert (await s.http.get("/health/ready")).status_code == 503
        assert (await s.http.get("/v1/models")).status_code == 200, "a model that was seen stays listed"


@pytest.mark.slow
async def test_a_lost_bus_makes_the_edge_not_ready() -> None:
    """503 while it is cut off, and back when it returns."""
    async with edge_setup() as s:
        buses = (s.edge_node.control, s.edge_node.stream)
        for bus in buses:
            bus.disconnect()  # type: ignore[attr-defined]
        await s.until(lambda: (p := s.edge.not_ready()) is not None and p.code == "bus_unavailable")
        response = await s.http.post(CHAT, json=chat())
        assert response.status_code == 503 and "retry-after" in response.headers

        for bus in buses:
            bus.reconnect()  # type: ignore[attr-defined]
        await s.until(lambda: s.edge.not_ready() is None, 10.0)
        assert (await s.http.post(CHAT, json=chat())).status_code == 200


async def test_a_draining_edge_finishes_its_streams_and_takes_nothing_new() -> None:
    """Readiness falls at once; what is open ends as if nothing had happened."""
    async with edge_setup(Answer(hold_at=1)) as s:
        reading = Reading(s, CHAT, chat(stream=True))
        await s.until(lambda: reading.num_events == 1)
        s.edge.drain()

        assert not s.edge.idle
        assert (await s.http.get("/health")).status_code == 503
        refused = await s.http.post(CHAT, json=chat())
        assert refused.status_code == 503 and "retry-after" in refused.headers
        s.peer.release()
        assert events(await reading.end())[-1] == "[DONE]"
        await s.until(lambda: s.edge.idle)


async def test_a_stop_in_mid_stream_is_one_error_event() -> None:
    """Nobody is left hanging when the edge has to go."""
    async with edge_setup(Answer(hold_at=1)) as s:
        reading = Reading(s, CHAT, chat(stream=True))
        await s.until(lambda: reading.num_events == 1)

        await s.edge.stop()
        body = await reading.end()

        assert events(body)[-1]["error"]["type"] == "service_unavailable"
        assert "[DONE]" not in body
        await s.until(lambda: s.peer.cancels)


async def test_a_busy_port_is_fatal_and_named() -> None:
    """The node does not start, and says which port it wanted."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with MemorySystem(strict=False) as system:
            node = system.node("edge")
            node.add("edge", "edge-0", lambda c: EdgeActor(c, models=[MODEL], port=port))

            with pytest.raises(AddressUnavailable, match=f"127.0.0.1:{port}"):
                await node.start()

            assert node.actors[0].state == "failed"
            assert str(port) in node.actors[0].reason


async def test_a_host_that_does_not_exist_is_fatal_and_named() -> None:
    """So is an address that cannot be resolved."""
    async with MemorySystem(strict=False) as system:
        node = system.node("edge")
        node.add("edge", "edge-0", lambda c: EdgeActor(c, models=[MODEL], host="256.0.0.1", port=0))

        with pytest.raises(AddressUnavailable, match="256.0.0.1"):
            await node.start()


async def test_the_port_is_free_again_after_a_stop() -> None:
    """Nothing of the server is left: no task, no socket."""
    before = len(asyncio.all_tasks())
    async with edge_setup() as s:
        _, port = s.edge.address or ("", 0)
        await s.http.post(CHAT, json=chat())
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
    assert len(asyncio.all_tasks()) <= before
