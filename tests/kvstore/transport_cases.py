"""Pools on two sides of a real socket, a server and a client between them, and servers that misbehave."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.handoff import checksum
from kvstore.pool import BlockPool
from kvstore.transport import protocol as p
from kvstore.transport.base import PeerAddress, Wanted
from kvstore.transport.grants import Grants
from kvstore.transport.tcp_client import TcpPeer, TcpTransport
from kvstore.transport.tcp_server import TcpServer
from schemas.messages import BlockRef

KEY = b"k" * 32
TICKET = "ticket"


def nonce() -> bytes:
    return os.urandom(p.NONCE_NBYTES)


class Sides:
    """A source pool that is served, and a destination pool with a client."""

    def __init__(self, directory: Path, *, blocks: int = 64, nbytes: int = 4096, connections: int = 4) -> None:
        self.now = 0.0
        self.source = BlockPool.create(directory, "a", blocks, nbytes, "l", "e1", "one")
        self.dest = BlockPool.create(directory, "b", blocks, nbytes, "l", "e2", "two")
        self.source.view()[:] = random.Random(5).randbytes(blocks * nbytes)
        self.from_ = self.source.refs(self.source.allocate(blocks))
        self.to = self.dest.refs(self.dest.allocate(blocks))
        self.grants = Grants(lambda: self.now)
        self.server = TcpServer(self.grants, KEY, nonce=nonce, host="127.0.0.1")
        self.port = self.server.start()
        self.transport = TcpTransport(now=time.monotonic, nonce=nonce, connections=connections)
        self.peer = self.open()

    def open(self, *, key: bytes = KEY, port: int | None = None) -> TcpPeer:
        """A peer at the server, or at another port, with this key."""
        return self.transport.open(PeerAddress(f"127.0.0.1:{port or self.port}", key))

    def give(self, until: float = 100.0, refs: list[BlockRef] | None = None) -> None:
        """Lend blocks."""
        self.grants.give(TICKET, self.source.handle(), self.from_ if refs is None else refs, until)

    def block(self, pool: BlockPool, ref: BlockRef) -> memoryview:
        """The bytes of a block."""
        return pool.view()[ref.index * pool.block_nbytes : (ref.index + 1) * pool.block_nbytes]

    def sums(self, refs: list[BlockRef]) -> list[int]:
        """Checksums of blocks of the source."""
        return [checksum(self.block(self.source, ref)) for ref in refs]

    def wanted(self, refs: list[BlockRef], *, known: bool = True) -> Wanted:
        """These blocks, by their checksums or without."""
        pool = self.source.handle()
        sums = self.sums(refs) if known else []
        return Wanted(TICKET, pool.epoch, pool.layout, pool.block_nbytes, refs, sums)

    def fetch(
        self,
        from_: list[BlockRef] | None = None,
        to: list[BlockRef] | None = None,
        *,
        peer: TcpPeer | None = None,
        known: bool = True,
        should_stop: Callable[[], bool] = lambda: False,
        limit_s: float = 30.0,
    ) -> list[int]:
        """Fetch blocks, all of them if none are named."""
        from_, to = from_ or self.from_, to or self.to
        wanted, deadline = self.wanted(from_, known=known), time.monotonic() + limit_s
        return (peer or self.peer).fetch(wanted, self.dest, to, should_stop=should_stop, deadline=deadline)

    def close(self) -> None:
        """End everything."""
        self.peer.close()
        self.transport.close()
        self.server.stop()
        self.source.close()
        self.dest.close()


class Rogue:
    """A server that greets as it should, if it knows the key, and then does what a test says, once per connection."""

    def __init__(self, act: Callable[[socket.socket, p.Request], None], *, key: bytes = KEY) -> None:
        self._act, self._key = act, key
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.ended = threading.Event()  # set: whoever waits in `act` may go
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self.ended.is_set():
                connection.close()
                return
            thread = threading.Thread(target=self._run, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _run(self, connection: socket.socket) -> None:
        with connection:
            try:
                mine = nonce()
                theirs = p.parse_hello(_exactly(connection, p.HELLO_NBYTES))
                connection.sendall(p.hello(mine))
                _exactly(connection, p.PROOF_NBYTES)
                connection.sendall(p.proof(self._key, b"server", theirs, mine))
                head = _exactly(connection, p.REQUEST_NBYTES)
                self._act(connection, p.parse_request(_exactly(connection, p.request_length(head))))
            except (OSError, p.Malformed):
                pass

    def close(self) -> None:
        """End all of it."""
        self.ended.set()
        with socket.create_connection(("127.0.0.1", self.port)):
            pass
        self._accepting.join(5.0)
        self._listener.close()
        for thread in self._threads:
            thread.join(5.0)


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise OSError("it has gone")
        data += more
    return bytes(data)
