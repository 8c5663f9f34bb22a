"""Typed readers for the fields of a request body; null means absent, and types are checked before ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from schemas.errors import BadRequest
from schemas.openai_json import json_type


def read_bool(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """Read a boolean.

    Raises:
        BadRequest: if it is anything else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(name, "a boolean", value)
    return value


def read_int(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """Read an integer in `[low, high]`; booleans, strings and numbers with a fraction or exponent are none.

    Raises:
        BadRequest: if it is not such an integer.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer", value)
    if not low <= value <= high:
        raise BadRequest(f"{name} must be between {low} and {high}, got {value}", param=name)
    return value


def read_number(
    body: Mapping[str, Any], name: str, default: float, low: float, high: float, *, open_low: bool = False
) -> float:
    """Read a finite number in `[low, high]`, or in `(low, high]` with `open_low`.

    Raises:
        BadRequest: if it is not such a number.
    """
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type(name, "a number", value)
    if not math.isfinite(value):
        raise BadRequest(f"{name} must be a finite number", param=name)
    if value < low or value > high or (open_low and value == low):
        bounds = f"greater than {low:g} and at most {high:g}" if open_low else f"between {low:g} and {high:g}"
        raise BadRequest(f"{name} must be {bounds}, got {value:g}", param=name)
    return float(value)


def read_string(body: Mapping[str, Any], name: str) -> str | None:
    """Read a string.

    Raises:
        BadRequest: if it is anything else.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    return value


def read_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Read an object.

    Raises:
        BadRequest: if it is anything else.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong_type(name, "an object", value)
    return value


def wrong_type(name: str, wanted: str, value: Any) -> BadRequest:
    """Return the error for a value of a wrong type."""
    return BadRequest(f"{name} must be {wanted}, not {json_type(value)}", param=name)
