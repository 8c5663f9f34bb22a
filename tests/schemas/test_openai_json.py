"""Bodies to objects: what is refused, and that the message says where."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import BadRequest
from schemas.openai import check_sendable, load_json, parse_request


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"temperature": NaN}', "temperature"),
        (b'{"temperature": -Infinity}', "temperature"),
        (b'{"temperature": 1e400}', "temperature"),
        (b'{"messages": [{"content": "hi \\ud83d"}]}', "messages[0].content"),
        (b'{"messages": [{"content": "hi \\ude00"}]}', "messages[0].content"),
        (b'{"stop": ["\\ude00\\ud83d"]}', "stop[0]"),
        (b'{"user": "\\ud83d"}', "user"),
        (b'{"a": {"b\\ud83d": 1}}', "a.b?"),
        (b'{"user": "\xff"}', None),
        (b"", None),
        (b"  ", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'"text"', None),
        (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", None),
    ],
)
def test_a_body_that_is_no_clean_object_is_refused_by_name(data: bytes, param: str | None) -> None:
    """The error is a 400 whose param is the field to blame, where there is one."""
    with pytest.raises(BadRequest) as caught:
        load_json(data)

    assert caught.value.status == 400
    if param is not None:
        assert caught.value.param == param
    orjson.dumps(caught.value.envelope())


def test_a_surrogate_pair_in_two_escapes_is_one_character() -> None:
    """Only halves are refused."""
    body = load_json(b'{"user": "\\ud83d\\ude00"}')

    assert body == {"user": "\U0001f600"}


@pytest.mark.parametrize(
    "body",
    [
        {"user": "\ud83d"},
        {"metadata": {"\ude00": 1}},
        {"metadata": {"a": [{"b": "x\udc00"}]}},
        {"seed": 2**70},
        {"metadata": {1: 2}},
        {"metadata": b"bytes"},
    ],
)
def test_what_cannot_travel_is_refused_from_native_clients_too(body: dict[str, object]) -> None:
    """A body that did not come through strict JSON is checked just the same."""
    request = {"model": "m", "prompt": "hi", **body}

    with pytest.raises(BadRequest) as caught:
        parse_request("completion", request)

    name = next(iter(body))
    assert caught.value.param is not None and caught.value.param.startswith(name)
    orjson.dumps(caught.value.envelope())


def test_deep_nesting_is_refused_and_not_a_crash() -> None:
    """Neither the walk nor the message depends on the depth."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]

    with pytest.raises(BadRequest) as caught:
        check_sendable({"metadata": {"a": deep}})

    assert len(caught.value.message) < 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_a_bad_request(data: bytes) -> None:
    """No input raises anything else."""
    try:
        body = load_json(data)
    except BadRequest as exc:
        orjson.dumps(exc.envelope())
    else:
        assert isinstance(body, dict)


@given(
    st.sampled_from(["chat", "completion"]), st.dictionaries(st.text(max_size=4), json_values, max_size=3), json_values
)
def test_any_value_in_any_field_is_accepted_or_a_bad_request(api: str, extra: dict[str, object], value: object) -> None:
    """The checks never fail in another way."""
    base = (
        {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        if api == "chat"
        else {"model": "m", "prompt": "x"}
    )
    for name in (
        "messages" if api == "chat" else "prompt",
        "stop",
        "temperature",
        "seed",
        "stream_options",
        "logprobs",
    ):
        try:
            parse_request(api, {**base, **extra, name: value})
        except BadRequest as exc:
            orjson.dumps(exc.envelope())
