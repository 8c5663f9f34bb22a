"""Penalties, biases, masks and min_tokens over HTTP: refused by name with nothing opened, or handed on as they came."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.edge_peer import chat, completion, edge_setup

pytestmark = pytest.mark.anyio

ROUTES = (("/v1/chat/completions", chat), ("/v1/completions", completion))


@pytest.mark.slow
async def test_values_out_of_range_are_refused_twice_alike_and_open_nothing() -> None:
    """Streamed and not, on both routes: status 400 with `param`, no event stream, no request on the bus."""
    bad: list[dict[str, Any]] = [
        {"presence_penalty": -2.5}, {"frequency_penalty": 2.5}, {"frequency_penalty": "1"}, {"repetition_penalty": 0},
        {"repetition_penalty": -1}, {"logit_bias": {"5": 101}}, {"logit_bias": {"five": 1}}, {"logit_bias": [5, 1]},
        {"logit_bias": {str(i): 1 for i in range(1025)}}, {"allowed_token_ids": []}, {"allowed_token_ids": [-1]},
        {"allowed_token_ids": list(range(4097))}, {"min_tokens": -1}, {"min_tokens": 10**6},
    ]  # fmt: skip
    async with edge_setup(listen=False) as s:
        for extra in bad:
            (name,) = extra
            for path, body in ROUTES:
                for stream in (False, True):
                    sent = body(stream=stream, max_tokens=16, **extra)
                    first, second = [await s.http.post(path, json=sent) for _ in range(2)]
                    assert first.status_code == 400
                    assert first.headers["content-type"].startswith("application/json")
                    assert first.json()["error"]["param"] == name
                    assert first.json()["error"]["type"] == "invalid_request_error"
                    assert first.content == second.content
        assert s.submits == []


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"])
async def test_bare_numbers_that_json_does_not_know_are_refused_by_name(name: str, text: str) -> None:
    """They never become a float here."""
    async with edge_setup(listen=False) as s:
        response = await s.http.post(
            "/v1/completions",
            content=f'{{"model":"tiny","prompt":"x","{name}":{text}}}'.encode(),
            headers={"content-type": "application/json"},
        )

        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        assert s.submits == []


async def test_values_in_range_go_to_admission_unchanged() -> None:
    """The body travels as it came; admission reads it by the same rules."""
    asked: dict[str, Any] = {
        "presence_penalty": 2, "frequency_penalty": -2.0, "repetition_penalty": 1.1, "min_tokens": 4,
        "logit_bias": {"0": -100, "49151": 100.0}, "allowed_token_ids": [0, 7, 49151],
    }  # fmt: skip
    async with edge_setup(listen=False) as s:
        for path, body in ROUTES:
            assert (await s.http.post(path, json=body(max_tokens=16, **asked))).status_code == 200

        assert len(s.submits) == 2
        for submit in s.submits:
            assert {name: submit.body[name] for name in asked} == asked
