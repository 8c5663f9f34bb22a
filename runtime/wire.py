"""The rules that both buses share: which subjects are legal, how patterns match, what headers weigh."""

from __future__ import annotations

import re

from schemas.errors import TooLarge

_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*\Z")
_PATTERN = re.compile(r"(?:(?:[^\s.*>]+|\*)\.)*(?:[^\s.*>]+|\*|>)\Z")
_QUEUE = re.compile(r"[^\s]*\Z")
_HEADER_KEY = re.compile(r"[!-9;-~]+\Z")
_HEADER_LINE = b"NATS/1.0"


def check_subject(subject: str) -> str:
    """Return `subject` if messages may be published to it.

    Raises:
        ValueError: if it is empty, has an empty token, a wildcard or white space.
    """
    if not _SUBJECT.match(subject):
        raise ValueError(f"{subject!r} is not a subject to publish to")
    return subject


def check_pattern(pattern: str, queue: str = "") -> str:
    """Return `pattern` if it may be subscribed.

    Raises:
        ValueError: if it is malformed, or the queue group is.
    """
    if not _PATTERN.match(pattern):
        raise ValueError(f"{pattern!r} is not a subject to subscribe to")
    if not _QUEUE.match(queue):
        raise ValueError(f"{queue!r} is not a queue group")
    return pattern


def matches(pattern: str, subject: str) -> bool:
    """Whether a subscription to `pattern` receives messages on `subject`."""
    wanted, got = pattern.split("."), subject.split(".")
    for i, part in enumerate(wanted):
        if part == ">":
            return len(got) > i
        if i >= len(got) or (part != "*" and part != got[i]):
            return False
    return len(wanted) == len(got)


def encode_headers(headers: dict[str, str]) -> bytes:
    """Return the header block as it goes over the wire, its empty last line included.

    Raises:
        ValueError: if a name or a value cannot be a header.
    """
    out = bytearray(_HEADER_LINE)
    out += b"\r\n"
    for key, value in headers.items():
        if not _HEADER_KEY.match(key) or "\r" in value or "\n" in value:
            raise ValueError(f"{key!r} is not a header")
        out += f"{key}: {value.strip()}\r\n".encode()
    out += b"\r\n"
    return bytes(out)


def decode_headers(block: bytes) -> tuple[str, dict[str, str]]:
    """Return the status (such as `503`, or nothing) and the headers of a block; never raises."""
    head, _, rest = block.partition(b"\r\n")
    status = head[len(_HEADER_LINE) :].strip()[:3].decode("ascii", "replace")
    headers: dict[str, str] = {}
    for line in rest.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.decode("utf-8", "replace").strip()] = value.strip().decode("utf-8", "replace")
    return status, headers


def check_size(nbytes: int, limit: int) -> None:
    """Refuse a message whose payload and headers together exceed what the bus takes.

    The text reaches clients, so it names no subject: addresses inside are nobody's business.

    Raises:
        TooLarge: naming size and limit.
    """
    if nbytes > limit:
        raise TooLarge(f"a message of {nbytes} bytes exceeds the bus's limit of {limit} bytes")
