"""Streams: their chunks, their ends, and that they say the same as the whole answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edge.generate import Limits
from schemas.errors import EngineFailed, Overloaded
from tests.edge.sse import DONE, comments, events, finishes, texts
from tests.support.edge_peer import Answer, Reading, chat, completion, edge_setup

pytestmark = pytest.mark.anyio

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "kind", "prefix"),
    [(CHAT, chat, "chat.completion.chunk", "chatcmpl-"), (COMPLETION, completion, "text_completion", "cmpl-")],
)
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}])
async def test_every_chunk_keeps_the_contract(
    path: str, body: Any, kind: str, prefix: str, options: dict[str, bool] | None
) -> None:
    """One id, time and model; the role first; one finish; usage only when asked for; `[DONE]` once, at the end."""
    async with edge_setup(Answer(texts=[["Hel", "lo", "", "!"]], cached_tokens=2), listen=False) as s:
        response = await s.http.post(path, json=body(stream=True, stream_options=options))
        submit = s.submits[0]

    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response.text)
    assert last == DONE and DONE not in chunks
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        (prefix + submit.request_id, kind, submit.created, "tiny")
    }
    with_usage = [c for c in chunks if c.get("usage") is not None]
    if options == {"include_usage": True}:
        assert with_usage == [chunks[-1]] and chunks[-1]["choices"] == []
        assert with_usage[0]["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 4,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
    else:
        assert with_usage == []
    assert texts(chunks) == {0: "Hello!"}
    assert finishes(chunks) == [(0, "stop")]
    if path == CHAT:
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in d for d in deltas[1:])


async def test_text_leaves_as_it_comes_and_silence_makes_no_chunk() -> None:
    """Each item that releases text is one chunk at once; one that releases none is nothing on the wire."""
    async with edge_setup(Answer(texts=[["a", "", "b", "c"]], hold_at=1)) as s:
        reading = Reading(s, CHAT, chat(stream=True))
        await s.until(lambda: reading.num_events == 1)
        s.peer.release(2)
        s.peer.release(3)
        await s.until(lambda: reading.num_events == 2)
        s.peer.release()
        chunks = events(await reading.end())

    pieces = [c["choices"][0]["delta"].get("content") for c in chunks[:-1]]
    assert pieces == ["a", "b", "c", None]


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (COMPLETION, completion)])
async def test_a_joined_stream_equals_the_whole_answer(path: str, body: Any) -> None:
    """Text, finish reasons and usage are the same in both forms, for several choices too."""
    answer = Answer(texts=[["one ", "two"], ["\u6f22", "\U0001f600"], []], reasons=["stop", "length", "stop"])
    async with edge_setup(answer, listen=False) as s:
        streamed = await s.http.post(path, json=body(n=3, stream=True, stream_options={"include_usage": True}))
        whole = (await s.http.post(path, json=body(n=3))).json()

    chunks = events(streamed.text)[:-1]
    of_choice = (lambda c: c["message"]["content"]) if path == CHAT else (lambda c: c["text"])
    assert texts(chunks) == {c["index"]: of_choice(c) for c in whole["choices"]}
    assert dict(finishes(chunks)) == {c["index"]: c["finish_reason"] for c in whole["choices"]}
    assert chunks[-1]["usage"] == whole["usage"]
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]


async def test_every_choice_has_its_own_finish_chunk() -> None:
    """Indices are exactly those of the choices, also for two prompts with two choices each."""
    answer = Answer(texts=[["a"], ["b", "b"], ["c"] * 3, ["d"] * 4], reasons=["stop", "length", "stop", "length"])
    async with edge_setup(answer, listen=False) as s:
        body = completion(prompt=["x", "y"], n=2, stream=True, stream_options={"include_usage": True})
        response = await s.http.post(COMPLETION, json=body)

    chunks = events(response.text)[:-1]
    assert texts(chunks) == {0: "a", 1: "bb", 2: "ccc", 3: "dddd"}
    assert sorted(finishes(chunks)) == [(0, "stop"), (1, "length"), (2, "stop"), (3, "length")]
    assert chunks[-1]["usage"]["completion_tokens"] == 10
    assert chunks[-1]["usage"]["prompt_tokens"] == 5


async def test_a_choice_without_text_still_has_a_role_and_a_finish() -> None:
    """An empty answer is an answer."""
    async with edge_setup(Answer(texts=[[""]]), listen=False) as s:
        chunks = events((await s.http.post(CHAT, json=chat(stream=True))).text)[:-1]
        whole = (await s.http.post(CHAT, json=chat())).json()

    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert finishes(chunks) == [(0, "stop")]
    assert whole["choices"][0]["message"]["content"] == ""


async def test_characters_that_end_lines_elsewhere_are_escaped() -> None:
    """U+2028, U+2029 and U+0085 never stand raw in an event, and arrive unharmed."""
    nasty = "a\u2028b\u2029c\u0085d\r\ne\u2027\u00c2"
    async with edge_setup(Answer(texts=[[nasty]]), listen=False) as s:
        response = await s.http.post(CHAT, json=chat(stream=True))

    assert not {"\u2028", "\u2029", "\u0085", "\r"} & set(response.text)
    assert texts(events(response.text)) == {0: nasty}


async def test_a_failure_after_the_first_byte_is_one_error_event() -> None:
    """No finish and no `[DONE]` follow; the stream closes."""
    async with edge_setup(
        Answer(texts=[["a", "b", "c", "d"]], fail_at=(3, EngineFailed("numbers went bad"))), listen=False
    ) as s:
        response = await s.http.post(CHAT, json=chat(stream=True))
        page = (await s.http.get("/metrics")).text

    *chunks, last = events(response.text)
    assert response.status_code == 200
    assert last["error"] == {
        "message": "numbers went bad", "type": "internal_error", "param": None, "code": "engine_failed",
    }  # fmt: skip
    assert "[DONE]" not in response.text and finishes(chunks) == []
    assert texts(chunks) == {0: "abc"}
    assert 'headrace_http_streams_failed_total{node="edge"} 1.0' in page


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_is_a_real_status(stream: bool) -> None:
    """Also when a stream was asked for, and also after acceptance."""
    refusal = Overloaded("too many", code="slo_unreachable", retry_after_s=2.5)
    async with edge_setup(Answer(refuse=refusal), listen=False) as s:
        refused = await s.http.post(CHAT, json=chat(stream=stream))
        s.peer.answer = lambda _submit: Answer(fail_at=(0, EngineFailed("boom")), texts=[["a"]], hold_at=0)
        failed = await s.http.post(CHAT, json=chat(stream=stream))

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
    assert refused.json()["error"]["code"] == "slo_unreachable"
    assert refused.headers["content-type"] == "application/json"
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_failed")


@pytest.mark.slow
async def test_a_long_silence_is_filled_with_comments() -> None:
    """Headers leave after one interval at most; comments follow; none after the end; whole answers have none."""
    limits = Limits(keepalive_s=0.05)
    async with edge_setup(Answer(hold_at=0), limits=limits) as s:
        reading = Reading(s, CHAT, chat(stream=True))
        await s.until(lambda: comments(reading.text) >= 3)
        assert reading.status == 200 and reading.num_events == 0
        s.peer.release()
        body = await reading.end()
        s.peer.answer = lambda _submit: Answer(hold_at=0)
        whole = asyncio.create_task(s.http.post(CHAT, json=chat()))
        await s.until(lambda: len(s.peer.sessions) == 1)
        await s.system.clock.sleep(0.12)
        s.peer.release()
        plain = (await whole).text

    assert texts(events(body)) == {0: "Hello!"}
    assert body.endswith("data: [DONE]\n\n")
    assert not plain.startswith(":") and plain.startswith("{")


async def test_a_bad_request_is_a_real_status_even_where_headers_would_leave_at_once() -> None:
    """Cheap validation comes before headers."""
    async with edge_setup(Answer(hold_at=0), limits=Limits(keepalive_s=0.001), listen=False) as s:
        response = await s.http.post(CHAT, json=chat(stream=True, temperature=3))

        assert s.submits == []
    assert response.status_code == 400


@pytest.mark.slow
async def test_a_lost_frame_is_sent_again_and_nothing_is_missing() -> None:
    """Loss of an item and of the terminal cost time, not text."""
    lost: list[Any] = []

    def lose(frame: dict[str, Any]) -> bool:
        gone = ("items" in frame and frame["items"][0][1] == 1) or "terminal" in frame
        if gone and len(lost) < 2:
            lost.append(frame)
            return True
        return False

    async with edge_setup(listen=False) as s:
        s.peer.lose = lose
        response = await s.http.post(CHAT, json=chat(stream=True))

    assert len(lost) == 2
    assert texts(events(response.text)) == {0: "Hello!"}
    assert response.text.count("[DONE]") == 1


async def test_the_peer_learns_that_the_end_has_arrived() -> None:
    """The terminal is acknowledged `done`, so that nobody repeats it."""
    async with edge_setup(listen=False) as s:
        await s.http.post(CHAT, json=chat())
        await s.until(lambda: any(a.status == "done" for a in s.peer.acks))

        assert s.peer.sessions == {}
        assert s.peer.cancels == [] and s.peer.closes == []
        assert s.edge.idle
