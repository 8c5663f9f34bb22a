"""Everything that is refused: status and envelope agree, nothing reaches the bus, and the next request is served."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from edge.generate import Limits
from runtime.virtual_clock import VirtualClock, run_virtual
from tests.support.edge_peer import Answer, EdgeSetup, chat, completion, edge_setup

pytestmark = pytest.mark.anyio

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def check_envelope(response: httpx.Response, status: int, *, param: str | None = None, code: str | None = None) -> None:
    """Assert the one shape of errors."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and "Traceback" not in error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


async def check_alive(s: EdgeSetup) -> None:
    """Assert that a good request is served as before."""
    response = await s.http.post(CHAT, json=chat())
    assert response.json()["choices"][0]["message"]["content"] == "Hello!"
    assert (await s.http.get("/health")).status_code == 200


@pytest.mark.slow
async def test_parameters_out_of_range_are_refused_twice_alike_and_open_nothing() -> None:
    """Streamed and not, on both routes; no request reaches the bus."""
    bad: list[dict[str, Any]] = [
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": "5"}, {"max_tokens": 1e12},
        {"temperature": -1}, {"temperature": 2.1}, {"top_p": 0}, {"top_p": 1.1}, {"n": 0}, {"n": 10_000},
        {"top_logprobs": 21}, {"presence_penalty": 3}, {"seed": 2**70}, {"stop": list("abcde")}, {"stop": ""},
        {"top_k": 0}, {"tools": []}, {"logprobs": True},
    ]  # fmt: skip
    async with edge_setup(listen=False) as s:
        for extra in bad:
            (name,) = extra
            for path, body in ((CHAT, chat), (COMPLETION, completion)):
                for stream in (False, True):
                    answers = [await s.http.post(path, json=body(stream=stream, **extra)) for _ in range(2)]
                    check_envelope(answers[0], 400, param=name)
                    assert answers[0].content == answers[1].content
        assert s.submits == []
        await check_alive(s)


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"model":"tiny","prompt":"x","temperature":NaN}', "temperature"),
        (b'{"model":"tiny","prompt":"x","temperature":1e400}', "temperature"),
        (b'{"model":"tiny","prompt":"x \\ud83d"}', "prompt"),
        (b'{"model":"tiny","prompt":"x \\udc00"}', "prompt"),
        (b'{"model":"tiny","prompt":"x","stop":["\\udc00\\ud83d"]}', "stop[0]"),
        (b'{"model":"tiny","prompt":"x","user":"\\ud83d"}', "user"),
        (b'{"model":"tiny","prompt":"x","metadata":{"a":"\\ud83d"}}', "metadata.a"),
        (b'{"model":"tiny","prompt":"\xff"}', None),
        (b'{"model":"tiny",', None),
        (b"[1]", None),
        (b"", None),
    ],
)
async def test_a_body_that_is_no_clean_json_object_is_refused(data: bytes, param: str | None) -> None:
    """Halves of surrogate pairs, NaN, bytes that are not UTF-8, other JSON than an object."""
    async with edge_setup(listen=False) as s:
        response = await s.http.post(COMPLETION, content=data, headers=JSON)

        check_envelope(response, 400, param=param)
        assert s.submits == []
        await check_alive(s)


async def test_a_whole_surrogate_pair_is_one_character() -> None:
    """Two escapes that belong together are an emoji by the time they reach the bus."""
    async with edge_setup(listen=False) as s:
        response = await s.http.post(
            COMPLETION, content=b'{"model":"tiny","prompt":"\\ud83d\\ude00","user":"\\ud83d\\ude00"}', headers=JSON
        )

        assert response.status_code == 200
        assert s.submits[0].body["prompt"] == "\U0001f600"


async def test_nothing_to_read_is_refused_with_its_index() -> None:
    """An empty prompt refuses the whole list; an empty user message is answered."""
    async with edge_setup(listen=False) as s:
        for prompt, param in (
            ("", "prompt"),
            ([""], "prompt[0]"),
            ([], "prompt"),
            ([[]], "prompt[0]"),
            (["a", ""], "prompt[1]"),
        ):
            check_envelope(await s.http.post(COMPLETION, json=completion(prompt=prompt)), 400, param=param)
            await check_alive(s)
        check_envelope(await s.http.post(CHAT, json=chat(messages=[])), 400, param="messages")
        check_envelope(await s.http.post(CHAT, json={"model": "tiny"}), 400, param="messages")
        for messages in ([{"role": "user", "content": ""}], [{"role": "system", "content": "x"}]):
            assert (await s.http.post(CHAT, json=chat(messages=messages))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (COMPLETION, completion)])
async def test_an_unknown_model_is_not_found(path: str, body: Any, stream: bool) -> None:
    """404 with the code and the field; an alias is a model."""
    async with edge_setup(listen=False) as s:
        response = await s.http.post(path, json=body(model="nope", stream=stream))

        check_envelope(response, 404, param="model", code="model_not_found")
        assert s.submits == []
        assert (await s.http.post(path, json=body(model="alias"))).json()["model"] == "alias"


async def test_models_are_listed_and_found_by_name() -> None:
    """Names and aliases; an unknown one is 404."""
    async with edge_setup(listen=False) as s:
        listed = (await s.http.get("/v1/models")).json()
        one = (await s.http.get("/v1/models/tiny")).json()

        assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["tiny", "alias"]
        assert one == listed["data"][0]
        check_envelope(await s.http.get("/v1/models/nope"), 404, param="model", code="model_not_found")
        check_envelope(await s.http.get("/v1/models/a/b"), 404, param="model", code="model_not_found")


async def test_errors_of_the_web_framework_have_the_same_envelope() -> None:
    """Unknown routes, trailing slashes, wrong methods."""
    async with edge_setup(listen=False) as s:
        for path in ("/", "/nope", "/v1/chat/completions/", "/v1/embeddings", "/v1/%2e%2e/etc", "/metrics/x"):
            check_envelope(await s.http.get(path), 404, code="not_found")
        for method, path, allow in (
            ("GET", CHAT, {"POST"}),
            ("DELETE", COMPLETION, {"POST"}),
            ("POST", "/health", {"GET", "HEAD"}),
            ("PUT", "/v1/models", {"GET", "HEAD"}),
        ):
            response = await s.http.request(method, path)
            check_envelope(response, 405)
            assert set(response.headers["allow"].split(", ")) == allow


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_a_wrong_content_type_is_refused(headers: dict[str, str]) -> None:
    """Only plain JSON in UTF-8 is read."""
    async with edge_setup(listen=False) as s:
        check_envelope(await s.http.post(CHAT, content=b"{}", headers=headers), 415)
        fine = await s.http.post(CHAT, json=chat(), headers={"content-type": "Application/JSON; charset=UTF-8"})
        assert fine.status_code == 200


async def test_a_body_over_the_cap_is_refused_whether_it_says_so_or_not() -> None:
    """By its announced length, and by what actually comes."""
    async with edge_setup(limits=Limits(max_body=1000)) as s:

        async def parts() -> Any:
            for _ in range(20):
                yield b"x" * 100

        check_envelope(await s.http.post(CHAT, content=b"x" * 1001, headers=JSON), 413)
        check_envelope(await s.http.post(CHAT, content=parts(), headers=JSON), 413)
        await check_alive(s)


async def test_a_request_too_large_for_the_bus_is_refused_with_numbers() -> None:
    """What cannot travel in one message is a 413, and the connection to the bus lives on."""
    async with edge_setup(max_payload=65_536, listen=False) as s:
        messages = [{"role": "user", "content": "x" * 70_000}]

        response = await s.http.post(CHAT, json=chat(messages=messages))

        check_envelope(response, 413)
        assert "65536" in response.json()["error"]["message"]
        await check_alive(s)
        assert s.edge.idle


async def test_a_body_shorter_than_announced_leaves_nothing_behind() -> None:
    """The connection closes before the body is complete: no task waits for the rest."""
    async with edge_setup() as s:
        host, port = s.edge.address or ("", 0)
        before = len(asyncio.all_tasks())
        for _ in range(5):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 1000\r\n\r\n{"
            )
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        await s.until(lambda: len(asyncio.all_tasks()) <= before)
        assert s.submits == []
        await check_alive(s)


async def test_a_body_that_never_comes_is_given_up() -> None:
    """A client that stalls in mid-body is told so after a while."""
    async with edge_setup(limits=Limits(body_limit_s=0.05)) as s:
        host, port = s.edge.address or ("", 0)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    assert head.startswith(b"HTTP/1.1 408 ")


async def test_what_is_not_http_gets_the_envelope_too() -> None:
    """Even the parser's own refusal."""
    async with edge_setup() as s:
        host, port = s.edge.address or ("", 0)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"NONSENSE\r\n\r\n")
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()

    assert answer.startswith(b"HTTP/1.1 400 ") and b"application/json" in answer and b'{"error":{' in answer


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("abc-123", True), ("a.*.>b c", True), ("x" * 128, True), ("x" * 129, False), ("x" * 5000, False),
        ("caf\u00e9", False), ("tab\there", False),
    ],
)  # fmt: skip
async def test_a_request_id_is_echoed_only_if_short_and_printable(given: str, echoed: bool) -> None:
    """It is never part of anything else: ids on the bus are ours."""
    async with edge_setup(listen=False) as s:
        good = await s.http.post(CHAT, json=chat(), headers={"x-request-id": given.encode("latin-1")})  # type: ignore[dict-item]
        bad = await s.http.post(CHAT, json={}, headers={"x-request-id": given.encode("latin-1")})  # type: ignore[dict-item]

        for response in (good, bad):
            assert response.headers.get("x-request-id") == (given if echoed else None)
        assert s.submits[0].request_id not in given and good.json()["id"] == "chatcmpl-" + s.submits[0].request_id


async def test_two_requests_under_one_client_id_are_two_requests() -> None:
    """Internal ids are unique whatever the client sends."""
    async with edge_setup(listen=False) as s:
        headers = {"x-request-id": "same"}
        both = await asyncio.gather(*(s.http.post(CHAT, json=chat(), headers=headers) for _ in range(2)))

        assert len({r.json()["id"] for r in both}) == 2
        assert len({x.request_id for x in s.submits}) == 2


async def test_headers_say_deadline_and_class_and_the_body_wins() -> None:
    """Both travel to admission; the tenant does not come from a header."""
    async with edge_setup(listen=False) as s:
        headers = {"x-request-deadline-ms": "5000", "x-request-class": "agent", "x-request-tenant": "evil"}
        wall = s.system.clock.wall()
        await s.http.post(CHAT, json=chat(), headers=headers)
        await s.http.post(CHAT, json=chat(deadline_ms=9000, **{"class": "batch"}), headers=headers)
        await s.http.post(CHAT, json=chat())
        first, second, third = s.submits

        assert abs(first.deadline - wall - 5) < 1 and first.request_class == "agent"
        assert abs(second.deadline - wall - 9) < 1 and second.request_class == "batch"
        assert abs(third.deadline - wall - 600) < 1 and third.request_class == "interactive"
        assert {x.tenant for x in s.submits} == {"default"}
        for name, value in (("x-request-deadline-ms", "soon"), ("x-request-class", "vip")):
            param = "deadline_ms" if "deadline" in name else "class"
            check_envelope(await s.http.post(CHAT, json=chat(), headers={name: value}), 400, param=param)


async def test_a_trace_context_is_kept_or_made() -> None:
    """A good `traceparent` travels on; a bad one is replaced."""
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    async with edge_setup(listen=False) as s:
        for value in (parent, "nonsense", "00-" + "0" * 32 + "-" + "cd" * 8 + "-01"):
            await s.http.post(CHAT, json=chat(), headers={"traceparent": value})

        assert s.submits[0].traceparent == parent
        for submit in s.submits[1:]:
            assert len(submit.traceparent) == 55 and submit.traceparent != parent


def test_a_deadline_that_passes_is_a_timeout_before_the_first_byte_and_an_event_after() -> None:
    """The edge ends it by itself, 0.7 s late, when nobody behind it does; the work is cancelled."""

    async def main(clock: VirtualClock) -> None:
        async with edge_setup(Answer(hold_at=0), clock=clock, listen=False) as s:
            begun = clock.now()
            whole = await s.http.post(CHAT, json=chat(deadline_ms=2000))
            assert 2.7 <= clock.now() - begun <= 2.8
            s.peer.answer = lambda _submit: Answer(hold_at=1)
            streamed = await s.http.post(CHAT, json=chat(deadline_ms=2000, stream=True))
            await s.until(lambda: len(s.peer.cancels) == 2)

            check_envelope(whole, 408, code="deadline_exceeded")
            assert whole.headers["x-should-retry"] == "false"
            assert streamed.status_code == 200
            assert streamed.text.count("data: ") == 2 and '"deadline_exceeded"' in streamed.text
            assert "[DONE]" not in streamed.text
            assert s.edge.idle

    run_virtual(main)


async def test_more_open_requests_than_allowed_are_refused() -> None:
    """With 429 and a time to come back; places come free again."""
    async with edge_setup(Answer(hold_at=0), max_open=2) as s:
        held = [asyncio.create_task(s.http.post(CHAT, json=chat())) for _ in range(2)]
        await s.until(lambda: len(s.peer.sessions) == 2)

        third = await s.http.post(CHAT, json=chat())
        check_envelope(third, 429, code="too_many_requests")
        assert third.headers["retry-after"] == "1"
        s.peer.release()
        assert [r.status_code for r in await asyncio.gather(*held)] == [200, 200]
        s.peer.answer = lambda _submit: Answer()
        await check_alive(s)
