"""The native client of the chaos tests follows the protocol's three lines, and its history keeps every arrival."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from chaos import clients, invariants
from chaos.clients import NativeStream, native_chat
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


class Bus:
    """A bus whose n-th request has the n-th fate: `nobody` listens, it is `lost`, or frames come."""

    def __init__(self, *fates: str | list[dict[str, Any]]) -> None:
        self.fates = list(fates)
        self.asked: list[dict[str, Any]] = []
        self.handlers: dict[str, Any] = {}
        self.left: list[str] = []

    def new_inbox(self) -> str:
        return f"inbox.{len(self.handlers)}"

    async def subscribe(self, inbox: str, cb: Any) -> Any:
        self.handlers[inbox] = cb

        class Subscription:
            async def unsubscribe(inner) -> None:
                self.left.append(inbox)

        return Subscription()

    async def publish(
        self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        if not subject.startswith("requests."):
            return
        self.asked.append(json.loads(payload))
        fate = self.fates.pop(0)
        if fate == "nobody":
            await self.handlers[reply](Message(None, {"Status": "503"}))
        elif isinstance(fate, list):
            for frame in fate:
                await self.handlers[reply](Message(frame))


async def test_what_nobody_has_taken_is_asked_again_with_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens, then a request dies with the actor that had just got it: the third one is answered."""
    monkeypatch.setattr(clients, "SILENCE_S", 0.3)
    bus, recorder = Bus("nobody", "lost", [items((0, "a"), (1, "b"), (2, "c")), END]), Recorder(time.monotonic)

    await native_chat(recorder, bus, "r", "k", {}, deadline_s=30.0)  # type: ignore[arg-type]

    assert invariants.answer(recorder.events) == invariants.Answer(("abc",), ("length",))
    assert [e.kind for e in recorder.events].count("sent") == 1
    assert bus.left == ["inbox.0", "inbox.1", "inbox.2"], "whoever works for an earlier inbox finds nobody there"
    left = [body["deadline_ms"] for body in bus.asked]
    assert left == sorted(left, reverse=True) and left[0] - left[2] >= 500


async def test_what_has_begun_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence after an item is for the other side to end: a second try would be answered from the start."""
    monkeypatch.setattr(clients, "SILENCE_S", 0.05)
    monkeypatch.setattr(clients, "LOST_S", 0.05)
    monkeypatch.setattr(clients, "SLACK_S", 0.1)
    bus, recorder = Bus([{"id": "r", "accepted": {"id": "r"}}, items((0, "a"))]), Recorder(time.monotonic)

    await native_chat(recorder, bus, "r", "k", {}, deadline_s=1.0)  # type: ignore[arg-type]

    assert len(bus.asked) == 1
    assert [e.kind for e in recorder.events] == ["sent", "accepted", "item"]


async def test_what_was_accepted_and_is_not_kept_alive_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All who had accepted it died before anybody else knew of it; while keepalives come, it waits."""
    monkeypatch.setattr(clients, "SILENCE_S", 0.05)
    monkeypatch.setattr(clients, "LOST_S", 1.0)
    accepted = {"id": "r", "accepted": {"id": "r"}}
    bus, recorder = Bus([accepted], [accepted, items((0, "a"), (1, "b"), (2, "c")), END]), Recorder(time.monotonic)

    async def keep_alive() -> None:
        for _ in range(3):
            await asyncio.sleep(0.6)
            await bus.handlers["inbox.0"](Message({"id": "r"}))

    asking = asyncio.create_task(native_chat(recorder, bus, "r", "k", {}, deadline_s=30.0))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await keep_alive()
    assert len(bus.asked) == 1
    await asking

    assert len(bus.asked) == 2
    assert invariants.answer(recorder.events) == invariants.Answer(("abc",), ("length",))


async def test_a_bus_without_takers_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus itself says that nobody listens, for longer than an actor takes to be started again."""
    monkeypatch.setattr(clients, "NOBODY_LIMIT_S", 0.5)
    bus, recorder = Bus(*["nobody"] * 9), Recorder(time.monotonic)

    await native_chat(recorder, bus, "r", "k", {}, deadline_s=30.0)  # type: ignore[arg-type]

    assert 2 <= len(bus.asked) <= 5
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
