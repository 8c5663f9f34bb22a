"""Penalties, biases, masks and min_tokens: checked before anything is computed, handed on unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schemas.errors import BadRequest
from schemas.openai import ACCEPTED, INPUT, ParsedRequest, load_json, parse_request
from schemas.openai_sampling import MAX_ALLOWED, MAX_BIASES, MAX_REPETITION_PENALTY, check_ids, chosen_ids
from schemas.record import Sampling


def complete(vocab_size: int | None = None, **extra: Any) -> ParsedRequest:
    """Parse a small completion."""
    return parse_request("completion", {"model": "m", "prompt": "hi", **extra}, vocab_size=vocab_size)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("api", ["chat", "completion"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("presence_penalty", v) for v in (2.01, -2.01, 3, NAN, INFINITY, "0", False, [1])],
        *[("frequency_penalty", v) for v in (2.01, -3, -INFINITY, NAN, "1", True, {})],
        *[("repetition_penalty", v) for v in (0, 0.0, -1, NAN, INFINITY, 1e7, "1", True)],
        *[("logit_bias", v) for v in ([], "x", 5, [["1", 2]], True)],
        *[("logit_bias", {k: 1}) for k in ("", "-1", "01", " 1", "1.0", "+1", "x", "٣", "2147483648", "9" * 400)],
        *[("logit_bias", {"7": v}) for v in (100.1, -101, NAN, INFINITY, -INFINITY, "1", None, True, [1], 10**18)],
        ("logit_bias", {str(i): 0 for i in range(MAX_BIASES + 1)}),
        *[("allowed_token_ids", v) for v in ([], "x", 5, {"1": 2}, [-1], [2**31], [1, 2.0], [True], ["1"], [None])],
        ("allowed_token_ids", [5] * (MAX_ALLOWED + 1)),
        *[("min_tokens", v) for v in (-1, 1.0, "1", True, 2**31, 17)],
    ],
)
def test_a_bad_value_is_refused_with_its_name(api: str, name: str, value: Any) -> None:
    """400 on both routes, both times alike; the message is short whatever was sent."""
    given = {"prompt": "hi"} if api == "completion" else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "m", "max_tokens": 16, **given, name: value}
    seen = []
    for _ in range(2):
        with pytest.raises(BadRequest) as caught:
            parse_request(api, body)
        seen.append(caught.value)

    assert seen[0].info() == seen[1].info()
    assert (seen[0].status, seen[0].param) == (400, name)
    assert 0 < len(seen[0].message) < 200


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"])
def test_numbers_that_json_does_not_know_are_refused_before(name: str, text: str) -> None:
    """In a body's bytes the field is named as well."""
    value = f'{{"7": {text}}}' if name == "logit_bias" else text

    with pytest.raises(BadRequest) as caught:
        load_json(f'{{"model": "m", "prompt": "hi", "{name}": {value}}}'.encode())

    assert caught.value.param in (name, "logit_bias.7")


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        *[("presence_penalty", v, v) for v in (-2, 2, 0.5, 0)],
        *[("frequency_penalty", v, v) for v in (-2.0, 2)],
        *[("repetition_penalty", v, v) for v in (1e-9, 1, 1.1, 1e6)],
        ("logit_bias", {}, {}),
        ("logit_bias", {"0": -100, "7": 100, "2147483647": 0.5}, {0: -100.0, 7: 100.0, 2147483647: 0.5}),
        ("allowed_token_ids", [9, 3, 9, 0], [0, 3, 9]),
        *[("min_tokens", v, v) for v in (0, 1, 16)],
    ],
)
def test_the_ends_of_every_range_are_accepted(name: str, value: Any, read: Any) -> None:
    """And reach the sampling parameters."""
    parsed = complete(max_tokens=16, **{name: value})

    assert getattr(parsed.sampling, name) == read
    assert parsed.unknown_fields == ()


@pytest.mark.parametrize(
    "name",
    [
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "min_tokens",
    ],
)  # fmt: skip
def test_null_means_absent(name: str) -> None:
    """As with every parameter."""
    assert complete(**{name: None}).sampling == complete().sampling


def test_what_is_settled_later_keeps_what_was_asked_for() -> None:
    """Seed and limit are filled in by admission; the rest stays."""
    parsed = complete(presence_penalty=1, logit_bias={"5": 2}, allowed_token_ids=[5], min_tokens=3)

    settled = parsed.settle(seed=9, max_tokens=30)

    assert settled == Sampling(
        presence_penalty=1.0, logit_bias={5: 2.0}, allowed_token_ids=[5], min_tokens=3, seed=9, max_tokens=30
    )


@pytest.mark.parametrize("extra", [{"logit_bias": {"100": 1}}, {"allowed_token_ids": [1, 100]}])
def test_ids_outside_the_vocabulary_are_refused(extra: dict[str, Any]) -> None:
    """By the parser where it knows the vocabulary, and by whoever learns it later; the last id is one."""
    (name,) = extra
    with pytest.raises(BadRequest) as early:
        complete(vocab_size=100, **extra)
    named = chosen_ids(complete(**extra).sampling)
    with pytest.raises(BadRequest) as late:
        check_ids(named, 100)

    assert early.value.param == late.value.param == name
    assert early.value.message == late.value.message
    assert "100" in early.value.message and "99" in early.value.message
    check_ids(named, 101)
    assert complete(vocab_size=101, **extra)
    assert chosen_ids(complete().sampling) == {}


def test_the_page_on_parameters_names_each_of_them() -> None:
    """And the bounds of lists that it states are the real ones."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "parameters.md").read_text()

    assert [name for name in (*ACCEPTED, *INPUT.values()) if f"`{name}`" not in page] == []
    assert f"{MAX_BIASES:,}" in page and f"{MAX_ALLOWED:,}" in page and f"{MAX_REPETITION_PENALTY:,.0f}" in page
