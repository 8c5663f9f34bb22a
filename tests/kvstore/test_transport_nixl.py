"""Blocks through NIXL, where it is installed; where a host serves by TCP alone, by that."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from transport_cases import KEY, TICKET, Sides, nonce

from kvstore.errors import PeerFailed, TransferAborted, TransferCorrupt
from kvstore.transport import nixl
from kvstore.transport.base import PeerAddress
from kvstore.transport.nixl import NixlAgent, NixlPeer, NixlTransport
from kvstore.transport.tcp_server import TcpServer

needs_nixl = pytest.mark.skipif(not nixl.installed(), reason="NIXL is not installed: pip install headrace[nixl]")


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    """Two hosts' pools, served by TCP alone."""
    made = Sides(tmp_path, blocks=96, nbytes=1 << 18)
    yield made
    made.close()


def by_nixl(sides: Sides, *, serving: bool = True) -> NixlPeer:
    """A peer that reads through NIXL, from a server that serves by it, or not."""
    sides.server.stop()
    place = NixlAgent("there").place if serving else None
    sides.server = TcpServer(sides.grants, KEY, nonce=nonce, host="127.0.0.1", place=place)
    transport = NixlTransport(sides.transport, NixlAgent("here"))
    return transport.open(PeerAddress(f"127.0.0.1:{sides.server.start()}", KEY))


def test_a_host_that_serves_by_tcp_alone_is_fetched_from_by_tcp(sides: Sides) -> None:
    """Also where NIXL is not installed: it is not loaded before a host offers it."""
    sides.give()
    peer = by_nixl(sides, serving=False)
    try:
        for _ in range(2):
            assert sides.fetch(peer=peer) == sides.sums(sides.from_)  # type: ignore[arg-type]
        assert peer.plain and sides.dest.view() == sides.source.view()
    finally:
        peer.close()


@needs_nixl
@pytest.mark.slow
def test_blocks_arrive_whole_through_nixl(sides: Sides) -> None:
    """In any order, more than fit the memory that they are read into, with checksums that are known or told."""
    draw = random.Random(3)
    sides.give()
    peer = by_nixl(sides)
    try:
        for known in (True, False):
            from_, to = draw.sample(sides.from_, 90), draw.sample(sides.to, 90)
            assert sides.fetch(from_, to, peer=peer, known=known) == sides.sums(from_)  # type: ignore[arg-type]
            for f, t in zip(from_, to, strict=True):
                assert sides.block(sides.dest, t) == sides.block(sides.source, f)
        counts = sides.server.statistics()
        assert counts["bytes_total"] == 0 and counts["read_total"] == 2 * 90 * (1 << 18) and not peer.plain
    finally:
        peer.close()


@needs_nixl
@pytest.mark.slow
def test_what_goes_wrong_is_an_error_through_nixl_too(sides: Sides) -> None:
    """No grant, a lease that ends before the read is over, wrong bytes, an abort."""
    peer = by_nixl(sides)
    try:
        with pytest.raises(PeerFailed, match="unknown"):
            sides.fetch(peer=peer)  # type: ignore[arg-type]
        sides.give(until=1.0)
        looks: list[int] = []
        real = sides.grants.holds
        sides.grants.holds = lambda t, g: real(t, g) and len(looks.append(1) or looks) < 2  # type: ignore[method-assign]
        with pytest.raises(PeerFailed, match="lapsed"):
            sides.fetch(peer=peer)  # type: ignore[arg-type]
        sides.grants.holds = real  # type: ignore[method-assign]
        with pytest.raises(TransferAborted):
            sides.fetch(peer=peer, should_stop=lambda: True)  # type: ignore[arg-type]
        wanted = sides.wanted(sides.from_)
        sides.block(sides.source, sides.from_[70])[5] ^= 1
        with pytest.raises(TransferCorrupt, match="block 70"):
            peer.fetch(wanted, sides.dest, sides.to, should_stop=lambda: False, deadline=sides.transport.now() + 20)
        assert TICKET and sides.fetch(peer=peer) == sides.sums(sides.from_)  # type: ignore[arg-type]
    finally:
        peer.close()
