"""Bytes per second from another host's memory, beside a plain socket: both ends are in this process, on 127.0.0.1.

The plain way sends the source in one piece over one connection and receives it into the destination. The transport is
measured as it is, and with its checksums taken out.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

from bench.kv.rates import PLAIN, UNVERIFIED, VERIFIED, WrongBytes, compared
from kvstore.handoff import checksum
from kvstore.pool import BlockPool
from kvstore.transport import protocol, tcp_client
from kvstore.transport.base import PeerAddress, Wanted
from kvstore.transport.grants import Grants
from kvstore.transport.tcp_client import TcpTransport
from kvstore.transport.tcp_server import TcpServer

LIMIT_S = 60.0
TICKET = "bench"


def fetches(source: BlockPool, dest: BlockPool, turns: int) -> dict[str, Any]:
    """Move all blocks of one pool into the other: over a plain socket, by the transport, and by that without checks.

    Raises:
        WrongBytes: if checksums or bytes are not those of the source.
    """
    key, size = os.urandom(32), source.block_nbytes
    from_, to = (pool.refs(range(pool.num_blocks)) for pool in (source, dest))
    of, into = source.view(), dest.view()
    sums = [checksum(of[at : at + size]) for at in range(0, len(of), size)]
    with ExitStack() as stack:
        grants = Grants(time.monotonic)
        grants.give(TICKET, source.handle(), from_, time.monotonic() + 3600)
        server = TcpServer(grants, key, nonce=_nonce, host="127.0.0.1")
        address = f"127.0.0.1:{server.start()}"
        stack.callback(server.stop)
        transport = TcpTransport(now=time.monotonic, nonce=_nonce)
        stack.callback(transport.close)
        peer = transport.open(PeerAddress(address, key))
        stack.callback(peer.close)
        sender, receiver = _pair(stack)
        handle = source.handle()
        wanted = Wanted(TICKET, handle.epoch, handle.layout, size, from_, sums)

        def plain() -> None:
            thread = threading.Thread(target=sender.sendall, args=(of,))
            thread.start()
            got = 0
            while got < len(into):
                got += receiver.recv_into(into[got:])
            thread.join()

        def fetch() -> list[int]:
            return peer.fetch(wanted, dest, to, should_stop=lambda: False, deadline=time.monotonic() + LIMIT_S)

        def unverified() -> None:
            with mock.patch.object(tcp_client, "checksum", _any):
                fetch()

        def verified() -> None:
            if fetch() != sums:
                raise WrongBytes("fetched blocks have other checksums than their sources")

        ways = {PLAIN: plain, UNVERIFIED: unverified, VERIFIED: verified}
        return compared("other host", "fetch", of, into, ways, turns)


class _Anything(int):
    """Equal to every checksum."""

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = int.__hash__


def _any(_: memoryview) -> int:
    return _Anything(0)


def _nonce() -> bytes:
    return os.urandom(protocol.NONCE_NBYTES)


def _pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = stack.enter_context(socket.create_connection(listener.getsockname()))
        receiver, _ = listener.accept()
    return sender, stack.enter_context(receiver)
