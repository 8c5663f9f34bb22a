"""What a request asks about: the messages of a chat, the prompts of a completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from schemas.errors import BadRequest
from schemas.openai_fields import wrong_type
from schemas.openai_json import json_type

ROLES = ("system", "developer", "user", "assistant", "tool")
PromptsForm = Literal["string", "strings", "ids", "id_lists"]
MAX_TOKEN_ID = 2**31 - 1

_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_REFUSED_IN_MESSAGES = ("audio", "function_call", "refusal")


def parse_messages(value: Any) -> tuple[tuple[dict[str, Any], ...], frozenset[str]]:
    """Check the messages of a chat and bring them into one form: `content` is a string or None.

    Text parts are joined by line breaks. Returns the messages and the names of fields that nobody knows.

    Raises:
        BadRequest: naming the message, as in `messages[2].content[0]`.
    """
    if value is None:
        raise BadRequest("messages is required", param="messages")
    if not isinstance(value, list):
        raise wrong_type("messages", "an array", value)
    if not value:
        raise BadRequest("messages must not be empty", param="messages")
    unknown: set[str] = set()
    out = tuple(_message(m, f"messages[{i}]", unknown) for i, m in enumerate(value))
    return out, frozenset(unknown)


def _message(value: Any, path: str, unknown: set[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type(path, "an object", value)
    role = value.get("role")
    if not isinstance(role, str):
        raise wrong_type(f"{path}.role", "a string", role)
    if role not in ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}, got {role[:40]!r}", param=f"{path}.role")
    for name in _REFUSED_IN_MESSAGES:
        if value.get(name) is not None:
            raise BadRequest(f"{path}.{name} is not supported", param=f"{path}.{name}")
    unknown.update(f"messages[].{k}" for k in value if k not in _MESSAGE_FIELDS and k not in _REFUSED_IN_MESSAGES)
    message: dict[str, Any] = {"role": role, "content": _content(value.get("content"), f"{path}.content")}
    for name in ("name", "tool_call_id"):
        text = value.get(name)
        if text is not None:
            if not isinstance(text, str):
                raise wrong_type(f"{path}.{name}", "a string", text)
            message[name] = text
    calls = value.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            raise BadRequest(f"{path}.tool_calls belongs to assistant messages only", param=f"{path}.tool_calls")
        message["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    if message["content"] is None and "tool_calls" not in message:
        raise BadRequest(f"{path}.content is required", param=f"{path}.content")
    return message


def _content(value: Any, path: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(path, "a string or an array of text parts", value)
    if not value:
        raise BadRequest(f"{path} must not be an empty array", param=path)
    texts: list[str] = []
    for j, part in enumerate(value):
        where = f"{path}[{j}]"
        if not isinstance(part, Mapping):
            raise wrong_type(where, "an object", part)
        if part.get("type") != "text":
            raise BadRequest(
                f"{where} has type {str(part.get('type'))[:40]!r}; only text parts are supported", param=where
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise BadRequest(f"{where}.text must be a string, not {json_type(text)}", param=f"{where}.text")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong_type(path, "an array", value)
    if not value:
        raise BadRequest(f"{path} must not be an empty array", param=path)
    out = []
    for j, call in enumerate(value):
        where = f"{path}[{j}]"
        if not isinstance(call, Mapping):
            raise wrong_type(where, "an object", call)
        if call.get("type", "function") != "function":
            raise BadRequest(f"{where}.type must be 'function'", param=f"{where}.type")
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise wrong_type(f"{where}.function", "an object", function)
        name, arguments, call_id = function.get("name"), function.get("arguments", ""), call.get("id", "")
        checked = ((name, "function.name"), (arguments, "function.arguments"), (call_id, "id"))
        for text, field in checked:
            if not isinstance(text, str):
                raise wrong_type(f"{where}.{field}", "a string", text)
        out.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return out


def parse_prompts(value: Any, vocab_size: int | None) -> tuple[PromptsForm, tuple[str | list[int], ...]]:
    """Check a completion's prompts: a string, strings, token ids, or lists of token ids; none may be empty.

    Raises:
        BadRequest: naming the prompt, as in `prompt[1]`; one bad entry refuses the whole list.
    """
    if value is None:
        raise BadRequest("prompt is required", param="prompt")
    if isinstance(value, str):
        if not value:
            raise BadRequest("prompt must not be empty", param="prompt")
        return "string", (value,)
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string or an array", value)
    if not value:
        raise BadRequest("prompt must not be empty", param="prompt")
    first = value[0]
    if isinstance(first, str):
        for i, text in enumerate(value):
            if not isinstance(text, str):
                raise wrong_type(f"prompt[{i}]", "a string like the entries before it", text)
            if not text:
                raise BadRequest(f"prompt[{i}] must not be empty", param=f"prompt[{i}]")
        return "strings", tuple(value)
    if isinstance(first, list):
        for i, ids in enumerate(value):
            if not isinstance(ids, list):
                raise wrong_type(f"prompt[{i}]", "an array of token ids like the entries before it", ids)
            if not ids:
                raise BadRequest(f"prompt[{i}] must not be empty", param=f"prompt[{i}]")
            _token_ids(ids, f"prompt[{i}]", vocab_size)
        return "id_lists", tuple(value)
    _token_ids(value, "prompt", vocab_size)
    return "ids", (value,)


def _token_ids(ids: list[Any], path: str, vocab_size: int | None) -> None:
    limit = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise wrong_type(f"{path}[{i}]", "a token id", token)
        if not 0 <= token <= limit:
            raise BadRequest(f"{path}[{i}]: token id {token} is not in [0, {limit}]", param=f"{path}[{i}]")


def parse_stop(body: Mapping[str, Any]) -> list[str]:
    """Read the stop strings: absent, one, or up to four; none empty.

    Raises:
        BadRequest: if there are more, or one is empty or no string.
    """
    value = body.get("stop")
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise wrong_type("stop", "a string or an array of strings", value)
    if len(value) > 4:
        raise BadRequest(f"stop may hold at most 4 strings, got {len(value)}", param="stop")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise BadRequest(f"stop[{i}] must be a string, not {json_type(text)}", param="stop")
        if not text:
            raise BadRequest("stop must not hold an empty string", param="stop")
    return list(value)
