"""HTTP requests in: bodies with a cap and a time limit, and the headers that matter."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive

from runtime.telemetry import parse_traceparent
from schemas.errors import BadRequest, DeadlineExceeded, TooLarge, UnsupportedMediaType
from schemas.openai import ParsedRequest, RequestClass, parse_class, parse_deadline_header

MAX_REQUEST_ID = 128


class ClientLeft(Exception):
    """Raised when the connection closed before the request was complete: there is nobody to answer."""


class ReaderStalled(ClientLeft):
    """Raised when the client takes nothing of its answer for too long; its connection is of no use any more."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request's headers and body say together; the body wins."""

    deadline_s: float
    request_class: RequestClass
    traceparent: str


def check_content(headers: Headers, max_body: int) -> None:
    """Check what a body claims to be, before it is read.

    Raises:
        UnsupportedMediaType: if it is not plain JSON.
        BadRequest: if its length is no number.
        TooLarge: if it says that it is larger than `max_body`.
    """
    content_type = headers.get("content-type", "application/json")
    media, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if media != "application/json":
        raise UnsupportedMediaType("the content type must be application/json")
    for parameter in parameters:
        if parameter.startswith("charset=") and parameter[8:].strip('"') not in ("utf-8", "utf8"):
            raise UnsupportedMediaType("the charset must be utf-8")
    if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise UnsupportedMediaType("encoded bodies are not supported")
    length = headers.get("content-length")
    if length is not None:
        if not (length.isascii() and length.isdigit()):
            raise BadRequest("Content-Length is no number")
        if len(length) > 18 or int(length) > max_body:
            raise too_large(max_body)


async def read_body(receive: Receive, *, max_body: int, limit_s: float) -> bytes:
    """Read a whole body.

    Raises:
        TooLarge: once more than `max_body` bytes have come.
        ClientLeft: if the connection closes first.
        DeadlineExceeded: if it is not complete within `limit_s`.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limit_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                part = message.get("body", b"")
                size += len(part)
                if size > max_body:
                    raise too_large(max_body)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as exc:
        raise DeadlineExceeded(f"the body was not complete within {limit_s:g} s", code="body_timeout") from exc


def too_large(max_body: int) -> TooLarge:
    """Return the error for a body over the cap."""
    return TooLarge(f"the body is larger than the limit of {max_body} bytes")


def read_terms(headers: Headers, parsed: ParsedRequest, default_deadline_s: float) -> Terms:
    """Combine a request's headers with its body.

    Raises:
        BadRequest: if a header is malformed.
    """
    deadline_ms = parsed.deadline_ms
    header = headers.get("x-request-deadline-ms")
    if header is not None:
        from_header = parse_deadline_header(header)
        deadline_ms = deadline_ms if deadline_ms is not None else from_header
    request_class = parsed.request_class or parse_class(headers.get("x-request-class"), "class") or "interactive"
    traceparent = headers.get("traceparent", "").strip()
    return Terms(
        deadline_s=deadline_ms / 1000 if deadline_ms is not None else default_deadline_s,
        request_class=request_class,
        traceparent=traceparent if parse_traceparent(traceparent) is not None else "",
    )


def echoed_request_id(value: str | None) -> str | None:
    """Return a client's request id if it is short and printable; it is shown to the client and used for nothing."""
    if value is None or not 1 <= len(value) <= MAX_REQUEST_ID or not all(" " <= c <= "~" for c in value):
        return None
    return value
