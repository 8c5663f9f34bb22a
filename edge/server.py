"""The HTTP server inside a node's loop: uvicorn on a socket that was bound before anything else was promised."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edge.errors import error_response
from edge.generate import ABORT
from runtime.actor import Context
from schemas.errors import BadRequest

BACKLOG = 2048
KEEP_ALIVE_S = 75
SHUTDOWN_S = 5


class AddressUnavailable(OSError):
    """Raised when the edge cannot listen on its address; fatal for its node."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}")
        self.host, self.port, self.reason = host, port, reason


class _Joined:
    """A transport on which the head of an answer leaves together with what follows it in the same turn of the loop.

    A client that gets them apart is woken twice, the first time for nothing.
    """

    def __init__(self, inner: asyncio.Transport) -> None:
        self._inner = inner
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        """Write, or keep a head until this turn is over."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            asyncio.get_running_loop().call_soon(self.release)
            return
        self._inner.write(data)

    def release(self) -> None:
        """Write what is kept."""
        if self._head:
            data, self._head = self._head, b""
            self._inner.write(data)

    def close(self) -> None:
        """Close, after what is kept."""
        self.release()
        self._inner.close()


class _Protocol(HttpToolsProtocol):
    """Answers what is not even HTTP with the same envelope as everything else."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self.transport = _Joined(transport)  # type: ignore[assignment]

    def on_message_begin(self) -> None:
        """Let whoever answers end the connection."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request and close."""
        response = error_response(BadRequest("the request is not valid HTTP"), {"connection": "close"})
        head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(response.body))
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the node."""
        yield


class HttpServer:
    """Runs an ASGI application on one address."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._host, self._port = host, port
        config = uvicorn.Config(
            app, http=_Protocol, ws="none", lifespan="off", interface="asgi3", log_config=None, log_level="warning",
            access_log=False, server_header=False, proxy_headers=False, backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=SHUTDOWN_S,
        )  # fmt: skip
        self._server = _Uvicorn(config)
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on; the port is the real one when 0 was asked for."""
        if self._socket is None:
            return self._host, self._port
        name = self._socket.getsockname()
        return str(name[0]), int(name[1])

    async def start(self, context: Context) -> None:
        """Bind, listen and serve.

        Raises:
            AddressUnavailable: if the address is in use, not ours, or not resolvable.
        """
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (socket.gaierror, UnicodeError) as exc:
            raise AddressUnavailable(self._host, self._port, str(exc)) from exc
        family, kind, proto, _, address = found[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as exc:
            listener.close()
            raise AddressUnavailable(self._host, self._port, exc.strerror or str(exc)) from exc
        self._socket = listener
        self._task = context.spawn(self._server.serve(sockets=[listener]), name="edge-http")
        # One turn of its loop, so that the port answers once this returns.
        while not self._server.started and not self._task.done():
            await context.clock.sleep(0.005)

    async def stop(self) -> None:
        """Finish what is being answered, within a few seconds, and close."""
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
