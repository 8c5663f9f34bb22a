"""The head of an answer and its first bytes leave together."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from edge.server import _Joined

pytestmark = pytest.mark.anyio

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


class _Wire:
    """Notes what is written to it."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def joined() -> tuple[_Joined, _Wire]:
    wire = _Wire()
    return _Joined(cast(asyncio.Transport, wire)), wire


async def test_a_head_and_a_body_of_the_same_turn_are_one_write() -> None:
    """A client is woken once for both."""
    transport, wire = joined()
    transport.write(HEAD)
    transport.write(b"data: 1\n\n")
    transport.write(b"data: 2\n\n")
    assert wire.writes == [HEAD + b"data: 1\n\n", b"data: 2\n\n"]
    await asyncio.sleep(0)
    assert len(wire.writes) == 2


async def test_a_head_alone_waits_for_no_body() -> None:
    """It is on its way when the turn is over."""
    transport, wire = joined()
    transport.write(HEAD)
    assert wire.writes == []
    await asyncio.sleep(0)
    assert wire.writes == [HEAD]
    transport.write(b"data: 1\n\n")
    assert wire.writes == [HEAD, b"data: 1\n\n"]


async def test_a_head_is_not_lost_when_the_connection_is_closed() -> None:
    """It goes out before the end."""
    transport, wire = joined()
    transport.write(HEAD)
    transport.close()
    assert wire.writes == [HEAD] and wire.closed and transport.is_closing()
    await asyncio.sleep(0)
    assert wire.writes == [HEAD]
