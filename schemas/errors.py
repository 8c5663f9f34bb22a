"""Every error that can reach a client, as one tree.

HeadraceError
├── BadRequest                 400  the request itself is wrong
│   └── ContextTooLong         400  prompt (plus max_tokens) exceeds the context window
├── Unauthorized               401
├── Forbidden                  403
├── NotFound                   404
│   └── ModelNotFound          404
├── MethodNotAllowed           405
├── DeadlineExceeded           408  the deadline passed
├── SlowReader                 408  the client took nothing of its answer for too long
├── TooLarge                   413  a body or bus message exceeds a stated limit
├── UnsupportedMediaType       415
├── Poisoned                   422  engines crash when they compute it
├── Overloaded                 429  a quota or a queue is full
├── Cancelled                  499  the client left (never sent to it)
├── InternalError              500
│   ├── EngineFailed           500  an engine could not compute this one sequence
│   │   └── NotNumbers         500  the model's logits for it were not numbers
│   └── ReplayMismatch         500  an id computed on replay differs from the one already sent
├── Unavailable                503  no live actor can take the work now
│   └── BusUnavailable         503
└── StreamBroken               502  a stream ended without its terminal frame
"""

from __future__ import annotations

from typing import Any, ClassVar


class HeadraceError(Exception):
    """Root of the tree: a message for people and a `(status, type, param, code)` for programs."""

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s

    def info(self) -> dict[str, Any]:
        """Return the form that travels in messages; `from_info` is its inverse."""
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "param": self.param,
            "code": self.code,
            "retry_after_s": self.retry_after_s,
        }

    def envelope(self) -> dict[str, Any]:
        """Return the OpenAI error envelope, `{"error": {message, type, param, code}}`."""
        return {"error": {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}}


class BadRequest(HeadraceError):
    """Raised when the request itself is wrong; `param` names the field."""

    status = 400
    error_type = "invalid_request_error"


class ContextTooLong(BadRequest):
    """Raised when a prompt, or a prompt with its `max_tokens`, exceeds the context window."""

    default_code = "context_length_exceeded"


class Unauthorized(HeadraceError):
    """Raised when a key is missing or wrong."""

    status = 401
    error_type = "invalid_request_error"
    default_code = "invalid_api_key"


class Forbidden(HeadraceError):
    """Raised when a valid key may not do this."""

    status = 403
    error_type = "permission_error"


class NotFound(HeadraceError):
    """Raised when a route or an object does not exist."""

    status = 404
    error_type = "invalid_request_error"
    default_code = "not_found"


class ModelNotFound(NotFound):
    """Raised when no model of that name is served."""

    default_code = "model_not_found"


class MethodNotAllowed(HeadraceError):
    """Raised when a route exists but not for this method."""

    status = 405
    error_type = "invalid_request_error"
    default_code = "method_not_allowed"


class DeadlineExceeded(HeadraceError):
    """Raised when a request's deadline passes, in whatever phase it is."""

    status = 408
    error_type = "timeout_error"
    default_code = "deadline_exceeded"


class SlowReader(HeadraceError):
    """Raised when a client takes nothing of an answer that waits for it, for longer than `slow_reader_s`."""

    status = 408
    error_type = "timeout_error"
    default_code = "slow_reader"


class TooLarge(HeadraceError):
    """Raised when a body or a bus message exceeds a stated limit."""

    status = 413
    error_type = "invalid_request_error"
    default_code = "payload_too_large"


class UnsupportedMediaType(HeadraceError):
    """Raised when a body has a content type that the route does not read."""

    status = 415
    error_type = "invalid_request_error"
    default_code = "unsupported_media_type"


class Poisoned(HeadraceError):
    """Raised when engines crashed one after another while they computed a request: it is not run again.

    The fault is ours, but whoever took a 5xx for it would send the request again, and take down two more.
    """

    status = 422
    error_type = "invalid_request_error"
    default_code = "request_poisoned"


class Overloaded(HeadraceError):
    """Raised when a quota or a queue is full."""

    status = 429
    error_type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class Cancelled(HeadraceError):
    """Raised when the client left; nobody is there to read it."""

    status = 499
    error_type = "cancelled"
    default_code = "cancelled"


class InternalError(HeadraceError):
    """Raised when Headrace itself is at fault."""

    status = 500
    error_type = "internal_error"
    default_code = "internal_error"


class EngineFailed(InternalError):
    """Raised when an engine could not compute one sequence; its neighbours go on."""

    default_code = "engine_failed"


class NotNumbers(EngineFailed):
    """Raised when the model's logits for one sequence were not numbers; its neighbours go on."""

    default_code = "logits_not_numbers"


class ReplayMismatch(InternalError):
    """Raised when an id computed again after a failover differs from the one that was sent."""

    default_code = "replay_mismatch"


class Unavailable(HeadraceError):
    """Raised when no live actor can take the work now."""

    status = 503
    error_type = "service_unavailable"
    default_code = "unavailable"


class BusUnavailable(Unavailable):
    """Raised when the bus cannot be reached."""

    default_code = "bus_unavailable"


class StreamBroken(HeadraceError):
    """Raised when a stream ended without its terminal frame."""

    status = 502
    error_type = "internal_error"
    default_code = "stream_broken"


def _tree(root: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


ERRORS: dict[str, type[HeadraceError]] = _tree(HeadraceError)


def from_info(info: dict[str, Any]) -> HeadraceError:
    """Rebuild an error from its travelling form; an unknown kind becomes `InternalError`."""
    kind = ERRORS.get(str(info.get("kind")), InternalError)
    return kind(
        str(info.get("message", "unknown error")),
        param=info.get("param"),
        code=info.get("code"),
        retry_after_s=info.get("retry_after_s"),
    )


__all__ = [*ERRORS, "ERRORS", "from_info"]
