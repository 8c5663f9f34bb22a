"""Serves granted blocks to other hosts over TCP, from the mapped pool to the socket without a copy in this process.

(`sendfile` from the pool's file would do as well; from files in memory it was measured to be slower.)

One thread per connection, each with one request at a time: what is under way is bounded by `max_connections` and by the
system's socket buffers. A stranger gets a greeting and nothing else. The grant is looked at before the first byte,
between any two megabytes, and after the last one; `Status.LAPSED` tells the receiver to use nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from kvstore.errors import PoolGone
from kvstore.handoff import checksum
from kvstore.shm import AttachedPool, attach
from kvstore.transport import protocol as p
from kvstore.transport.base import runs
from kvstore.transport.grants import Grant, Grants

MAX_CONNECTIONS = 64
POLL_S = 0.25
GREETING_S = 2.0
STALL_S = 3.0  # a receiver that takes nothing for so long is cut off
IDLE_S = 120.0
GRANT_WAIT_S = 0.25  # a client may be faster than the word that its blocks are lent
SEND_NBYTES = 1 << 20  # between two looks at the grant


class _Over(Exception):
    """Raised when a connection is of no more use."""


class TcpServer:
    """Listens from `start` to `stop`.

    Args:
        grants: what may be had.
        key: what clients must prove to know.
        nonce: makes `protocol.NONCE_NBYTES` random bytes; called from any thread.
        host, port: where to listen; port 0 for a free one.
        max_connections: more are closed at once.
        place: says where a pool lies for NIXL, and what that has to know; absent where NIXL does not serve.
    """

    def __init__(
        self,
        grants: Grants,
        key: bytes,
        *,
        nonce: Callable[[], bytes],
        host: str,
        port: int = 0,
        max_connections: int = MAX_CONNECTIONS,
        place: Callable[[AttachedPool], tuple[int, bytes]] | None = None,
    ) -> None:
        self._grants, self._key, self._nonce = grants, key, nonce
        self._where = (host, port)
        self._max, self._place = max_connections, place
        self._socket: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._counts = dict.fromkeys("connections strangers turned_away requests served failed bytes read".split(), 0)

    def start(self) -> int:
        """Listen; returns the port.

        Raises:
            OSError: if the address cannot be had.
        """
        host, port = self._where
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=16)
        self._socket.settimeout(POLL_S)
        accepting = threading.Thread(target=self._accept, args=(self._socket,), name="kv-accept", daemon=True)
        self._accepting = accepting
        accepting.start()
        return int(self._socket.getsockname()[1])

    def stop(self) -> None:
        """Close every connection; returns when no thread serves any more."""
        self._stop.set()
        if self._socket is not None and self._accepting is not None:
            _shut(self._socket)  # ends a wait for the next client
            self._accepting.join(2 * STALL_S)
            self._socket.close()
        with self._lock:
            threads = dict(self._threads)
        for connection in threads.values():
            _shut(connection)
        for thread in threads:
            thread.join(2 * STALL_S)

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        counts = {f"{name}_total": float(count) for name, count in self._counts.items()}
        return {"open": len(self._threads), "grants": len(self._grants), **counts}

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    # --- connections ----------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                # That client has gone, or there is no descriptor for it: then it is no use to ask again at once.
                if self._stop.wait(POLL_S):
                    return
                continue
            with self._lock:
                if self._stop.is_set() or len(self._threads) >= self._max:
                    self._counts["turned_away"] += 1
                    connection.close()
                    continue
                self._counts["connections"] += 1
                thread = threading.Thread(target=self._run, args=(connection,), name="kv-serve", daemon=True)
                self._threads[thread] = connection
            thread.start()

    def _run(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(POLL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(connection)
            while True:
                head = self._read(connection, p.REQUEST_NBYTES, IDLE_S)
                body = self._read(connection, p.request_length(head), GREETING_S)
                self._count("requests")
                self._serve(connection, p.parse_request(body))
        except p.Malformed:
            self._count("strangers")
        except (OSError, _Over):
            pass  # the other side asks again elsewhere, or computes
        finally:
            _shut(connection)
            connection.close()
            with self._lock:
                del self._threads[threading.current_thread()]

    def _greet(self, connection: socket.socket) -> None:
        mine = self._nonce()
        theirs = p.parse_hello(self._read(connection, p.HELLO_NBYTES, GREETING_S))
        connection.sendall(p.hello(mine))
        said = self._read(connection, p.PROOF_NBYTES, GREETING_S)
        if not p.same(said, p.proof(self._key, b"client", theirs, mine)):
            raise p.Malformed("it does not know the key")
        connection.sendall(p.proof(self._key, b"server", theirs, mine))

    def _read(self, connection: socket.socket, nbytes: int, limit_s: float) -> bytes:
        out, waited = bytearray(), 0.0
        while len(out) < nbytes:
            try:
                data = connection.recv(nbytes - len(out))
            except TimeoutError:
                waited += POLL_S
                if self._stop.is_set() or waited >= limit_s:
                    raise _Over from None
                continue
            if not data:
                raise _Over
            out += data
        return bytes(out)

    # --- requests -------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket, request: p.Request) -> None:
        status = p.Status.UNKNOWN
        grant = self._grants.wait(request.ticket, GRANT_WAIT_S)
        if grant is not None:
            status = self._granted(connection, request, grant)
        connection.sendall(p.end_head(status))
        self._count("served" if status is p.Status.OK else "failed")

    def _granted(self, connection: socket.socket, request: p.Request, grant: Grant) -> p.Status:
        pool = grant.pool
        named = (pool.epoch, pool.layout, pool.block_nbytes)
        if named != (request.epoch, request.layout, request.block_nbytes):
            return p.Status.STALE
        if not grant.covers(request.indices, request.generations):
            return p.Status.STALE
        if (max(request.indices) + 1) * pool.block_nbytes > pool.nbytes:
            return p.Status.BAD
        try:
            memory = attach(pool)
        except PoolGone:
            return p.Status.GONE
        if request.via:
            return self._tell(connection, request, grant, memory)
        return self._send(connection, request, grant, memory)

    def _tell(self, connection: socket.socket, request: p.Request, grant: Grant, memory: AttachedPool) -> p.Status:
        """Answer one who reads by another way: where, before; whether the lease holds, afterwards."""
        if request.via != p.CHECK:
            if self._place is None:
                return p.Status.BAD
            address, metadata = self._place(memory)
            view, size = memory.view(), request.block_nbytes
            sums = [checksum(view[i * size : (i + 1) * size]) for i in request.indices] if request.sums else []
            connection.sendall(p.place_head(address, len(metadata)) + metadata + p.sums_bytes(sums))
        holds = self._grants.holds(request.ticket, grant) and memory.present()
        if request.via == p.CHECK and holds:
            self._count("read", len(request.indices) * request.block_nbytes)
        return p.Status.OK if holds else p.Status.LAPSED

    def _send(self, connection: socket.socket, request: p.Request, grant: Grant, memory: AttachedPool) -> p.Status:
        size, view = request.block_nbytes, memory.view()
        for first, count in runs(request.indices, max(1, p.CHUNK_NBYTES // size)):
            if not self._grants.holds(request.ticket, grant) or not memory.present():
                return p.Status.LAPSED
            at, nbytes = request.indices[first] * size, count * size
            head = p.data_head(count, nbytes)
            if request.sums:
                head += p.sums_bytes([checksum(view[at + i * size : at + (i + 1) * size]) for i in range(count)])
            connection.sendall(head, socket.MSG_MORE)
            self._send_blocks(connection, view[at : at + nbytes], request.ticket, grant)
            self._count("bytes", nbytes)
        return p.Status.OK if self._grants.holds(request.ticket, grant) else p.Status.LAPSED

    def _send_blocks(self, connection: socket.socket, blocks: memoryview, ticket: str, grant: Grant) -> None:
        sent, waited = 0, 0.0
        while sent < len(blocks):
            try:
                count = connection.send(blocks[sent : sent + SEND_NBYTES])
            except TimeoutError:
                count, waited = 0, waited + POLL_S
                if self._stop.is_set() or waited >= STALL_S:
                    raise _Over from None
            if not self._grants.holds(ticket, grant):
                raise _Over  # in the middle of a block only a cut says so
            if count:
                sent, waited = sent + count, 0.0


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is shut already
