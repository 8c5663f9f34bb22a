"""Typed look-ups in what a model file says about itself, and careful JSON. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import ModelFileError

MAX_SIDE_NBYTES = 256 << 20


class Fields:
    """Values under keys; whatever is missing or of a wrong type is a `ModelFileError` that names the key."""

    def __init__(self, path: Path, values: Mapping[str, Any], what: str) -> None:
        """Look up in `values`, which `path` calls `what` in messages ("metadata", "key", …)."""
        self.path = path
        self.values = values
        self.what = what

    def error(self, key: str, problem: str) -> ModelFileError:
        """Return the error that says what is wrong with a key."""
        return ModelFileError(self.path, f"{self.what} {key!r} {problem}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "is missing")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {value!r:.80}, not a text")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        """Return an integer in [low, high]."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, f"is {value!r:.80}, not an integer in [{low}, {high}]")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.error(key, f"is {value!r:.80}, not a positive number")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r:.80}, neither true nor false")
        return value


def parse_json(path: Path, what: str, data: bytes, *, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in `data`.

    Args:
        what: what `data` is, for messages.
        unique: refuse an object in which a key occurs twice.

    Raises:
        ModelFileError: not UTF-8, not JSON, no object, nested too deeply, or a key occurs twice where it must not.
    """
    hook = _unique if unique else None
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=hook)
    except UnicodeDecodeError as error:
        raise ModelFileError(path, f"corrupt: {what} is not UTF-8") from error
    except RecursionError as error:
        raise ModelFileError(path, f"corrupt: {what} nests too deeply") from error
    except ValueError as error:  # JSONDecodeError, a key that occurs twice, a number of thousands of digits
        raise ModelFileError(path, f"corrupt: {what} is not JSON: {error!s:.200}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, f"corrupt: {what} is no JSON object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        ModelFileError: it cannot be read, is larger than 256 MiB, or is no JSON object.
    """
    return parse_json(path, "the file", read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """Return the contents of a side file.

    Raises:
        ModelFileError: it cannot be read, or is larger than 256 MiB.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) > MAX_SIDE_NBYTES:
                raise ModelFileError(path, f"larger than {MAX_SIDE_NBYTES >> 20} MiB")
            file.seek(0)
            return file.read()
    except OSError as error:
        raise ModelFileError(path, f"cannot be opened: {error.strerror or error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r:.80} occurs twice")
            seen.add(key)
    return found
