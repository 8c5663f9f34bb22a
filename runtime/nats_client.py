"""nats-py's client with its sharp edges covered; what it does wrong and how is tested in `test_nats_traps`.

Touches private parts of nats-py, which is why its version is pinned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.errors import Error, StaleConnectionError

from runtime.bus import BusMessage
from runtime.pending import Pending
from runtime.wire import decode_headers

_log = logging.getLogger("headrace.bus")

# After anything else a reconnect helps, also after "maximum payload violation": a reloaded server enforces a new
# limit on open connections without announcing it, and the next connect reads it.
FATAL = ("authorization violation", "authentication", "account")


class HeadraceClient(Client):
    """Hands messages straight to our queues, so that no code of ours runs inside the read loop."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self.routes: dict[int, Pending] = {}
        self.connected_since = 0.0
        self.server_errors = 0
        self.malformed = 0
        self.received = 0

    @property
    def up(self) -> bool:
        """Whether what is written now goes to a live connection."""
        return bool(self._status == Client.CONNECTED)

    @property
    def loops_alive(self) -> bool:
        """Whether the tasks that read, ping and flush still run; a dead one leaves the client deaf but CONNECTED."""
        reading, ping, flusher = self._reading_task, self._ping_interval_task, self._flusher_task
        if reading is None or ping is None or flusher is None:
            return False
        return not (reading.done() or ping.done() or flusher.done())  # asked for at every heartbeat

    @property
    def stuck(self) -> bool:
        """Whether the connection is down and nobody is bringing it back."""
        if self._status in (Client.CONNECTED, Client.CLOSED):
            return False
        return self._reconnection_task is None or bool(self._reconnection_task.done())

    def reconnect_again(self) -> None:
        """Start a reconnect that has died: a cancelled wait on the old transport's end kills the next one too."""
        self._status = Client.RECONNECTING
        self._ps.reset()
        self._reconnection_task = asyncio.get_running_loop().create_task(self._attempt_reconnect())

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.received += 1
        pending = self.routes.get(sid)
        if pending is None:
            return
        try:
            if headers:
                status, fields = decode_headers(headers)
                gone = status == "503" and not data
                message = BusMessage(subject.decode(), data, reply.decode(), fields or None, gone)
            else:
                message = BusMessage(subject.decode(), data, reply.decode())
        except ValueError:
            # A subject that is not UTF-8 would end the read loop.
            self.malformed += 1
            return
        pending.offer(message)

    async def _process_err(self, err_msg: str) -> None:
        # nats-py closes for good on any -ERR that it does not know, such as the one of a server shutting down.
        text = err_msg.strip("'")
        self.server_errors += 1
        if "permissions violation" in text:
            await self._error_cb(Error(f"nats: {text}"))
        elif any(word in text for word in FATAL):
            await super()._process_err(err_msg)
        else:
            await self._error_cb(Error(f"nats: {text}"))
            await self._process_op_err(StaleConnectionError())

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # A reloaded server announces new limits to connections that stay open; nats-py reads them at connect only.
        self._max_payload = int(info.get("max_payload", self._max_payload))
        await super()._process_info(info, initial_connection)

    async def _process_connect_init(self) -> None:
        await super()._process_connect_init()
        self.connected_since = self._now()

    async def _connect_to_server(self, s: Any) -> None:
        # nats-py forgets the socket of a handshake that failed instead of closing it.
        if self._transport is not None and self._transport:
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    def take_commands(self) -> list[bytes]:
        """Take nats-py's own unsent commands, so that ours keep their place behind them."""
        commands, self._pending = self._pending, []
        self._pending_data_size = 0
        return commands

    def write_now(self, data: bytes) -> int:
        """Write to the socket; returns how many bytes the kernel has not taken yet."""
        assert self._transport is not None
        writer = self._transport._io_writer  # type: ignore[attr-defined]
        writer.write(data)
        return int(writer.transport.get_write_buffer_size())

    async def wait_writable(self) -> None:
        """Wait until the socket takes more."""
        if self._transport is not None:
            await self._transport.drain()  # type: ignore[no-untyped-call]

    async def send_unsubscribe(self, sid: int) -> None:
        """Withdraw interest at the server, and keep what has come already."""
        await self._send_unsubscribe(sid)
        self._subs.pop(sid, None)

    def next_sid(self) -> int:
        """Return the id that the next subscription gets."""
        return self._sid + 1
