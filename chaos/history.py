"""What a client saw, as JSON lines: the only evidence that the invariants are checked against.

The client writes it, never the system. One line is one event `{t, request, kind, …}`, `t` in monotonic seconds of the
client's process. `request` is the client's own name for the request; `load` and `fault` events have an empty one.

| kind | data |
|---|---|
| `sent` | `client` (http, native), `key` (names the reference answer), `choices`, `deadline_s`, `indexed` |
| `accepted` | `id`, the request id that the system gave |
| `item` | `choice`, `index` and `id` (null over HTTP), `text`; every arrival, repeats included |
| `finish` | `choice`, `reason`, `total` (items in total; null over HTTP) |
| `terminal` | `error` (null, or a map), `usage` |
| `left` | the client closed its side on purpose |
| `load` | `actor`, `running`, `waiting`, `blocks_in_use`, `steps` |
| `fault` | `fault`, `victim`, `pid`, `at`, `streams`, `effective`, `scenario`, `round`, `stall_s` |
| `run` | how this history was made, enough to make it again: `kind`, `seed` and more |
| `reference` | `key`, `texts`, `reasons`: what the undisturbed run of these requests said |
| `segment` | a part of the history begins that is judged by itself: whatever ran before has ended |
| `away` | `for_s`: the native clients' own connection to the bus is gone for so long |
| `rest` | a storm is over: what is still `busy` long after, and which `errors` handlers raised |
| `baseline` | the part ends: `engines` that must be idle by now, `caps` on their figures |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

KINDS = (
    "sent", "accepted", "item", "finish", "terminal", "left", "load", "fault",
    "run", "reference", "segment", "baseline", "rest", "away",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a client saw or did."""

    t: float
    request: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Return the event as one JSON line; `parse` is its inverse."""
        head = {"t": round(self.t, 6), "request": self.request, "kind": self.kind}
        return json.dumps(head | self.data, ensure_ascii=True)


def parse(line: str) -> Event:
    """Read one line of a history.

    Raises:
        ValueError: if the line is not an event.
    """
    raw = json.loads(line)
    if not isinstance(raw, dict) or raw.get("kind") not in KINDS:
        raise ValueError(f"not an event: {line[:80]!r}")
    return Event(float(raw.pop("t")), str(raw.pop("request")), str(raw.pop("kind")), raw)


def read(path: Path) -> list[Event]:
    """Read a history file; a cut last line (its writer was killed) is left out."""
    lines = path.read_text().split("\n")
    return [parse(line) for line in lines[:-1] if line]


def segments(path: Path) -> Iterator[list[Event]]:
    """Read a history file part by part; a cut last line is left out. A file without parts is one."""
    part: list[Event] = []
    with path.open() as lines:
        for line in lines:
            if not line.endswith("\n") or not line.strip():
                continue
            event = parse(line)
            if event.kind == "segment" and part:
                yield part
                part = []
            part.append(event)
    if part:
        yield part


def by_request(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Group a history by request, each group in time order; loads and faults are left out."""
    out: dict[str, list[Event]] = {}
    for event in events:
        if event.request:
            out.setdefault(event.request, []).append(event)
    for group in out.values():
        group.sort(key=lambda e: e.t)
    return out


class Recorder:
    """Appends events as they happen, to memory and to a file, and knows how far each request has come."""

    def __init__(self, now: Callable[[], float], path: Path | None = None) -> None:
        self._now = now
        self._file: IO[str] | None = path.open("a", buffering=1) if path is not None else None
        self.events: list[Event] = []
        self.ids: dict[str, str] = {}  # client's name -> system's id
        self.done: dict[str, int] = {}  # client's name -> items seen of its slowest choice
        self._seen: dict[str, dict[int, int]] = {}
        self.ended: set[str] = set()

    def now(self) -> float:
        """Monotonic seconds, as in the events."""
        return self._now()

    def add(self, request: str, kind: str, **data: Any) -> Event:
        """Record one event, now."""
        event = Event(self._now(), request, kind, data)
        self.events.append(event)
        if self._file is not None:
            self._file.write(event.line() + "\n")
        match kind:
            case "sent":
                self._seen[request] = dict.fromkeys(range(int(data["choices"])), 0)
                self.done[request] = 0
            case "accepted":
                self.ids[request] = str(data["id"])
            case "item":
                self._advance(request, int(data["choice"]), data.get("index"))
            case "terminal" | "left":
                self.ended.add(request)
            case _:
                pass
        return event

    def _advance(self, request: str, choice: int, index: int | None) -> None:
        seen = self._seen[request]
        if index is None or index == seen.get(choice, 0):
            seen[choice] = seen.get(choice, 0) + 1
        self.done[request] = min(seen.values())

    def forget(self) -> None:
        """Let go of what is over, except in the file."""
        self.events.clear()
        for request in self.ended:
            self.ids.pop(request, None)
            self.done.pop(request, None)
            self._seen.pop(request, None)
        self.ended.clear()

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
