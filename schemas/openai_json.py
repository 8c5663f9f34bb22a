"""JSON bodies to objects: strict, and clear about what is wrong with a body that is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from schemas.errors import BadRequest

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UINT64_MAX = 2**64 - 1
MAX_DEPTH = 250  # what the JSON encoder and msgpack can nest


def load_json(data: bytes) -> dict[str, Any]:
    """Parse a request body.

    Bare `NaN` and `Infinity`, numbers that overflow, text that is not UTF-8 and lone surrogates are refused.

    Raises:
        BadRequest: if the body is not a JSON object; `param` names the field where one is to blame.
    """
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise _explain(data, exc) from exc
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {json_type(body)}")
    return body


def check_sendable(body: Mapping[str, Any]) -> None:
    """Check that every value in a body can be encoded as JSON and travel on the bus.

    Raises:
        BadRequest: if it holds a lone surrogate, a key that is not a string, an integer beyond 64 bits, bytes, or
            nests too deeply; `param` names the place.
    """
    try:
        orjson.dumps(body)
    except (orjson.JSONEncodeError, TypeError, ValueError, RecursionError) as exc:
        found = _find_fault(body)
        if found is None:
            raise BadRequest("the body is nested too deeply") from exc
        param, problem = found
        raise BadRequest(f"{param} {problem}", param=param) from exc


def json_type(value: Any) -> str:
    """Name a value's JSON type for people."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, (list, tuple)):
        return "an array"
    if isinstance(value, Mapping):
        return "an object"
    return type(value).__name__


def _explain(data: bytes, exc: orjson.JSONDecodeError) -> BadRequest:
    if not data.strip():
        return BadRequest("the body is empty; it must be a JSON object")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as bad:
        return BadRequest(f"the body is not valid UTF-8 (at byte {bad.start})")
    # The lenient parser accepts what the strict one refuses, so that the field can be named.
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    found = _find_fault(body, numbers=True) if isinstance(body, dict) else None
    if found is not None:
        param, problem = found
        return BadRequest(f"{param} {problem}", param=param)
    return BadRequest(f"the body is not valid JSON: {exc}")


def _find_fault(root: Any, *, numbers: bool = False) -> tuple[str, str] | None:
    """Return path and description of the first value that cannot travel.

    The walk keeps one iterator per level, so that a large body costs no more memory than it has already.
    """
    problem = _fault(root, numbers)
    if problem is not None:
        return "body", problem
    path: list[str | int] = []
    levels = [_children(root)]
    while levels:
        entry = next(levels[-1], None)
        if entry is None:
            levels.pop()
            del path[-1:]
            continue
        key, child = entry
        path.append(key if isinstance(key, (int, str)) else str(key))
        problem = _key_fault(key) or _fault(child, numbers)
        if problem is not None:
            return _shown(path), problem
        if not isinstance(child, (list, tuple, Mapping)):
            path.pop()
        elif len(levels) >= MAX_DEPTH:
            return _shown(path), "is nested too deeply"
        else:
            levels.append(_children(child))
    return None


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return iter(value.items())
    return iter(enumerate(value)) if isinstance(value, (list, tuple)) else iter(())


def _key_fault(key: Any) -> str | None:
    """Say what is wrong with a key; positions in arrays are integers and come from us."""
    if isinstance(key, str):
        return None if _encodable(key) else "is a key with half of a surrogate pair, which is not text"
    return None if isinstance(key, int) else "is a key that is not a string"


def _fault(value: Any, numbers: bool) -> str | None:
    match value:
        case str():
            return None if _encodable(value) else "contains half of a surrogate pair, which is not text"
        case bool() | None | list() | tuple():
            return None
        case int():
            return None if INT64_MIN <= value <= UINT64_MAX else "is an integer beyond 64 bits"
        case float():
            return "must be a finite number" if numbers and not math.isfinite(value) else None
        case Mapping():
            if all(isinstance(k, str) for k in value):
                return None
            return "has a key that is not a string"
    return f"has a value of type {type(value).__name__}, which JSON does not know"


def _shown(path: list[str | int]) -> str:
    """Write a path as `messages[0].content`, of bounded length and as encodable text."""
    out = ""
    for step in path:
        out += f"[{step}]" if isinstance(step, int) else ("." if out else "") + step[:80]
        if len(out) > 200:
            break
    return out[:200].encode("utf-8", "replace").decode()


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
