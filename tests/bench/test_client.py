"""The load generator reads what servers write, whatever the boundaries of its pieces."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.client import LoadFailed, fetch_s, stream

pytestmark = pytest.mark.anyio


def event(data: object) -> bytes:
    """Return one server-sent event."""
    return b"data: " + (data.encode() if isinstance(data, str) else json.dumps(data).encode()) + b"\n\n"


def text(content: str) -> bytes:
    """Return one chunk with text."""
    return event({"choices": [{"index": 0, "delta": {"content": content}}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


async def served(status: str, body: bytes, piece: int) -> tuple[str, asyncio.Server]:
    """Serve one answer in chunked coding, cut into pieces of that size."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for at in range(0, len(body), piece):
            part = body[at : at + piece]
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", server


@pytest.mark.parametrize("piece", [1, 7, 100_000])
async def test_a_stream_is_timed_by_its_texts(piece: int) -> None:
    """Empty deltas and keepalives are no texts; the usage is the server's."""
    body = event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}) + b": keepalive\n\n"
    url, server = await served("200 OK", body + text("a") + text("b") + USAGE + event("[DONE]"), piece)

    timing = await stream(url, {})

    assert len(timing.chunks_at) == 2
    assert (timing.prompt_tokens, timing.completion_tokens) == (3, 2)
    assert timing.sent_at <= timing.chunks_at[0] <= timing.chunks_at[1] <= timing.ended_at
    server.close()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        ("503 Service Unavailable", b'{"error": {"message": "starting"}}', "starting"),
        ("200 OK", text("a") + event({"error": {"message": "broken"}, "choices": []}), "broken"),
        ("200 OK", text("a"), "without its end"),
    ],
)
async def test_a_failure_is_never_measured(status: str, body: bytes, said: str) -> None:
    """A refusal, an error in the stream, and a stream that just closes."""
    url, server = await served(status, body, 1000)

    with pytest.raises(LoadFailed, match=said):
        await stream(url, {})

    server.close()


async def test_a_page_is_timed_and_a_refusal_is_none() -> None:
    """What a server takes for an answer of its own is only told if there was one."""
    base, server = await served("200 OK", b"{}", 2)
    async with server:
        assert 0 < await fetch_s(base, "/health/live") < 60
    base, server = await served("503 Service Unavailable", b"{}", 2)
    async with server:
        with pytest.raises(LoadFailed, match="503"):
            await fetch_s(base, "/health/live")
