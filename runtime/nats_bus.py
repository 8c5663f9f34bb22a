"""The bus over NATS core: at most once, bounded, never stale."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.aio.subscription import Subscription as NatsSubscription

from runtime.bus import Handler
from runtime.clock import Clock
from runtime.nats_client import HeadraceClient
from runtime.pending import Pending
from runtime.requests import Requests
from runtime.wire import check_pattern, check_size, check_subject, encode_headers
from schemas.errors import BusUnavailable

_log = logging.getLogger("headrace.bus")

OUTBOX_NBYTES = 32 * 1024 * 1024
SOCKET_NBYTES = 1024 * 1024  # written but not taken by the kernel; beyond it the outbox waits
MAX_HEADS = 8192  # remembered protocol heads, one per subject
WATCHDOG_S = 1.0
CLOSE_S = 2.0


@dataclass(slots=True)
class _NatsSubscription:
    bus: NatsBus
    pending: Pending
    sid: int
    inner: NatsSubscription

    async def unsubscribe(self) -> None:
        """Deliver nothing from now on."""
        self.pending.close()
        self.bus._forget(self.sid)
        try:
            await self.inner.unsubscribe()
        except nats.errors.Error as exc:
            _log.debug("unsubscribe of %s: %r", self.pending.pattern, exc)


class NatsBus(Requests):
    """See `runtime.bus.Bus`; made by `NatsBus.connect`."""

    def __init__(self, clock: Clock, name: str, inbox_prefix: str, on_closed: Callable[[], None] | None) -> None:
        super().__init__(f"{inbox_prefix}.{clock.random_hex(8)}")
        self.name = name
        self.on_closed = on_closed
        self._clock = clock
        self._client = HeadraceClient(clock.now)
        self._heads: dict[str, bytes] = {}
        self._outbox: list[bytes] = []
        self._outbox_nbytes = 0
        self._flush_scheduled = False
        self._blocked = False
        self._closing = False
        self._last_error = ""
        self._again: tuple[str, dict[str, Any]] = (inbox_prefix, {})
        self._watchdog: asyncio.Task[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self._auth_failed: asyncio.Future[str] = self._loop.create_future()
        self._count = dict.fromkeys(
            ("published", "published_bytes", "dropped_disconnected", "dropped_outbox_full", "disconnects",
             "deaf_reconnects", "handler_errors", "dropped_pending", "handled", "bus_errors"), 0)  # fmt: skip

    # --- connecting ------------------------------------------------------------------------------------

    @classmethod
    async def connect(
        cls,
        urls: str | list[str],
        *,
        name: str,
        clock: Clock,
        token: str | None = None,
        user: str | None = None,
        password: str | None = None,
        creds: str | None = None,
        tls: ssl.SSLContext | None = None,
        tls_hostname: str | None = None,
        inbox_prefix: str = "_INBOX",
        connect_timeout_s: float = 5.0,
        on_closed: Callable[[], None] | None = None,
    ) -> NatsBus:
        """Connect; later it reconnects by itself for ever. `on_closed` is called if the client gives up for good.

        Raises:
            BusUnavailable: if no server accepts this connection within `connect_timeout_s`.
        """
        bus = cls(clock, name, inbox_prefix, on_closed)
        options: dict[str, Any] = {
            "servers": [urls] if isinstance(urls, str) else list(urls),
            "name": name,
            "token": token,
            "user": user,
            "password": password,
            "user_credentials": creds,
            "ping_interval": 5,
            "max_outstanding_pings": 2,
            "max_reconnect_attempts": -1,
            # The wait is fixed per connection; the jitter between connections spreads a fleet.
            "reconnect_time_wait": 0.1 + 0.15 * clock.random(),
            "connect_timeout": 2,
            "error_cb": bus._on_error,
            "disconnected_cb": bus._on_disconnected,
            "closed_cb": bus._on_closed,
        }
        if tls is not None:
            options["tls"] = tls
        if tls_hostname is not None:
            options["tls_hostname"] = tls_hostname
        bus._again = (inbox_prefix, options)
        await bus._connect(dict(options), connect_timeout_s)
        return bus

    async def sibling(
        self, name: str, clock: Clock, *, connect_timeout_s: float = 5.0, on_closed: Callable[[], None] | None = None
    ) -> NatsBus:
        """Return another connection to the same servers, owned by the calling event loop.

        Raises:
            BusUnavailable: if no server accepts it in time.
        """
        prefix, options = self._again
        bus = NatsBus(clock, name, prefix, on_closed)
        bus._again = self._again
        callbacks = {"error_cb": bus._on_error, "disconnected_cb": bus._on_disconnected, "closed_cb": bus._on_closed}
        await bus._connect({**options, **callbacks, "name": name}, connect_timeout_s)
        return bus

    async def _connect(self, options: dict[str, Any], timeout_s: float) -> None:
        # With endless reconnects nats-py's connect never returns either; the bound is ours.
        attempt = self._loop.create_task(self._client.connect(**options))
        waited: set[asyncio.Future[Any]] = {attempt, self._auth_failed}
        done, _ = await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if attempt not in done:
            self._closing = True
            attempt.cancel()
            await asyncio.wait({attempt}, timeout=1.0)
            await self._client.close()
            # A refused client may also see its connection reset; why it was refused is what helps.
            reason = self._auth_failed.result() if self._auth_failed.done() else self._last_error
            raise BusUnavailable(f"no NATS server at {_shown(options['servers'])}: {reason or 'no answer'}")
        try:
            attempt.result()
        except (nats.errors.Error, OSError, ValueError, ImportError) as exc:
            raise BusUnavailable(f"no NATS server at {_shown(options['servers'])}: {exc}") from exc
        self._watchdog = self._clock.spawn(self._watch(), name=f"bus-watchdog-{self.name}")

    async def _watch(self) -> None:
        """Reconnect when a loop of nats-py has died: the one that reads, or the one that reconnects."""
        while not self._closing:
            await self._clock.sleep(WATCHDOG_S)
            if self._client.stuck and not self._closing:
                self._count["deaf_reconnects"] += 1
                _log.error("the reconnect of connection %s has died; starting another", self.name)
                self._client.reconnect_again()
            elif self._client.up and not self._client.loops_alive and not self._closing:
                self._count["deaf_reconnects"] += 1
                _log.error("the read loop of connection %s has died; reconnecting", self.name)
                await self._client.force_reconnect()

    async def _on_error(self, error: Exception) -> None:
        # Whatever this raises would end nats-py's read loop.
        try:
            self._count["bus_errors"] += 1
            self._last_error = str(error) or repr(error)
            if "authorization" in self._last_error.lower() and not self._auth_failed.done():
                self._auth_failed.set_result(self._last_error)
            _log.warning("bus connection %s: %s", self.name, self._last_error)
        except Exception:
            pass

    async def _on_disconnected(self) -> None:
        # nats-py would send its buffer after the reconnect; by then it is stale.
        self._client.take_commands()
        self._drop_outbox()
        self._count["disconnects"] += 1

    async def _on_closed(self) -> None:
        self._drop_outbox()
        if not self._closing and self.on_closed is not None:
            self._loop.call_soon(self.on_closed)

    # --- state -----------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the connection is up and being read."""
        return self._client.up and self._client.loops_alive

    @property
    def max_payload(self) -> int:
        """Largest message in bytes, headers included."""
        return int(self._client.max_payload)

    @property
    def connected_since(self) -> float:
        """Monotonic time of the last (re)connect."""
        return self._client.connected_since

    @property
    def client_id(self) -> int | None:
        """The server's number of this connection; a reconnect changes it."""
        return self._client.client_id

    def statistics(self) -> dict[str, float]:
        """Counters since the connect."""
        out: dict[str, float] = dict(self._count)
        for pending in self._client.routes.values():
            out["handled"] += pending.handled
            out["handler_errors"] += pending.errors
            out["dropped_pending"] += pending.dropped
        out["received"] = self._client.received
        out["reconnects"] = self._client.stats["reconnects"]
        out["malformed"] = self._client.malformed
        out["outbox_bytes"] = self._outbox_nbytes
        out["pending"] = sum(len(p) for p in self._client.routes.values())
        out["subscriptions"] = len(self._client.routes)
        return out

    # --- publishing ------------------------------------------------------------------------------------

    def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Send without waiting; dropped and counted while disconnected or when the outbox is full.

        Raises:
            TooLarge: if payload and headers exceed `max_payload`; nothing is sent.
            ValueError: if the subject or a header is malformed.
        """
        head = self._heads.get(subject) or self._head(subject)
        size = len(payload)
        if reply:
            head = b"%b%b " % (head, check_subject(reply).encode())
        if headers:
            block = encode_headers(headers)
            size += len(block)
            command = b"H%b%d %d\r\n%b%b\r\n" % (head, len(block), size, block, payload)
        else:
            command = b"%b%d\r\n%b\r\n" % (head, size, payload)
        if size > self._client._max_payload:
            check_size(size, self.max_payload)
        if self._closing or not self._client.up:
            self._count["dropped_disconnected"] += 1
            return
        if self._outbox_nbytes + len(command) > OUTBOX_NBYTES:
            self._count["dropped_outbox_full"] += 1
            return
        self._outbox.append(command)
        self._outbox_nbytes += len(command)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_now)

    def push(self) -> None:
        """Write what was published so far; the turn's end finds nothing left to do."""
        if self._outbox:
            self._write_out()

    def _head(self, subject: str) -> bytes:
        head = f"PUB {check_subject(subject)} ".encode()
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        self._heads[subject] = head
        return head

    def _flush_now(self) -> None:
        self._flush_scheduled = False
        self._write_out()

    def _write_out(self) -> None:
        if self._blocked:
            return
        if not self._client.up:
            self._drop_outbox()
            return
        batch, self._outbox = self._outbox, []
        commands = self._client.take_commands()
        self._count["published"] += len(batch)
        self._count["published_bytes"] += self._outbox_nbytes
        self._outbox_nbytes = 0
        data = b"".join(commands + batch)
        unsent = self._client.write_now(data) if data else 0
        if unsent > SOCKET_NBYTES:
            self._blocked = True
            self._clock.spawn(self._unblock(), name=f"bus-flush-{self.name}")

    async def _unblock(self) -> None:
        try:
            await self._client.wait_writable()
        except (OSError, RuntimeError) as exc:
            _log.debug("bus connection %s while flushing: %r", self.name, exc)
        finally:
            self._blocked = False
            self._flush_now()

    def _drop_outbox(self) -> None:
        self._count["dropped_disconnected"] += len(self._outbox)
        self._outbox.clear()
        self._outbox_nbytes = 0

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until everything published so far has reached the server.

        Raises:
            BusUnavailable: if the server did not confirm in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._blocked:
                    await self._clock.sleep(0.001)
                # nats-py writes its PING at once, ahead of a SUB that still waits for its flusher.
                self._flush_now()
                await self._client.flush(timeout=max(0.001, timeout_s))  # type: ignore[arg-type]
        except (TimeoutError, nats.errors.Error, OSError) as exc:
            raise BusUnavailable(f"the bus did not confirm a flush within {timeout_s} s") from exc

    # --- subscribing -----------------------------------------------------------------------------------

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65_536
    ) -> _NatsSubscription:
        """Deliver messages on `subject` to `handler` from the event loop.

        Raises:
            ValueError: if the subject or queue group is malformed.
            BusUnavailable: if this connection is closed.
        """
        check_pattern(subject, queue)
        pending = Pending(subject, queue, handler, max_pending)
        sid = self._client.next_sid()
        self._client.routes[sid] = pending
        try:
            # A future instead of a callback: nats-py then starts no task of its own for the subscription.
            inner = await self._client.subscribe(subject, queue=queue, future=self._loop.create_future())
        except nats.errors.Error as exc:
            del self._client.routes[sid]
            raise BusUnavailable(f"cannot subscribe to {subject}: {exc}") from exc
        assert inner._id == sid
        return _NatsSubscription(self, pending, sid, inner)

    def _forget(self, sid: int) -> None:
        pending = self._client.routes.pop(sid, None)
        if pending is not None:
            self._count["handled"] += pending.handled
            self._count["handler_errors"] += pending.errors
            self._count["dropped_pending"] += pending.dropped

    # --- leaving ---------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> int:
        """Withdraw all interest, let what has come be handled, flush, close; returns how many were left unhandled."""
        end = self._clock.now() + timeout_s
        if self._client.up:
            try:
                for sid in list(self._client.routes):
                    await self._client.send_unsubscribe(sid)
                # The answer comes behind everything that the server had sent before.
                await self.flush(max(0.001, end - self._clock.now()))
            except (BusUnavailable, nats.errors.Error, OSError) as exc:
                _log.warning("draining connection %s: %r", self.name, exc)
        while (left := sum(len(p) for p in self._client.routes.values())) and self._clock.now() < end:
            await self._clock.sleep(0.001)
        if left:
            _log.error("draining connection %s: %d messages left unhandled", self.name, left)
        await self.close()
        return left

    async def close(self) -> None:
        """Send what is in the outbox, as far as the socket takes it now, and close."""
        if self._closing:
            return
        self._flush_now()
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        for sid in list(self._client.routes):
            self._client.routes[sid].close()
            self._forget(sid)
        # In a task of its own: nats-py can raise a CancelledError here that nobody asked for, when it has cancelled
        # a reconnect that waited on the same transport.
        closing = self._loop.create_task(self._client.close())
        await asyncio.wait({closing}, timeout=CLOSE_S)
        if not closing.done():
            closing.cancel()
        elif not closing.cancelled() and (error := closing.exception()) is not None:
            _log.warning("closing connection %s: %r", self.name, error)


def _shown(urls: list[str]) -> str:
    """Return the URLs without what stands before an `@`."""
    return ", ".join(url.split("//")[0] + "//" + url.rsplit("@", 1)[-1] if "@" in url else url for url in urls)
