"""The native client of the chaos tests follows the protocol's three lines, and its history keeps every arrival."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chaos import invariants
from chaos.clients import NativeStream
from chaos.history import Recorder
from chaos.watch import Watch
from schemas.messages import Heartbeat
from schemas.subjects import Ref

pytestmark = pytest.mark.anyio


class Message:
    """A message as nats-py hands it over."""

    def __init__(self, frame: dict[str, Any] | None, headers: dict[str, str] | None = None) -> None:
        self.data = json.dumps(frame).encode() if frame is not None else b""
        self.reply = "ack.detokenize.0.e.r" if frame is not None else ""
        self.headers = headers


class Wire:
    """Keeps what the client publishes."""

    def __init__(self) -> None:
        self.acks: list[list[int]] = []

    async def publish(self, subject: str, payload: bytes) -> None:
        assert subject == "ack.detokenize.0.e.r"
        self.acks.append(json.loads(payload)["next"])


def items(*pairs: tuple[int, str]) -> dict[str, Any]:
    """Return a frame with items of choice 0."""
    return {"id": "r", "items": [[0, index, index + 100, text, None] for index, text in pairs]}


END = {"id": "r", "finish": [[0, "length", 3]], "terminal": {"usage": {"completion_tokens": 3}, "items": [3]}}


def client(choices: int = 1) -> tuple[NativeStream, Recorder, Wire]:
    """Return a client with a request under way."""
    recorder, wire = Recorder(lambda: 0.0), Wire()
    recorder.add("r", "sent", client="native", key="k", choices=choices, deadline_s=5.0, indexed=True)
    return NativeStream(recorder, wire, "r", choices), recorder, wire  # type: ignore[arg-type]


async def test_repeats_are_dropped_and_gaps_wait_for_their_retransmission() -> None:
    """A terminal that overtook a lost item is not the end; the acknowledgements tell what is missing."""
    stream, recorder, wire = client()
    frames = [{"id": "r", "accepted": {"id": "r"}}, items((0, "a")), items((2, "c")), END]
    for frame in frames:
        await stream.on_frame(Message(frame))  # type: ignore[arg-type]
    assert not stream.done.is_set()

    for frame in (items((0, "a"), (1, "b"), (2, "c")), END):
        await stream.on_frame(Message(frame))  # type: ignore[arg-type]

    assert stream.done.is_set()
    assert wire.acks == [[0], [1], [1], [1], [3], [3]]
    assert invariants.answer(recorder.events) == invariants.Answer(("abc",), ("length",))
    assert invariants.one_ending(recorder.events) + invariants.no_gap_no_repeat(recorder.events) == []


async def test_nothing_counts_after_the_terminal() -> None:
    """A repeated terminal is acknowledged and changes nothing."""
    stream, recorder, wire = client()
    for frame in (items((0, "a"), (1, "b"), (2, "c")), END, END, items((3, "late"))):
        await stream.on_frame(Message(frame))  # type: ignore[arg-type]

    assert [e.kind for e in recorder.events].count("terminal") == 1
    assert invariants.one_ending(recorder.events) == []
    assert len(wire.acks) == 4


async def test_an_error_ends_the_stream_where_it_is() -> None:
    """No totals are owed then."""
    stream, recorder, _ = client()
    await stream.on_frame(Message(items((0, "a"))))  # type: ignore[arg-type]
    await stream.on_frame(Message({"id": "r", "terminal": {"error": {"kind": "Unavailable"}}}))  # type: ignore[arg-type]

    assert stream.done.is_set()
    assert recorder.events[-1].data["error"] == {"kind": "Unavailable"}


async def test_a_bus_without_takers_ends_the_request() -> None:
    """The bus itself says that nobody listens."""
    stream, recorder, _ = client()
    await stream.on_frame(Message(None, {"Status": "503"}))  # type: ignore[arg-type]

    assert stream.done.is_set()
    assert recorder.events[-1].kind == "terminal" and recorder.events[-1].data["error"]["kind"] == "Unavailable"


async def test_a_watch_forgets_who_is_silent() -> None:
    """An actor that was not heard for a while is neither live nor serving; engine loads go into the history."""
    now = [0.0]
    recorder = Recorder(lambda: now[0])
    watch = Watch(lambda: now[0], recorder)
    beat = Heartbeat(
        ref=Ref("decode", "0", "e"), node="decode-0", host="h", pid=7, seq=1, sent_at=0.0, state="ready",
        load={"running": 2, "steps": 5, "requests": ["a", "b"]},
    )  # fmt: skip
    watch.take(beat)

    assert watch.serving("decode") == {"decode/0": frozenset({"a", "b"})}
    assert [s.name for s in watch.ready("decode")] == ["decode/0"]
    assert recorder.events[0].data["steps"] == 5
    now[0] = 5.0
    assert watch.live() == []
    with pytest.raises(TimeoutError, match="one decode"):
        await watch.until(lambda w: w.ready("decode"), timeout_s=0.01, what="one decode")
