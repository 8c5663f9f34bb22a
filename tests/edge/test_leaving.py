"""Clients that leave: the work stops, whatever the phase and the form."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.support.edge_peer import Answer, Reading, chat, edge_setup

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 1])
async def test_a_disconnect_cancels_the_work(stream: bool, hold_at: int) -> None:
    """Before the first item and after it, streamed or not; the owner and the sender are both told."""
    async with edge_setup(Answer(hold_at=hold_at)) as s:
        reading = Reading(s, CHAT, chat(stream=stream))
        await s.until(lambda: len(s.peer.sessions) == 1)
        if stream and hold_at:
            await s.until(lambda: reading.num_events == 1)

        await reading.leave()
        await s.until(lambda: s.peer.cancels and s.edge.idle)

        assert s.peer.cancels[0].request_id == s.submits[0].request_id
        assert s.peer.sessions == {}
        page = (await s.http.get("/metrics")).text
        assert 'headrace_http_disconnects_total{node="edge"} 1.0' in page


async def test_a_disconnect_before_acceptance_cancels_too() -> None:
    """Whoever was asked is told, since it may have begun."""
    async with edge_setup(Answer(silent=True)) as s:
        reading = Reading(s, CHAT, chat())
        await s.until(lambda: s.submits)

        await reading.leave()
        await s.until(lambda: s.peer.cancels)

        assert s.edge.idle


@pytest.mark.slow
async def test_a_cancel_is_repeated_until_it_is_answered() -> None:
    """One that is lost, or not answered, is sent again."""
    async with edge_setup(Answer(hold_at=0)) as s:
        s.peer.answer_cancels = False
        reading = Reading(s, CHAT, chat(stream=True))
        await s.until(lambda: s.peer.sessions)
        await reading.leave()
        await s.until(lambda: len(s.peer.cancels) >= 2)

        s.peer.answer_cancels = True
        so_far = len(s.peer.cancels)
        await s.until(lambda: len(s.peer.cancels) > so_far)
        count = len(s.peer.cancels)
        await s.system.clock.sleep(0.5)

        assert len(s.peer.cancels) == count


async def test_frames_for_a_client_that_has_left_are_answered_as_done() -> None:
    """A sender that did not hear of the cancel stops by its next frame."""
    async with edge_setup(Answer(hold_at=1)) as s:
        reading = Reading(s, CHAT, chat(stream=True))
        await s.until(lambda: reading.num_events == 1)
        session = next(iter(s.peer.sessions.values()))
        await reading.leave()
        await s.until(lambda: s.peer.cancels)

        s.peer.sessions[session.submit.request_id] = session
        s.peer.release()
        await s.until(lambda: session.done)


async def test_an_answer_that_is_complete_cancels_nothing() -> None:
    """Closing the connection after the end is no disconnect."""
    async with edge_setup() as s:
        for stream in (False, True):
            await s.http.post(CHAT, json=chat(stream=stream), headers={"connection": "close"})
        await s.until(lambda: s.edge.idle)

        assert s.peer.cancels == [] and s.peer.closes == []


@pytest.mark.slow
async def test_a_slow_reader_holds_its_sender_and_loses_nothing() -> None:
    """The edge buffers a bounded number of items; the rest waits at the sender until the reader goes on."""
    count, piece = 1000, "~" * 20_000
    async with edge_setup(Answer(texts=[[piece] * count])) as s:
        body = b'{"model":"tiny","messages":[{"role":"user","content":"?"}],"stream":true}'
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, s.edge.address)
        reader, writer = await asyncio.open_connection(sock=raw, limit=65_536)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await s.until(lambda: s.peer.sessions)
        session = next(iter(s.peer.sessions.values()))
        try:
            await s.until(lambda: any(a.status == "ok" and a.window == 0 for a in s.peer.acks))
            await s.system.clock.sleep(0.7)
            held = session.sent[0]
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            received = b""
            async with asyncio.timeout(60):
                while part := await reader.read(1 << 20):
                    received += part
        finally:
            writer.close()
            await writer.wait_closed()

    assert held < count, "the sender was held back"
    assert received.count(b"~") == count * 20_000
    assert received.count(b"[DONE]") == 1
