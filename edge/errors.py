"""Errors to HTTP: one envelope, the right status, and the headers that go with it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from schemas.errors import (
    BadRequest,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
)

DEFAULT_RETRY_AFTER_S = 1.0


def error_headers(error: HeadraceError) -> dict[str, str]:
    """Return the headers that belong to an error."""
    headers: dict[str, str] = {}
    if isinstance(error, (Unavailable, Overloaded)):
        wait_s = error.retry_after_s if error.retry_after_s is not None else DEFAULT_RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    elif isinstance(error, DeadlineExceeded):
        # The client's own limit: asking again would only compute the same for nobody.
        headers["x-should-retry"] = "false"
    elif isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: HeadraceError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response for an error; `headers` are added to its own."""
    return Response(
        orjson.dumps(error.envelope()),
        status_code=error.status,
        media_type="application/json",
        headers={**error_headers(error), **(headers or {})},
    )


def translate(exc: HTTPException, path: str) -> HeadraceError:
    """Turn an error of the web framework into one of ours."""
    match exc.status_code:
        case 404:
            return NotFound("there is no such route")
        case 405:
            allowed = (exc.headers or {}).get("Allow", "")
            return MethodNotAllowed(f"this route takes {allowed or 'other methods'} only")
        case 413:
            return TooLarge("the body is too large")
        case 415:
            return UnsupportedMediaType("this content type is not supported")
        case status if 400 <= status < 500:
            return BadRequest(str(exc.detail) or "bad request")
    return InternalError("internal error")
