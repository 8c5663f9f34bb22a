"""The one module that builds and parses bus subjects.

| subject | what |
|---|---|
| `requests.<api>` | anyone's requests; queue group `admission` |
| `actor.<kind>` | anycast to stateless actors; queue group `<kind>` |
| `actor.<kind>.<id>.<epoch>` | the mailbox of one incarnation of one actor |
| `actor.<kind>.<id>.<epoch>.hot` | the same mailbox, for items, acks and frames: read on the stream connection |
| `control.<topic>` | broadcasts: `exit`, `drain`, `metrics`, `supervisors` |
| `heartbeat.<kind>.<id>` | liveness and load, 250 ms |
| `ack.<kind>.<id>.<epoch>.<request>` | acknowledgements of native clients; with `-end` those of its terminal |
| `kv.events.<host>` | the store's events |
| `kv.events.<host>.device` | what the pools of the host's engines hold, likewise |
| `usage.settled` | one record per ended request |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_END = "-end"
_TOKEN = re.compile(r"[A-Za-z0-9_-]+\Z")
_PLAIN = re.compile(r"[A-Za-z0-9-]")

QUEUE_ADMISSION = "admission"
EXIT = "control.exit"
DRAIN = "control.drain"
METRICS = "control.metrics"
SUPERVISORS = "control.supervisors"
HEARTBEATS = "heartbeat.>"
USAGE = "usage.settled"
KV_EVENTS = "kv.events.>"
APIS = ("chat", "completion", "embedding")


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """The address of one incarnation of an actor; a message to a dead epoch reaches nobody."""

    kind: str
    id: str
    epoch: str

    @property
    def subject(self) -> str:
        """The mailbox of this incarnation."""
        return f"actor.{token(self.kind)}.{token(self.id)}.{token(self.epoch)}"

    def wire(self) -> list[str]:
        """Return the form that travels, `[kind, id, epoch]`."""
        return [self.kind, self.id, self.epoch]

    def __str__(self) -> str:
        return f"{self.kind}/{self.id}@{self.epoch[:6]}"


def token(text: str) -> str:
    """Return `text` if it may stand in a subject as one token.

    Raises:
        ValueError: if it is empty or has a character outside `A-Za-z0-9_-`.
    """
    if not _TOKEN.match(text):
        raise ValueError(f"{text!r} is not a subject token")
    return text


def hot(ref: Ref) -> str:
    """Return the subject of a mailbox that is read on the stream connection."""
    return f"{ref.subject}.hot"


def encode_name(name: str) -> str:
    """Encode any text (a tenant, a model) as one subject token; `decode_name` is its inverse."""
    out = "".join(c if _PLAIN.match(c) else "".join(f"_{b:02x}" for b in c.encode()) for c in name)
    return out or "_"


def decode_name(encoded: str) -> str:
    """Undo `encode_name`.

    Raises:
        ValueError: if the text is not such an encoding.
    """
    if encoded == "_":
        return ""
    data = re.sub(rb"_([0-9a-f]{2})", lambda m: bytes([int(m[1], 16)]), token(encoded).encode())
    return data.decode()


def requests(api: str) -> str:
    """Return the subject that takes requests of one API, such as `chat`."""
    return f"requests.{token(api)}"


def anycast(kind: str) -> str:
    """Return the subject that reaches any one actor of a stateless kind."""
    return f"actor.{token(kind)}"


def heartbeat(kind: str, actor_id: str) -> str:
    """Return the subject of one actor's heartbeats."""
    return f"heartbeat.{token(kind)}.{token(actor_id)}"


def ack(ref: Ref, request_id: str, *, end: bool = False) -> str:
    """Return the subject on which a native client acknowledges one request's frames; its terminal has one of its own.

    Who has all items may still miss the terminal, and says the same words before and after it.
    """
    return f"ack.{token(ref.kind)}.{token(ref.id)}.{token(ref.epoch)}.{token(request_id)}{_END if end else ''}"


def acked(subject: str) -> tuple[str, bool]:
    """Return which request a subject of `ack` is about, and whether it is that of its terminal."""
    name = subject.rsplit(".", 1)[-1]
    return name.removesuffix(_END), name.endswith(_END)


def acks_of(ref: Ref) -> str:
    """Return the wildcard over all `ack` subjects of one actor."""
    return f"ack.{token(ref.kind)}.{token(ref.id)}.{token(ref.epoch)}.*"


def kv_events(host: str) -> str:
    """Return the subject of one host's store events."""
    return f"kv.events.{encode_name(host)}"


def device_events(host: str) -> str:
    """Return the subject of what the pools of one host's engines hold: more changes than those of its store."""
    return f"{kv_events(host)}.device"


def parse_mailbox(subject: str) -> Ref:
    """Return the address behind a mailbox subject.

    Raises:
        ValueError: if the subject is not a mailbox.
    """
    parts = subject.split(".")
    if len(parts) != 4 or parts[0] != "actor":
        raise ValueError(f"{subject!r} is not a mailbox subject")
    return Ref(*map(token, parts[1:]))
