"""Nobody waits for a long prompt any more: its computation stops within a chunk, however the client was connected."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from chaos.probe import Probe
from tests.system.cases import Alive, assert_drained
from tests.system.launch import System

pytestmark = pytest.mark.slow

PROMPT = "long " * 1500  # almost four seconds of prefill at the script's pace
CHUNK = 512  # tokens that a step may compute, and more
LEAVE_S, AFTER_S = 0.6, 0.3


async def computed(system: System) -> float:
    """Tokens that all engines have computed so far."""
    nats = await system.address.connect("test-computed")
    try:
        probe = Probe(nats)
        await probe.start()
        found = await probe.ask({"prefill-0", "decode-0", "decode-1"}, timeout_s=5.0)
    finally:
        await nats.close()
    return sum(v for (name, _), v in found.items() if name == "headrace_engine_tokens_total")


async def proxy(port: int) -> asyncio.Server:
    """A plain TCP proxy: when its client closes, it closes towards the server."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    return await asyncio.start_server(serve, "127.0.0.1", 0)


@pytest.mark.parametrize("way", ["streamed", "whole", "proxied"])
def test_a_disconnect_while_a_prompt_is_computed_stops_it_within_a_chunk(split: System, way: str) -> None:
    """Most of the prompt is never computed, no block stays, and what was computed serves only as a valid prefix."""
    alive = Alive(split)
    body: dict[str, Any] = {"model": split.model, "max_tokens": 8, "temperature": 0.0, "stream": way == "streamed"}
    body["messages"] = [{"role": "user", "content": f"{way} {PROMPT}"}]

    async def run() -> float:
        before = await computed(split)
        relay = await proxy(split.port_base)
        port = relay.sockets[0].getsockname()[1] if way == "proxied" else split.port_base
        async with relay, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as http:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await http.post("/v1/chat/completions", json=body)
            left = await computed(split)
            await asyncio.sleep(AFTER_S)
            after = await computed(split)
            assert await computed(split) == after
        assert before < left < before + 6000, "it was being computed"
        return after - left

    assert asyncio.run(run()) <= CHUNK
    assert_drained(split)
    alive.check()


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_while_a_prompt_is_computed_stops_it_within_a_chunk(split: System, stream: bool) -> None:
    """Nothing was sent yet: the answer is a status with the envelope, and no hop goes on."""
    before = asyncio.run(computed(split))
    began = time.monotonic()
    response = split.chat(f"deadline {stream} {PROMPT}", max_tokens=8, deadline_ms=600, stream=stream)
    took = time.monotonic() - began
    assert response.status_code == 408 and response.json()["error"]["code"] == "deadline_exceeded"
    assert took < 3.0

    left = asyncio.run(computed(split))
    time.sleep(AFTER_S)
    assert asyncio.run(computed(split)) - left <= CHUNK
    assert left - before < 6000
    assert_drained(split)


def test_a_prompt_that_was_left_half_computed_gives_the_same_text_later(split: System) -> None:
    """What a cancelled try leaves in caches is right or not there."""
    text = "half " + PROMPT[:2000]
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            split.url + "/v1/chat/completions", timeout=0.5,
            json={"model": split.model, "messages": [{"role": "user", "content": text}], "max_tokens": 8},
        )  # fmt: skip
    assert_drained(split)
    salted = split.chat(text, cache_salt="fresh")
    assert split.chat(text).json()["choices"] == salted.json()["choices"]
