"""The two routes that make text: one request from its body to the last byte of its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge.exchange import Exchange, OpenRequest
from edge.inflight import Delta
from edge.metrics import EdgeMetrics
from edge.openai_shapes import Shape
from edge.reading import ClientLeft, ReaderStalled, check_content, read_body, read_terms
from edge.stream import write_stream
from runtime.actor import Context
from schemas.errors import SlowReader
from schemas.openai import load_json, parse_request
from schemas.tenants import tenant_of

MAX_UNKNOWN_LOGGED = 256
ABORT = "headrace.abort"  # extension of a scope: ends the connection at once


@dataclass(frozen=True, slots=True)
class Limits:
    """What the HTTP side allows."""

    max_body: int = 8 * 1024 * 1024
    body_limit_s: float = 30.0
    default_deadline_s: float = 600.0
    keepalive_s: float = 10.0
    slow_reader_s: float = 30.0  # how long a client may take nothing of what waits for it
    tenant_header: str = ""  # which header names the tenant; empty: all requests have the same one


@dataclass(slots=True)
class Generate:
    """An ASGI endpoint for one API; raises what went wrong as long as nothing was sent."""

    api: Literal["chat", "completion"]
    context: Context
    exchange: Exchange
    metrics: EdgeMetrics
    models: Collection[str]
    limits: Limits
    ready: Callable[[float], Awaitable[None]]  # once requests can be served, or raises; within seconds
    unknown_logged: set[str] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            await self._answer(scope, receive, send)
        except ReaderStalled:
            self.metrics.slow_readers.inc()
            # What it did not take would keep the connection for ever, if it was only closed.
            connection = scope.get("extensions", {}).get(ABORT)
            if connection is not None:
                connection["abort"]()
        except ClientLeft:
            self.metrics.disconnects.inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_at = self.context.clock.now()
        headers, limits = Headers(scope=scope), self.limits
        check_content(headers, limits.max_body)
        data = await read_body(receive, max_body=limits.max_body, limit_s=limits.body_limit_s)
        body = load_json(data)
        parsed = parse_request(self.api, body, models=self.models)
        terms = read_terms(headers, parsed, limits.default_deadline_s)
        tenant = tenant_of(headers, limits.tenant_header)
        self._log_unknown(parsed.unknown_fields)
        await self.ready(terms.deadline_s - (self.context.clock.now() - received_at))
        request = self.exchange.open(
            parsed,
            body,
            received_at=received_at,
            deadline_s=terms.deadline_s,
            request_class=terms.request_class,
            tenant=tenant,
            traceparent=terms.traceparent or self.context.telemetry.new_traceparent(),
        )
        watcher = self.context.spawn(self._watch(receive, request), name=f"edge-watch-{request.id}")
        try:
            shape = Shape(self.api, request.id, request.created, parsed.model)
            if parsed.stream:
                await write_stream(
                    request, shape, self.exchange, self.metrics, self.context.clock, send,
                    keepalive_s=limits.keepalive_s, slow_reader_s=limits.slow_reader_s,
                )  # fmt: skip
            else:
                response = await self._whole(request, shape)
                await response(scope, receive, send)
        except ReaderStalled:
            self.exchange.close(request, reason=SlowReader.default_code or "")
            raise
        finally:
            watcher.cancel()
            self.exchange.close(request)
        if request.left and not request.inflight.usage:
            raise ClientLeft

    async def _watch(self, receive: Receive, request: OpenRequest) -> None:
        """Wait for the client to leave, streamed or not."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                request.left = True
                request.wake()
                return

    async def _whole(self, request: OpenRequest, shape: Shape) -> Response:
        """Collect an answer.

        Raises:
            HeadraceError: if the request failed.
            ClientLeft: if the client left first.
        """
        inflight = request.inflight
        texts: list[list[str]] = [[] for _ in range(request.parsed.num_choices)]
        reasons = [""] * request.parsed.num_choices
        while True:
            for event in inflight.take():
                if isinstance(event, Delta):
                    texts[event.choice].append(event.text)
                else:
                    reasons[event.choice] = event.reason
            self.exchange.taken(request)
            if request.left:
                raise ClientLeft
            if inflight.ended:
                break
            await request.wait(60.0)
        if inflight.error is not None:
            raise inflight.error
        assert inflight.usage is not None
        whole = shape.whole(["".join(t) for t in texts], reasons, inflight.usage)
        return Response(orjson.dumps(whole), media_type="application/json")

    def _log_unknown(self, fields: tuple[str, ...]) -> None:
        for name in fields:
            if name not in self.unknown_logged and len(self.unknown_logged) < MAX_UNKNOWN_LOGGED:
                self.unknown_logged.add(name)
                self.context.telemetry.log.warning("unknown request field ignored", field=name, api=self.api)
