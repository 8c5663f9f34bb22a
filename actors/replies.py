"""Frames to whoever asked, and a native client's words back: the one place that knows both encodings."""

from __future__ import annotations

from typing import Any, Literal

import msgpack
import orjson

from runtime.actor import Context
from schemas import subjects
from schemas.errors import BadRequest
from schemas.items import FRAMES
from schemas.openai import load_json
from schemas.record import ReplyTo


def write(context: Context, reply: ReplyTo, request_id: str, frame: dict[str, Any]) -> None:
    """Send one frame: to an edge's mailbox, or to a native client's inbox with a subject to acknowledge on."""
    if reply.mode == "mailbox":
        context.send_hot(subjects.parse_mailbox(reply.subject), FRAMES, [frame])
        return
    data = orjson.dumps(frame) if reply.encoding == "json" else msgpack.packb(frame, use_bin_type=True)
    end = frame.get("terminal") is not None
    context.publish(reply.subject, data, reply=subjects.ack(context.ref, request_id, end=end))


def read(data: bytes, encoding: Literal["json", "msgpack"]) -> dict[str, Any]:
    """Read a native client's body.

    Raises:
        BadRequest: if it is not an object of that encoding with text keys.
    """
    if encoding == "json":
        return load_json(data)
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as exc:
        raise BadRequest(f"the body is not msgpack: {exc}") from exc
    if not isinstance(body, dict) or not all(isinstance(k, str) for k in body):
        raise BadRequest("the body is not a map with text keys")
    return body
