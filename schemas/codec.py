"""Control messages to bytes and back: `[version, type, sender, body]` in msgpack."""

from __future__ import annotations

from typing import Any

import msgpack
from pydantic import ValidationError

from schemas.messages import MESSAGES, Message
from schemas.subjects import Ref

PROTOCOL_VERSION = 1


class DecodeError(ValueError):
    """Raised when bytes from the bus are not a message of this protocol version."""


def encode(message: Message, sender: Ref | None = None) -> bytes:
    """Encode a control message."""
    body = message.model_dump(exclude_defaults=True)
    origin = sender.wire() if sender is not None else None
    packed: bytes = msgpack.packb([PROTOCOL_VERSION, type(message).__name__, origin, body], use_bin_type=True)
    return packed


def decode(data: bytes) -> tuple[Message, Ref | None]:
    """Decode a control message; returns it with its sender.

    Raises:
        DecodeError: if the bytes are malformed, of another version, or of an unknown type.
    """
    version, kind, origin, body = split(data)
    model = MESSAGES.get(kind)
    if model is None:
        raise DecodeError(f"unknown message type {kind!r}")
    try:
        message = model.model_validate(body)
        sender = Ref(*origin) if origin is not None else None
    except (ValidationError, TypeError) as exc:
        raise DecodeError(f"malformed {kind}: {exc}") from exc
    return message, sender


def split(data: bytes) -> tuple[int, str, list[str] | None, Any]:
    """Open an envelope without looking into its body; hot messages have a list for a body.

    Raises:
        DecodeError: if the bytes are not an envelope of this protocol version.
    """
    try:
        version, kind, origin, body = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as exc:
        raise DecodeError(f"not an envelope: {exc}") from exc
    if version != PROTOCOL_VERSION:
        raise DecodeError(f"protocol version {version!r}, this node speaks {PROTOCOL_VERSION}")
    if not isinstance(kind, str):
        raise DecodeError("the message type is not a string")
    return version, kind, origin, body


def encode_hot(kind: str, sender: Ref | None, body: list[Any]) -> bytes:
    """Encode a hot message (items, acks, frames): the same envelope around a bare array."""
    origin = sender.wire() if sender is not None else None
    packed: bytes = msgpack.packb([PROTOCOL_VERSION, kind, origin, body], use_bin_type=True)
    return packed
