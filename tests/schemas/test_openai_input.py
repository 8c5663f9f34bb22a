"""Messages and prompts: every form that is accepted, and where a wrong one is."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.errors import BadRequest
from schemas.openai import ParsedRequest, parse_request


def chat(messages: Any) -> ParsedRequest:
    """Parse a chat."""
    return parse_request("chat", {"model": "m", "messages": messages})


def complete(prompt: Any, **extra: Any) -> ParsedRequest:
    """Parse a completion."""
    return parse_request("completion", {"model": "m", "prompt": prompt, **extra})


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
            "messages[0].content[1]",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "content": "x", "audio": {"id": "a"}}], "messages[0].audio"),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(messages: Any, param: str) -> None:
    """The whole request is refused; `param` is the path."""
    with pytest.raises(BadRequest) as caught:
        chat(messages)

    assert caught.value.param == param


def test_messages_of_every_role_come_out_in_one_form() -> None:
    """Text parts are joined by line breaks; an assistant that calls tools may say nothing."""
    parsed = chat(
        [
            {"role": "system", "content": "s"},
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "content": "r", "tool_call_id": "c1", "extra": 1},
        ]
    )

    assert [m["role"] for m in parsed.messages] == ["system", "developer", "user", "assistant", "tool"]
    assert parsed.messages[2] == {"role": "user", "content": "a\nb", "name": "n"}
    assert parsed.messages[3] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert parsed.messages[4]["tool_call_id"] == "c1"
    assert parsed.unknown_fields == ("messages[].extra",)


@pytest.mark.parametrize("messages", [[{"role": "user", "content": ""}], [{"role": "system", "content": "be brief"}]])
def test_a_chat_without_words_of_a_user_is_accepted(messages: Any) -> None:
    """The template gives the model something to read."""
    assert len(chat(messages).messages) == 1


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (["a", 5], "prompt[1]"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([[1, 2**31]], "prompt[0][1]"),
        ({"a": 1}, "prompt"),
        (5, "prompt"),
    ],
)
def test_a_wrong_prompt_is_refused_with_its_index(prompt: Any, param: str) -> None:
    """One bad entry refuses the whole list."""
    for _ in range(10):
        with pytest.raises(BadRequest) as caught:
            complete(prompt)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "form", "prompts"),
    [
        ("a", "string", ("a",)),
        (["a", "b"], "strings", ("a", "b")),
        ([1, 2], "ids", ([1, 2],)),
        ([[1], [2, 3]], "id_lists", ([1], [2, 3])),
    ],
)
def test_every_form_of_a_prompt_is_understood(prompt: Any, form: str, prompts: tuple[Any, ...]) -> None:
    """Choices are prompts times n."""
    parsed = complete(prompt, n=2)

    assert (parsed.prompts_form, parsed.prompts) == (form, prompts)
    assert parsed.num_choices == 2 * len(prompts)


def test_token_ids_are_checked_against_the_vocabulary_where_it_is_known() -> None:
    """The last id is the vocabulary's size less one."""
    body = {"model": "m", "prompt": [1, 9]}
    assert parse_request("completion", body, vocab_size=10).prompts == ([1, 9],)

    with pytest.raises(BadRequest) as caught:
        parse_request("completion", body, vocab_size=9)

    assert caught.value.param == "prompt[1]"


def test_the_number_of_choices_is_bounded() -> None:
    """Many prompts with many choices each are refused before anything is allocated."""
    with pytest.raises(BadRequest) as caught:
        complete(["a"] * 17, n=64)

    assert caught.value.param == "prompt" and "1088" in caught.value.message
