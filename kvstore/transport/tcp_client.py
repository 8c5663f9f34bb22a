"""Fetches blocks from another host over TCP, from the socket into the destination without a copy in between.

A fetch is divided over several connections. Each receives into its own blocks and takes their checksums while they are
in the processor's cache. The first fault ends all of them, and a connection with a fault is closed, since nothing tells
where its next answer would begin.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.errors import KvError, PeerFailed, TransferAborted, TransferCorrupt
from kvstore.handoff import Memory, checksum
from kvstore.transport import protocol as p
from kvstore.transport.base import PeerAddress, Wanted, check, runs
from schemas.messages import BlockRef
from schemas.settings import split_address

CONNECTIONS = 4  # of one fetch
MAX_THREADS = 8  # of all fetches of a transport, besides those that ask for them
STRIPE_NBYTES = 2 << 20  # smaller parts are not worth a connection
PIECE_NBYTES = 1 << 20  # received, then verified
POLL_S = 0.05
CONNECT_S = 1.0
STALL_S = 1.5  # a source that sends nothing for so long is given up


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks first … stop of a fetch, over one connection."""

    first: int
    stop: int


@dataclass(slots=True)
class _Fetch:
    wanted: Wanted
    into: Memory
    refs: Sequence[BlockRef]
    sums: list[int]
    should_stop: Callable[[], bool]
    deadline: float
    failed: bool = False


class _Nowhere:
    """The destination of what is only asked."""

    layout, block_nbytes = "", 0

    def view(self) -> memoryview:
        return memoryview(b"")


class TcpTransport:
    """Opens peers; their threads are shared.

    Args:
        now: seconds of any one clock, as deadlines are given in; called from any thread.
        nonce: makes `protocol.NONCE_NBYTES` random bytes; called from any thread.
        connections: most of one fetch.
    """

    def __init__(self, *, now: Callable[[], float], nonce: Callable[[], bytes], connections: int = CONNECTIONS) -> None:
        self.now, self.nonce, self.connections = now, nonce, connections
        self.threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kv-fetch")

    def open(self, address: PeerAddress) -> TcpPeer:
        """Return the peer at an address; it is connected to with its first fetch."""
        return TcpPeer(self, address)

    def close(self) -> None:
        """End the threads; peers are closed by whoever opened them."""
        self.threads.shutdown(wait=True, cancel_futures=True)


class TcpPeer:
    """One other host; idle connections are kept for the next fetch."""

    def __init__(self, transport: TcpTransport, address: PeerAddress) -> None:
        """Nothing is sent yet."""
        self._transport, self._address = transport, address
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close idle connections; those in use are closed when their fetch is over."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for connection in idle:
            connection.close()

    def fetch(
        self,
        wanted: Wanted,
        into: Memory,
        refs: Sequence[BlockRef],
        *,
        should_stop: Callable[[], bool],
        deadline: float,
    ) -> list[int]:
        """See `kvstore.transport.base.Peer`; `deadline` is in seconds of the transport's clock."""
        check(wanted, into, refs)
        fetch = _Fetch(wanted, into, refs, [0] * len(refs), should_stop, deadline)
        own, *others = self._parts(len(refs), wanted.block_nbytes)
        running = [self._transport.threads.submit(self._run, fetch, part) for part in others]
        errors: list[BaseException] = []
        try:
            self._run(fetch, own)
        except BaseException as exc:
            fetch.failed = True
            errors.append(exc)
        for future in running:
            if fetch.failed and future.cancel():
                continue
            error = future.exception()  # waits: nothing writes any more once all have ended
            if error is not None:
                errors.append(error)
        if errors:
            error = next((e for e in errors if not isinstance(e, TransferAborted)), errors[0])
            if isinstance(error, KvError) and any(fetch.sums):
                error.arrived = fetch.sums  # of whole blocks, each compared with its checksum
            raise error
        return fetch.sums

    def ask(self, wanted: Wanted, via: str, deadline: float) -> p.Placed:
        """Ask where blocks can be read by another way, or (`protocol.CHECK`) whether they are still lent.

        Raises:
            PeerFailed: if they are not, or the other host is not there; `bad` if it does not know that way.
        """
        own = _Fetch(wanted, _Nowhere(), (), [], lambda: False, deadline)
        try:
            connection = self._connected(own)
            try:
                placed = self._placed(own, via, connection)
            except BaseException:
                connection.close()
                raise
            self._keep(connection)
            return placed
        except p.Malformed as exc:
            raise self._error("garbage", str(exc)) from exc
        except OSError as exc:
            raise self._error("cut", exc.strerror or type(exc).__name__) from exc

    def _placed(self, own: _Fetch, via: str, connection: socket.socket) -> p.Placed:
        wanted, blocks = own.wanted, list(own.wanted.blocks)
        sums, size = via != p.CHECK and not wanted.expected, wanted.block_nbytes
        connection.sendall(p.request(wanted.ticket, wanted.epoch, wanted.layout, size, blocks, sums=sums, via=via))
        head, placed = p.parse_place(self._read(own, connection, p.HEAD_NBYTES)), p.Placed()
        if head.status is None:
            metadata = self._read(own, connection, head.count)
            told = self._read(own, connection, len(blocks) * p.SUM_NBYTES) if sums else b""
            placed = p.Placed(head.nbytes, metadata, tuple(p.parse_sums(told)))
            head = p.parse_place(self._read(own, connection, p.HEAD_NBYTES))
        if head.status is not p.Status.OK:
            raise self._error("garbage" if head.status is None else head.status.name.lower())
        if via != p.CHECK and not placed.metadata:
            raise self._error("garbage", "an end without a place")
        return placed

    def _parts(self, count: int, block_nbytes: int) -> list[_Part]:
        wish = min(self._transport.connections, max(1, count * block_nbytes // STRIPE_NBYTES))
        number = max(wish, -(-count // p.MAX_BLOCKS))
        each = max(1, -(-count // number))
        return [_Part(first, min(first + each, count)) for first in range(0, count, each)] or [_Part(0, 0)]

    def _run(self, fetch: _Fetch, part: _Part) -> None:
        if part.first == part.stop:
            return
        try:
            self._check(fetch, part.first, 0.0)
            connection = self._connected(fetch)
            try:
                self._receive(fetch, part, connection)
            except BaseException:
                connection.close()
                raise
            self._keep(connection)
        except BaseException as exc:
            fetch.failed = True
            if isinstance(exc, p.Malformed):
                raise self._error("garbage", str(exc)) from exc
            if isinstance(exc, OSError):
                raise self._error("cut", exc.strerror or type(exc).__name__) from exc
            raise

    # --- connections ----------------------------------------------------------------------------

    def _connected(self, fetch: _Fetch) -> socket.socket:
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                return self._connect(fetch)
            if not _spoken(found):
                return found
            found.close()  # the other side has closed it, or says what nobody has asked for

    def _connect(self, fetch: _Fetch) -> socket.socket:
        try:
            host, port = split_address(self._address.address)
            connection = socket.create_connection((host, port), CONNECT_S)
        except (OSError, ValueError) as exc:
            raise self._error("unreachable", str(exc)) from exc
        try:
            connection.settimeout(POLL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine, key = self._transport.nonce(), self._address.key
            connection.sendall(p.hello(mine))
            theirs = p.parse_hello(self._read(fetch, connection, p.HELLO_NBYTES))
            connection.sendall(p.proof(key, b"client", mine, theirs))
            said = self._read(fetch, connection, p.PROOF_NBYTES)
            if not p.same(said, p.proof(key, b"server", mine, theirs)):
                raise self._error("stranger", "it does not know the key")
        except BaseException:
            connection.close()
            raise
        return connection

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < 2 * self._transport.connections:
                self._idle.append(connection)
                return
        connection.close()

    # --- receiving ------------------------------------------------------------------------------

    def _receive(self, fetch: _Fetch, part: _Part, connection: socket.socket) -> None:
        wanted = fetch.wanted
        blocks, size = list(wanted.blocks[part.first : part.stop]), wanted.block_nbytes
        ask = p.request(wanted.ticket, wanted.epoch, wanted.layout, size, blocks, sums=not wanted.expected)
        connection.sendall(ask)
        at = part.first
        while True:
            raw = self._read(fetch, connection, p.HEAD_NBYTES)
            head = p.parse_head(raw, block_nbytes=size, left=part.stop - at)
            if head.status is not None:
                break
            sums = wanted.expected[at : at + head.count]
            if not wanted.expected:
                sums = p.parse_sums(self._read(fetch, connection, head.count * p.SUM_NBYTES))
            self._blocks(fetch, at, sums, connection)
            at += head.count
        if head.status is not p.Status.OK:
            raise self._error(head.status.name.lower())
        if at != part.stop:
            raise self._error("garbage", f"an end after {at - part.first} of {part.stop - part.first} blocks")

    def _blocks(self, fetch: _Fetch, at: int, sums: Sequence[int], connection: socket.socket) -> None:
        size, view = fetch.wanted.block_nbytes, fetch.into.view()
        places = [ref.index for ref in fetch.refs[at : at + len(sums)]]
        for first, count in runs(places, max(1, PIECE_NBYTES // size)):
            start = places[first] * size
            piece, came = view[start : start + count * size], [0]
            try:
                self._fill(fetch, connection, piece, at + first, came)
            finally:  # of a piece that is cut the whole blocks are as good as any
                self._verify(fetch, piece, at + first, sums[first : first + came[0] // size])

    def _verify(self, fetch: _Fetch, piece: memoryview, at: int, sums: Sequence[int]) -> None:
        size = fetch.wanted.block_nbytes
        for i, expected in enumerate(sums):
            found = checksum(piece[i * size : (i + 1) * size])
            if found != expected:
                raise TransferCorrupt(at + i, expected, found)
            fetch.sums[at + i] = found

    def _fill(
        self, fetch: _Fetch, connection: socket.socket, view: memoryview, block: int, came: list[int] | None = None
    ) -> None:
        """Receive until `view` is full; the first of `came` tells how many bytes have, also when it fails."""
        got, waited = 0, 0.0
        while got < len(view):
            try:
                count = connection.recv_into(view[got:])
            except TimeoutError:
                waited += POLL_S
                self._check(fetch, block, waited)
                continue
            if count == 0:
                raise self._error("cut", "the connection has ended")
            got, waited = got + count, 0.0
            if came is not None:
                came[0] = got
            self._check(fetch, block, waited)

    def _read(self, fetch: _Fetch, connection: socket.socket, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._fill(fetch, connection, memoryview(data), 0)
        return bytes(data)

    def _check(self, fetch: _Fetch, block: int, waited: float) -> None:
        if fetch.failed or fetch.should_stop():
            raise TransferAborted(block, len(fetch.refs))
        if waited >= STALL_S or self._transport.now() > fetch.deadline:
            raise self._error("slow")

    def _error(self, why: str, detail: str = "") -> PeerFailed:
        return PeerFailed(self._address.address, why, detail)


def _spoken(connection: socket.socket) -> bool:
    """Whether an idle connection has something to read: an end, or what nobody has asked for."""
    readable = select.poll()
    readable.register(connection, select.POLLIN)
    return bool(readable.poll(0))
