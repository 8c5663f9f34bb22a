"""A strict reader of event streams, for tests."""

from __future__ import annotations

from typing import Any

import orjson

DONE = "[DONE]"


def events(body: str) -> list[Any]:
    """Return the data of every event, `DONE` as itself; anything but data and comments is an error."""
    assert body.endswith("\n\n"), body[-80:]
    out: list[Any] = []
    for block in body[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        out.append(DONE if data == DONE else orjson.loads(data))
    return out


def comments(body: str) -> int:
    """Return how many comments there are."""
    return sum(block.startswith(":") for block in body.split("\n\n"))


def texts(chunks: list[Any]) -> dict[int, str]:
    """Join the deltas of every choice."""
    out: dict[int, str] = {}
    for chunk in chunks:
        if chunk == DONE:
            continue
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            out[choice["index"]] = out.get(choice["index"], "") + (piece or "")
    return out


def finishes(chunks: list[Any]) -> list[tuple[int, str]]:
    """Return index and reason of every finish, in order."""
    return [
        (choice["index"], choice["finish_reason"])
        for chunk in chunks
        if chunk != DONE
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    ]
