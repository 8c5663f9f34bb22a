"""Encoding prompts: short ones at once, long ones in a thread, and one bad prompt costs nobody else anything."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from actors.byte_text import ByteText
from actors.tokenize import SHORT, TokenizeActor, is_short
from runtime.clock import SystemClock
from runtime.memory_bus import MemoryBroker
from runtime.node import Node
from runtime.telemetry import Telemetry
from schemas import messages as m
from schemas.codec import decode, encode
from schemas.record import Fence
from schemas.subjects import Ref

ME = Ref("admission", "test", "0" * 16)


class Encoder(ByteText):
    """Bytes as ids; notes the threads that it ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def chat_ids(self, messages: Sequence[Any], *, created: int | None = None, **kwargs: Any) -> list[int]:
        self.threads.append(threading.current_thread().name)
        if "fault" in str(messages):
            raise RuntimeError("a fault of the encoder")
        return super().chat_ids(messages, created=created, **kwargs)


def ask(name: str, content: Any, **body: Any) -> m.Tokenize:
    """A chat of one message."""
    chat = {"messages": [{"role": "user", "content": content}]} | body
    return m.Tokenize(request_id=name, fence=Fence(0, "x", 0), api="chat", body=chat, reply=ME)


def complete(prompt: Any) -> m.Tokenize:
    """A text completion."""
    return m.Tokenize(request_id="a", fence=Fence(0, "x", 0), api="completion", body={"prompt": prompt}, reply=ME)


@pytest.mark.parametrize(
    ("message", "short"),
    [
        (ask("a", "hello"), True),
        (ask("a", "x" * (SHORT - 16)), True),
        (ask("a", "x" * SHORT), False),
        (ask("a", [{"type": "text", "text": "parts"}]), False),
        (ask("a", "hello", tools=[{"type": "function"}]), False),
        (complete("hi"), True),
        (complete([1, 2]), False),
        (complete(["x" * 1500] * 2), False),
    ],
)
def test_short_is_a_few_short_texts_and_nothing_else(message: m.Tokenize, short: bool) -> None:
    assert is_short(message) is short


def test_the_way_of_a_prompt_changes_its_thread_and_nothing_else() -> None:
    """Short and long prompts, and faults of either, are all answered; the node goes on."""
    encoder = Encoder()
    contents = {"short": "hello", "long": "y" * 5000, "short fault": "fault", "long fault": "fault" * 1000}

    telemetry = Telemetry("n", otlp_endpoint="", spans_file="")

    async def scenario() -> dict[str, m.Tokenized]:
        clock = SystemClock()
        bus = MemoryBroker(clock).connect("test")
        node = Node("n", "h", control=bus, stream=bus, clock=clock, telemetry=telemetry)
        ref = node.add("tokenize", "t", lambda context: TokenizeActor(context, load_encoder=lambda: encoder))
        answers: dict[str, m.Tokenized] = {}
        whole = asyncio.Event()

        def take(message: Any) -> None:
            answer = decode(message.payload)[0]
            assert isinstance(answer, m.Tokenized)
            answers[answer.request_id] = answer
            if len(answers) == len(contents):
                whole.set()

        await bus.subscribe(ME.subject, take)
        await node.start()
        try:
            for name, content in contents.items():
                bus.publish(ref.subject, encode(ask(name, content), ME))
            await asyncio.wait_for(whole.wait(), 10)
        finally:
            await node.stop()
        return answers

    answers = asyncio.run(scenario())

    for name, content in contents.items():
        assert (answers[name].error is not None) == ("fault" in name)
        if "fault" not in name:
            want = ByteText().chat_ids([{"role": "user", "content": content}], created=None)
            assert answers[name].prompt_ids == [want]
    assert {t.startswith("tokenize") for t in encoder.threads} == {True, False}

