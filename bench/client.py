"""A load generator that costs little: raw HTTP/1.1 over asyncio streams, because it shares the cores it measures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


class LoadFailed(Exception):
    """Raised when a measured request does not end well; a benchmark of failures measures nothing."""


class Refused(LoadFailed):
    """Raised when a request is answered with another status than 200."""

    def __init__(self, status: int, retry_after_s: float | None, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Timing:
    """When the parts of one streamed answer came, in monotonic seconds."""

    sent_at: float
    chunks_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, where the server tells
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        """From sending to the first text."""
        return self.chunks_at[0] - self.sent_at

    @property
    def itl_s(self) -> list[float]:
        """Between one text and the next."""
        return [b - a for a, b in zip(self.chunks_at, self.chunks_at[1:], strict=False)]


class _Body:
    """Undoes the chunked transfer coding, as bytes come."""

    def __init__(self, reader: asyncio.StreamReader, chunked: bool) -> None:
        self._reader = reader
        self._chunked = chunked

    async def read(self) -> bytes:
        """Return some bytes, none at the end."""
        if not self._chunked:
            return await self._reader.read(65_536)
        size = int((await self._reader.readline()).split(b";")[0], 16)
        data = await self._reader.readexactly(size + 2)
        return data[:-2]


async def stream(
    base: str,
    body: dict[str, Any],
    *,
    limit_s: float = 600.0,
    timing: Timing | None = None,
    headers: Mapping[str, str] | None = None,
) -> Timing:
    """Send one streamed chat request and time its parts.

    Args:
        base: URL of the server.
        body: of the request; made a streamed one with usage.
        limit_s: for the whole of it.
        timing: filled while the answer comes, for a caller that looks on.
        headers: more of them.

    Raises:
        Refused: if it is answered with another status than 200.
        LoadFailed: if it fails, or ends early.
    """
    url = urlsplit(base)
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        + "\r\n"
    )
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            timing = timing or Timing(0.0)
            timing.sent_at = time.monotonic()
            writer.write(head.encode() + payload)
            status = await reader.readline()
            answered = (await reader.readuntil(b"\r\n\r\n")).lower()
            answer = _Body(reader, b"transfer-encoding: chunked" in answered)
            if b" 200 " not in status:
                text = f"{status.decode().strip()}: {(await answer.read()).decode(errors='replace')[:300]}"
                raise Refused(int(status.split()[1]), _retry_after(answered), text)
            await _events(answer, timing)
            return timing
        finally:
            writer.close()


async def fetch_s(base: str, path: str, *, limit_s: float = 60.0) -> float:
    """Get a page on a connection of its own; returns the seconds from sending to the first byte of its body.

    Raises:
        LoadFailed: if it is refused.
    """
    url = urlsplit(base)
    head = f"GET {path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n\r\n"
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            sent_at = time.monotonic()
            writer.write(head.encode())
            status = await reader.readline()
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(65_536)
            took = time.monotonic() - sent_at
            if b" 200 " not in status:
                raise LoadFailed(f"{path}: {status.decode().strip()}")
            return took
        finally:
            writer.close()


def _retry_after(head: bytes) -> float | None:
    for line in head.split(b"\r\n"):
        if line.startswith(b"retry-after:"):
            return float(line.partition(b":")[2])
    return None


async def _events(body: _Body, timing: Timing) -> None:
    rest = b""
    while data := await body.read():
        now = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                timing.ended_at = now
                return
            chunk = json.loads(event)
            if "error" in chunk:
                raise LoadFailed(f"failed in the stream: {chunk['error']}")
            if chunk.get("usage"):
                timing.prompt_tokens = chunk["usage"]["prompt_tokens"]
                timing.completion_tokens = chunk["usage"]["completion_tokens"]
                details = chunk["usage"].get("prompt_tokens_details") or {}
                timing.cached_tokens = details.get("cached_tokens") or 0
            texts = [(c.get("delta") or {}).get("content") for c in chunk["choices"]]
            if any(texts):
                timing.chunks_at.append(now)
                timing.texts += [text for text in texts if text]
    raise LoadFailed("the stream closed without its end")
