"""Clients that leave by the hundred, at once, or under one name: everything comes back, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from typing import Any

import httpx
import pytest

from chaos.probe import Probe, parse
from tests.system.cases import Alive, assert_drained
from tests.system.launch import System, wait_until

pytestmark = pytest.mark.slow

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"


def request(system_model: str, text: str, **options: Any) -> bytes:
    """Return a whole request as bytes."""
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": system_model, "messages": messages, "max_tokens": 60, **options}).encode()
    return f"{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body


async def leave(port: int, data: bytes, how: str, draw: random.Random) -> None:
    """Send a request, and close at the moment that `how` names."""
    raw = socket.socket()
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=raw)
    try:
        if how == "before the body":
            writer.write(data[: data.index(b"\r\n\r\n") + 4 + draw.randrange(5)])
            await writer.drain()
            return
        writer.write(data)
        await writer.drain()
        match how:
            case "after the body":
                pass
            case "before the first byte":
                await asyncio.sleep(draw.random() * 0.03)
            case "after some" | "reset":
                for _ in range(draw.randrange(1, 12)):
                    part = await reader.read(400)
                    if not part or b"[DONE]" in part or b'"usage"' in part:
                        break
            case "after the last":
                text = b""
                while b"[DONE]" not in text and b'"usage"' not in text:
                    text += await reader.read(65536) or b"[DONE]"
        if how == "reset":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        writer.close()


async def counts(system: System) -> dict[str, float]:
    """What could grow: tasks and subscriptions of every node, and file handles of every process."""
    nats = await system.address.connect("test-counts")
    try:
        probe = Probe(nats)
        await probe.start()
        nodes = {row["node"] for row in await asyncio.to_thread(system.rows)}
        found = parse("".join((await probe.texts(nodes, timeout_s=5.0)).values()))
    finally:
        await nats.close()
    out = {"subscriptions": sum(v for (name, _), v in found.items() if name == "headrace_bus_subscriptions")}
    out["left"] = sum(v for (name, _), v in found.items() if name == "headrace_http_disconnects_total")
    out["tasks"] = sum(v for (name, _), v in found.items() if name == "headrace_tasks_running")
    out["handles"] = sum(p.num_fds() for p in system.processes() if p.name() != "nats-server")
    return out


def test_a_storm_of_cancels_leaves_nothing_behind(split: System) -> None:
    """Five hundred requests closed at any moment, half of them streamed; what could grow is counted at 100 and 500."""
    alive, draw, model = Alive(split), random.Random(5), split.model
    hows = ("before the body", "after the body", "before the first byte", "after some", "reset", "after the last")

    async def storm(first: int, last: int) -> None:
        async def worker(numbers: list[int]) -> None:
            for number in numbers:
                limit = 4 if hows[number % len(hows)] == "after the last" else 60
                data = request(model, f"storm {number}", stream=number % 4 < 2, max_tokens=limit)
                await leave(split.port_base, data, hows[number % len(hows)], draw)

        await asyncio.gather(*(worker(list(range(first + w, last, 25))) for w in range(25)))

    before = asyncio.run(counts(split))
    asyncio.run(storm(0, 100))
    assert_drained(split)
    at_100 = asyncio.run(counts(split))
    asyncio.run(storm(100, 500))
    began = time.monotonic()
    response = split.chat("CASE-ALIVE")
    took = time.monotonic() - began
    assert response.status_code == 200 and took < 3.0
    assert_drained(split)
    at_500 = asyncio.run(counts(split))

    assert at_500["subscriptions"] == at_100["subscriptions"]
    assert at_500["tasks"] <= at_100["tasks"] + 4
    assert at_500["handles"] <= at_100["handles"] + 8
    finished = sum(hows[n % 6] == "after the last" for n in range(500))
    left = at_500["left"] - before["left"]
    # One that leaves at its last token may have been answered already; nobody who stayed is counted as one who left.
    assert 0.6 * (500 - finished) <= left <= 500 - finished
    alive.check()


def test_gauges_are_at_rest_after_everyone_has_left_at_once(split: System) -> None:
    """Thirty streams close within a moment, nothing follows: two seconds later no gauge says that anything is held."""
    assert_drained(split)

    def gauges() -> dict[str, float]:
        page = parse(httpx.get(split.url + "/metrics", timeout=10.0).text)
        return {
            f"{name} {actor}": value for (name, actor), value in page.items()
            if value and name.removeprefix("headrace_").partition("_")[0] in ("decode", "prefill", "both")
            and name.endswith(("_running", "_waiting", "_expected", "_blocks_in_use", "_in_use", "_requests"))
        }  # fmt: skip

    async def all_leave(model: str) -> None:
        writers = []
        for number in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", split.port_base)
            writer.write(request(model, f"gauges {number}", stream=True, max_tokens=2000))
            writers.append((reader, writer))
        for reader, _ in writers:
            await reader.readuntil(b"content\":\"")
        for _, writer in writers:
            writer.transport.abort()

    asyncio.run(all_leave(split.model))
    wait_until(lambda: not gauges(), limit_s=2.5, what="gauges at rest")
    for _ in range(5):
        assert gauges() == {}
    page = parse(httpx.get(split.url + "/metrics", timeout=10.0).text)
    assert page["headrace_edge_requests_in_flight", "edge"] == 0.0


def test_requests_under_one_id_are_strangers_to_each_other(split: System) -> None:
    """Two streams under one id, again right after a disconnect, and ids that nothing should be made of."""

    async def ask(http: httpx.AsyncClient, name: bytes, text: str, **options: Any) -> httpx.Response:
        body = {"model": split.model, "messages": [{"role": "user", "content": text}], "max_tokens": 30, **options}
        return await http.post(
            "/v1/chat/completions", json=body | {"temperature": 0.0}, headers=[(b"x-request-id", name)]
        )

    async def run() -> None:
        async with split.address.client() as http:
            alone = [(await ask(http, b"", text)).json()["choices"][0]["message"]["content"] for text in ("One", "Two")]
            both = await asyncio.gather(ask(http, b"same", "One"), ask(http, b"same", "Two"))
            assert [r.json()["choices"][0]["message"]["content"] for r in both] == alone
            assert [r.headers["x-request-id"] for r in both] == ["same", "same"]
            assert both[0].json()["id"] != both[1].json()["id"]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.15):
                    await ask(http, b"same", "One", max_tokens=2000)
            again = await ask(http, b"same", "One")
            assert again.json()["choices"][0]["message"]["content"] == alone[0]
            for name in (b"a.b.*.>", b"a b", b"../../etc/passwd", b"%0d%0a", b"\xc3\xa9\xff", b"", b"x" * 200):
                answer = await ask(http, name, "One")
                assert answer.json()["choices"][0]["message"]["content"] == alone[0]
                shown = answer.headers.get("x-request-id")
                plain = 1 <= len(name) <= 128 and all(32 <= c < 127 for c in name)
                assert shown == (name.decode() if plain else None)
                assert not plain or name.decode() not in answer.json()["id"] or name == b"same"

    asyncio.run(run())
    for name in (b"x" * 1_000_000, b"a\r\nb: c\r\n d"):
        data = request(split.model, "One", max_tokens=2)
        data = data.replace(b"host: h\r\n", b"host: h\r\nconnection: close\r\nx-request-id: " + name + b"\r\n", 1)
        with socket.create_connection(("127.0.0.1", split.port_base), timeout=20.0) as raw:
            raw.settimeout(20.0)
            answer = b""
            try:
                raw.sendall(data)
                while part := raw.recv(65536):
                    answer += part
            except OSError:
                pass  # refused while it still came
        assert answer[:12] in (b"HTTP/1.1 200", b"HTTP/1.1 400", b"HTTP/1.1 431", b""), answer[:200]
        assert len(answer) < 5000
    assert_drained(split)
    assert split.status("/health") == 200
