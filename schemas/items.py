"""The token path: items, acknowledgements and frames as bare arrays.

`Items`   decode → detokenize: `[[request_id, fence, [[choice, index, id, logprob], ...], info], ...]`
          where `info` is nil or `{"cached": tokens, "end": [[choice, reason], ...]}`; `end` says that the engine
          computes no more of a choice (`length` or `stop`), which is a hint: the detokenizer decides the finish.
`Acks`    detokenize → decode, edge → detokenize: `[[request_id, fence, status, [next per choice], window], ...]`
          with status `ok`, `done` (nothing more is wanted) or `fenced`.
`Frames`  detokenize or admission → edge: `[frame, ...]`; a native client gets one frame per message.

A frame is a map: `{v, id, fence, items?, finish?, accepted?, terminal?}`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from schemas.record import Fence

ITEMS = "Items"
ACKS = "Acks"
FRAMES = "Frames"
HOT = frozenset({ITEMS, ACKS, FRAMES})

FRAME_VERSION = 1


class Item(NamedTuple):
    """One output token of one choice on its way out of an engine."""

    choice: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on an item
    id: int
    logprob: float | None


class ItemBatch(NamedTuple):
    """The items of one request in one step."""

    request_id: str
    fence: Fence
    items: list[Item]
    cached_tokens: int | None
    ends: list[tuple[int, str]]


class Ack(NamedTuple):
    """Cumulative acknowledgement of one request: the next index expected per choice, and the credit left."""

    request_id: str
    fence: Fence
    status: str  # ok | done | fenced
    next: list[int]
    window: int


class TextItem(NamedTuple):
    """One output token as a client sees it: the text that its arrival releases may be empty."""

    choice: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on an item
    id: int
    text: str
    logprob: float | None


def items_body(batches: list[ItemBatch]) -> list[Any]:
    """Return the wire form of a step's items."""
    out: list[Any] = []
    for b in batches:
        info: dict[str, Any] = {}
        if b.cached_tokens is not None:
            info["cached"] = b.cached_tokens
        if b.ends:
            info["end"] = [list(e) for e in b.ends]
        out.append([b.request_id, list(b.fence), [list(i) for i in b.items], info or None])
    return out


def parse_items(body: list[Any]) -> list[ItemBatch]:
    """Undo `items_body`."""
    out = []
    for request_id, fence, items, info in body:
        info = info or {}
        ends = [(int(c), str(r)) for c, r in info.get("end", [])]
        out.append(ItemBatch(request_id, Fence(*fence), [Item(*i) for i in items], info.get("cached"), ends))
    return out


def acks_body(acks: list[Ack]) -> list[Any]:
    """Return the wire form of acknowledgements."""
    return [[a.request_id, list(a.fence), a.status, a.next, a.window] for a in acks]


def parse_acks(body: list[Any]) -> list[Ack]:
    """Undo `acks_body`."""
    return [Ack(r, Fence(*f), s, list(n), w) for r, f, s, n, w in body]


def frame(
    request_id: str,
    fence: Fence,
    *,
    items: list[TextItem] | None = None,
    finish: list[tuple[int, str, int]] | None = None,
    accepted: dict[str, Any] | None = None,
    terminal: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build a frame: `finish` is `(choice, reason, items in total)`; absent parts are left out."""
    out: dict[str, Any] = {"v": FRAME_VERSION, "id": request_id, "fence": list(fence)}
    if accepted is not None:
        out["accepted"] = accepted
    if items:
        out["items"] = [list(i) for i in items]
    if finish:
        out["finish"] = [list(f) for f in finish]
    if terminal is not None:
        out["terminal"] = terminal
    return out
