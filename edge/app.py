"""The HTTP routes, and the wall around them that turns every failure into the one envelope."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Protocol

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.errors import error_response, translate
from edge.exchange import Exchange
from edge.generate import Generate, Limits
from edge.metrics import EdgeMetrics, MetricsCollector
from edge.pins import PinRoutes
from edge.reading import echoed_request_id
from runtime.actor import Context
from schemas.errors import HeadraceError, InternalError, ModelNotFound, NotFound, Unavailable


class Health(Protocol):
    """What the routes ask about the state of the whole."""

    def not_ready(self) -> Unavailable | None:
        """Return why requests cannot be served now."""
        ...

    async def ready(self, limit_s: float) -> None:
        """Return once requests can be served; raise if that may not be soon."""
        ...

    def degraded(self) -> list[str]:
        """Return what does not work although requests are served."""
        ...

    @property
    def was_ready(self) -> bool:
        """Whether requests could be served at any time since the start."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes work with."""

    context: Context
    exchange: Exchange
    metrics: EdgeMetrics
    collector: MetricsCollector
    health: Health
    models: tuple[str, ...]
    limits: Limits
    pins: PinRoutes
    started: int  # Unix seconds


def create_app(parts: Parts) -> ASGIApp:
    """Return the ASGI application."""
    system = _System(parts)
    generate = {
        api: Generate(
            api, parts.context, parts.exchange, parts.metrics, parts.models, parts.limits, parts.health.ready
        )
        for api in ("chat", "completion")
    }  # fmt: skip
    router = Router(
        [
            Route("/v1/chat/completions", generate["chat"], methods=["POST"]),
            Route("/v1/completions", generate["completion"], methods=["POST"]),
            Route("/v1/models", system.models),
            Route("/v1/models/{model:path}", system.model),
            Route("/v1/kv/pins", parts.pins.collection, methods=["GET", "POST"]),
            Route("/v1/kv/pins/{pin}", parts.pins.delete, methods=["DELETE"]),
            Route("/health/live", system.live),
            Route("/health/ready", system.ready),
            Route("/health", system.ready),
            Route("/metrics", system.metrics),
            Route("/version", system.version),
        ],
        redirect_slashes=False,
        default=_no_route,
    )
    return Front(router, parts)


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound("there is no such route")


class _System:
    """The routes beside text generation."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def models(self, request: Request) -> Response:
        """List the models; 503 until one of them has answered."""
        self._check_seen()
        return _json({"object": "list", "data": [self._model(name) for name in self._parts.models]})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        name = request.path_params["model"]
        if name not in self._parts.models:
            raise ModelNotFound("this model does not exist", param="model")
        self._check_seen()
        return _json(self._model(name))

    def _check_seen(self) -> None:
        health = self._parts.health
        problem = health.not_ready()
        if problem is not None and not health.was_ready:
            raise problem

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._parts.started, "owned_by": "headrace"}

    async def live(self, request: Request) -> Response:
        """Say that this process answers."""
        return _json({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """Say whether requests can be served, and what does not work all the same."""
        problem = self._parts.health.not_ready()
        if problem is not None:
            raise problem
        degraded = self._parts.health.degraded()
        return _json({"status": "ready", **({"degraded": degraded} if degraded else {})})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of all nodes."""
        page = await self._parts.collector.page()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        """Return the version of the program."""
        try:
            version = metadata.version("headrace")
        except metadata.PackageNotFoundError:
            version = "unknown"
        return _json({"version": version})


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")


class Front:
    """Counts every request, echoes its id, and answers every failure with the envelope."""

    def __init__(self, app: ASGIApp, parts: Parts) -> None:
        self._app = app
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        request_id = echoed_request_id(_header(scope, b"x-request-id"))
        status = 0

        async def forward(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if request_id is not None:
                    message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        # The router raises its own errors, instead of answering them in plain text, only inside an application.
        scope["app"] = self
        try:
            await self._app(scope, receive, forward)
        except HTTPException as exc:
            allow = {"allow": exc.headers["Allow"]} if exc.headers and "Allow" in exc.headers else None
            await self._refuse(translate(exc, scope["path"]), scope, receive, forward, status, allow)
        except HeadraceError as exc:
            await self._refuse(exc, scope, receive, forward, status)
        except Exception as exc:
            self._parts.context.telemetry.log.error("a request failed unexpectedly", route=_route(scope), exc_info=exc)
            await self._refuse(InternalError("internal error"), scope, receive, forward, status)
        finally:
            # No status: the client left before any answer.
            self._parts.metrics.requests.labels(_route(scope), str(status or 499)).inc()

    async def _refuse(
        self,
        error: HeadraceError,
        scope: Scope,
        receive: Receive,
        send: Send,
        status: int,
        headers: dict[str, str] | None = None,
    ) -> None:
        if status:
            # The answer has begun: the server closes the connection, which the client sees as a broken answer.
            raise error
        if not _route(scope).startswith("/health"):
            self._parts.context.telemetry.log.info(
                "request refused",
                route=_route(scope),
                method=scope["method"],
                status=error.status,
                error=type(error).__name__,
                code=error.code,
                param=error.param,
            )
        await error_response(error, headers)(scope, receive, send)


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def _route(scope: Scope) -> str:
    route = scope.get("route")
    return str(route.path) if route is not None else "unmatched"
