"""Server-sent events: bytes of events, and the loop that writes one answer as a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import Message, Send

from edge.exchange import Exchange, OpenRequest
from edge.metrics import EdgeMetrics
from edge.openai_shapes import Shape
from edge.reading import ReaderStalled
from runtime.clock import Clock
from schemas.errors import HeadraceError

KEEPALIVE = b": keepalive\n\n"
STALLED_S = 5.0  # a reader that takes nothing is given up so long after the deadline
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: dict[str, Any]) -> bytes:
    """Return one event. Characters that some readers take for line ends are written as escapes."""
    text = orjson.dumps(data)
    if b"\xe2\x80" in text:
        text = text.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029")
    if b"\xc2\x85" in text:
        text = text.replace(b"\xc2\x85", rb"\u0085")
    return b"data: " + text + b"\n\n"


async def write_stream(
    request: OpenRequest, shape: Shape, exchange: Exchange, metrics: EdgeMetrics, clock: Clock, send: Send,
    *, keepalive_s: float, slow_reader_s: float,
) -> None:  # fmt: skip
    """Write an answer as a stream.

    Nothing is sent before the first event, the end or one keepalive interval, so that an error which comes before is
    still a real status. An error after the first byte is one event, and the stream closes without `[DONE]`.

    Raises:
        HeadraceError: if the request failed and nothing has been sent.
        ReaderStalled: if the client takes nothing for `slow_reader_s`, or even after the deadline.
    """
    inflight = request.inflight
    started = False
    last_sent = clock.now()
    while not request.left:
        events = inflight.take()
        exchange.taken(request)
        shape.created = request.created
        out = [event(chunk) for chunk in shape.chunks(events)]
        if inflight.ended:
            if inflight.error is not None and not started and not out:
                raise inflight.error
            out += _ending(request, shape, metrics)
        elif not out and clock.now() - last_sent >= keepalive_s:
            out = [KEEPALIVE]
        if out:
            if not started:
                started = True
                head = {"type": "http.response.start", "status": 200, "headers": HEADERS}
                await _send(send, head, request, clock, slow_reader_s)
            last_sent = clock.now()
            over = inflight.ended
            body = {"type": "http.response.body", "body": b"".join(out), "more_body": not over}
            await _send(send, body, request, clock, slow_reader_s)
            if over:
                return
            # More may have come while a slow reader made the write wait.
            if inflight.has_events or inflight.ended:
                continue
        await request.wait(max(0.001, last_sent + keepalive_s - clock.now()))


async def _send(send: Send, message: Message, request: OpenRequest, clock: Clock, slow_reader_s: float) -> None:
    limit_s = min(slow_reader_s, max(0.0, request.ends_at - clock.now()) + STALLED_S)
    try:
        async with asyncio.timeout(limit_s):
            await send(message)
    except TimeoutError as exc:
        raise ReaderStalled from exc


def _ending(request: OpenRequest, shape: Shape, metrics: EdgeMetrics) -> list[bytes]:
    inflight = request.inflight
    if inflight.error is not None:
        metrics.streams_failed.inc()
        return [failure(inflight.error)]
    assert inflight.usage is not None
    usage = [event(shape.usage_chunk(inflight.usage))] if request.parsed.include_usage else []
    return [*usage, DONE]


def failure(error: HeadraceError) -> bytes:
    """Return the event that tells of a failure in mid-stream."""
    return event(error.envelope())
