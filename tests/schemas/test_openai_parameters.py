"""Parameters: types before ranges, ranges exact, known ones honoured or refused, unknown ones reported."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.errors import BadRequest, ContextTooLong, HeadraceError, ModelNotFound
from schemas.openai import REFUSED, ParsedRequest, check_context, parse_deadline_header, parse_request


def complete(**extra: Any) -> ParsedRequest:
    """Parse a small completion."""
    return parse_request("completion", {"model": "m", "prompt": "hi", **extra})


def refused(**extra: Any) -> HeadraceError:
    """Return the error for a small completion, the same at both of two tries."""
    seen = []
    for _ in range(2):
        with pytest.raises(BadRequest) as caught:
            complete(**extra)
        seen.append(caught.value)
    assert seen[0].info() == seen[1].info()
    return seen[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", v) for v in (0, -1, 1.5, "5", 1e12, True, 10**12, [])],
        *[("max_completion_tokens", v) for v in (0, 1.0, False)],
        *[("temperature", v) for v in (-1, -0.01, 2.1, float("nan"), float("inf"), "1", True)],
        *[("top_p", v) for v in (0, 0.0, 1.1, -0.1, float("nan"), False)],
        *[("top_k", v) for v in (0, -2, 1.0, "1")],
        *[("min_p", v) for v in (-0.1, 1.1, float("nan"))],
        *[("n", v) for v in (0, -1, 65, 10_000, 1.0, True)],
        *[("seed", v) for v in (2**63, 2**70, -(2**63) - 1, 1.0, float(2**70), "1", True)],
        *[("stop", v) for v in ("", [""], ["a", ""], list("abcde"), 5, [5], {"a": 1})],
        *[("stream", v) for v in ("true", 1, [])],
        *[("ignore_eos", v) for v in (1, "true")],
        *[("deadline_ms", v) for v in (0, -1, 1.5, "1", 86_400_001)],
        *[("class", v) for v in ("urgent", "", 1)],
        *[("user", v) for v in (1, ["a"])],
        *[("metadata", v) for v in ("a", [1])],
        *[("top_logprobs", v) for v in (0, 5, 21)],
        *[("logprobs", v) for v in (True, 0, 5)],
        *[("tools", v) for v in ([], [{"type": "function"}], {})],
        *[("tool_choice", v) for v in ("required", {"type": "function"})],
        *[("response_format", v) for v in ({"type": "json_object"}, "text", {})],
        *[("messages", v) for v in ([], [{"role": "user", "content": "x"}])],
        ("echo", True),
        ("suffix", ""),
        ("best_of", 2),
        ("skip_special_tokens", False),
        ("prompt_cache_key", "k"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(name: str, value: Any) -> None:
    """The same answer both times, and `param` is the field."""
    error = refused(**{name: value})

    assert error.status == 400
    assert error.param == name
    assert error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1), ("max_tokens", 2**31 - 1), ("temperature", 0), ("temperature", 2), ("temperature", 2.0),
        ("top_p", 1), ("top_p", 1e-9), ("top_k", -1), ("top_k", 1), ("min_p", 0), ("min_p", 1), ("n", 1), ("n", 64),
        ("seed", 0), ("seed", -(2**63)), ("seed", 2**63 - 1), ("stop", "a"), ("stop", list("abcd")), ("stop", []),
        ("deadline_ms", 1), ("deadline_ms", 86_400_000), ("class", "interactive"), ("class", "agent"),
        ("class", "batch"), ("user", "u"), ("metadata", {"a": "b"}), ("ignore_eos", True), ("stream", True),
    ],
)  # fmt: skip
def test_the_ends_of_every_range_are_accepted(name: str, value: Any) -> None:
    """Ranges are closed where the text says so."""
    parsed = complete(**{name: value})

    assert parsed.model == "m"


def test_values_reach_the_sampling_parameters() -> None:
    """What is accepted is handed on unchanged."""
    parsed = complete(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=-7, stop=["x", "y"], max_tokens=9, ignore_eos=True, n=3,
        deadline_ms=1500, stream=True, stream_options={"include_usage": True}, **{"class": "agent"},
    )  # fmt: skip

    s = parsed.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.stop, s.ignore_eos) == (0.5, 0.9, 40, 0.1, ["x", "y"], True)
    assert (parsed.seed, parsed.max_tokens, parsed.n, parsed.num_choices) == (-7, 9, 3, 3)
    assert (parsed.deadline_ms, parsed.request_class) == (1500, "agent")
    assert (parsed.stream, parsed.include_usage) == (True, True)
    assert parsed.settle(seed=4, max_tokens=8).model_dump()["seed"] == 4
    assert parsed.settle(seed=4, max_tokens=8).max_tokens == 8


def test_what_is_left_out_is_left_to_admission() -> None:
    """A missing seed and a missing limit are None, never a silent number."""
    parsed = complete()

    assert parsed.seed is None
    assert parsed.max_tokens is None
    assert parsed.request_class is None and parsed.deadline_ms is None
    assert parsed.sampling.temperature == 1.0 and parsed.sampling.top_k == -1


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_known_parameter_may_say_that_it_is_off(name: str) -> None:
    """Null and each value that means "off" pass and are not reported as unknown."""
    for value in (None, *REFUSED[name]):
        assert complete(**{name: value}).unknown_fields == ()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_known_parameter_that_asks_for_something_is_refused(name: str) -> None:
    """Nothing that is known is dropped in silence."""
    assert refused(**{name: {"some": "thing"}}).param == name


def test_unknown_fields_are_accepted_and_reported() -> None:
    """They are listed so that they can be logged, shortened and not without bound."""
    many = {f"field-{i:03}": i for i in range(100)}

    parsed = complete(**many, **{"x" * 1000: 1})

    assert len(parsed.unknown_fields) == 20
    assert max(map(len, parsed.unknown_fields)) <= 60
    assert complete(zzz=1).unknown_fields == ("zzz",)


def test_stream_options_need_a_stream() -> None:
    """Asked for without `stream`, or with something that is not there yet, they are refused by name."""
    assert refused(stream_options={"include_usage": True}).param == "stream_options"
    assert refused(stream_options={}, stream=False).param == "stream_options"
    assert refused(stream=True, stream_options=[]).param == "stream_options"
    assert refused(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"
    continuous = refused(stream=True, stream_options={"continuous_usage_stats": True})
    assert continuous.param == "stream_options.continuous_usage_stats"
    assert complete(stream=True, stream_options={"include_usage": None}).include_usage is False
    assert complete(stream_options=None).include_usage is False


def test_two_names_for_one_limit_must_agree() -> None:
    """`max_tokens` and `max_completion_tokens` are the same thing."""
    assert complete(max_completion_tokens=5).max_tokens == 5
    assert complete(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert refused(max_completion_tokens=5, max_tokens=6).param == "max_completion_tokens"


def test_an_unknown_model_is_reported_before_anything_else() -> None:
    """404 with `param` model, also when the rest of the body is wrong."""
    with pytest.raises(ModelNotFound) as caught:
        parse_request("chat", {"model": "nope", "messages": 5, "temperature": "hot"}, models=["m"])

    assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")


@pytest.mark.parametrize("model", [None, "", 5, ["m"]])
def test_a_model_must_be_named(model: Any) -> None:
    """There is no default model."""
    with pytest.raises(BadRequest) as caught:
        parse_request("completion", {"model": model, "prompt": "hi"}, models=["m"])

    assert caught.value.param == "model"


def test_a_prompt_must_leave_room_in_the_context_window() -> None:
    """A prompt of L tokens is too long for a window of L; the error names the limit and the count."""
    assert check_context(99, None, 100) == 1
    for prompt in (100, 101):
        with pytest.raises(ContextTooLong) as caught:
            check_context(prompt, None, 100, param="messages")
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
        assert "100" in caught.value.message and str(prompt) in caught.value.message


def test_max_tokens_are_never_clamped_in_silence() -> None:
    """Prompt and answer together must fit; else the error names both numbers and the limit."""
    assert check_context(8, 91, 100) == 91
    assert check_context(8, 92, 100) == 92
    for asked in (93, 100):
        with pytest.raises(ContextTooLong) as caught:
            check_context(8, asked, 100)
        assert caught.value.param == "max_tokens"
        for number in ("100", "8", str(asked)):
            assert number in caught.value.message.replace(",", " ").split()


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1e3", "abc", "86400001", "9" * 30, "\u0665"])
def test_a_malformed_deadline_header_is_refused(text: str) -> None:
    """The header follows the same range as the field."""
    with pytest.raises(BadRequest) as caught:
        parse_deadline_header(text)

    assert caught.value.param == "deadline_ms"


def test_a_deadline_header_is_read() -> None:
    """Blanks around it do not matter."""
    assert parse_deadline_header(" 1500 ") == 1500
