"""Clients that leave at a moment which the bus tells of, and what is heard until nothing of their request is held."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from bench.tap import Heard, HeardItems
from schemas.messages import (
    CancelAck,
    Close,
    Closed,
    Dispatch,
    Dispatched,
    Reserve,
    Tokenize,
    TransferAbort,
    TransferDone,
    TransferJob,
)
from schemas.subjects import Ref, parse_mailbox

NEVER = float("inf")


@dataclass(slots=True)
class Seen:
    """What was heard of one request; times in monotonic seconds."""

    request_id: str = ""
    marks: dict[str, float] = field(default_factory=dict)  # first time of: tokenize, dispatched, transfer
    engines: set[Ref] = field(default_factory=set)  # that were given something of it
    closed: dict[Ref, float] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)  # jobs that were asked to be given up
    over: dict[str, float] = field(default_factory=dict)  # jobs that can write no more
    told: float = NEVER  # its owner has told somebody, or has answered the edge
    last_items: float = 0.0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def free_at(self, left_at: float) -> float | None:
        """When the last engine had dropped its sequences and the last copy was over; None before that.

        An engine says `Closed` after it has freed the blocks, or set them aside for a copy, whose end frees them.
        """
        if self.told == NEVER:
            return None
        if not self.engines <= set(self.closed) or not self.aborted <= set(self.over):
            return None
        return max([left_at, self.told, *self.closed.values(), *(self.over[job] for job in self.aborted)])

    def stopped_at(self, left_at: float) -> float:
        """When the last engine had dropped its sequences: no step of it can follow."""
        return max([left_at, *(t for ref, t in self.closed.items() if ref in self.engines)])


class Ledger:
    """Notes what actors say about the request that is measured now; it is known by a mark in its prompt."""

    def __init__(self) -> None:
        self.mark = ""
        self.seen = Seen()

    def expect(self, mark: str) -> Seen:
        """Begin with another request."""
        self.mark, self.seen = mark, Seen()
        return self.seen

    def on_message(self, heard: Heard) -> None:
        """Take a control message."""
        said, seen = heard.message, self.seen
        if isinstance(said, Tokenize) and not seen.request_id and self.mark in str(said.body)[:400]:
            seen.request_id = said.request_id
            seen.marks["tokenize"] = heard.t
        if not seen.request_id or getattr(said, "request_id", "") != seen.request_id:
            return
        match said:
            case Dispatch() | Reserve():
                seen.engines.add(parse_mailbox(heard.subject))
            case Dispatched():
                seen.marks.setdefault("dispatched", heard.t)
            case TransferJob():
                seen.marks.setdefault("transfer", heard.t)
            case CancelAck():
                seen.told = min(seen.told, heard.t)
            case Close():
                if said.reason != "source":
                    seen.told = min(seen.told, heard.t)
            case Closed():
                if heard.sender is not None:
                    seen.closed.setdefault(heard.sender, heard.t)
            case TransferAbort():
                seen.aborted.add(said.job)
            case TransferDone():
                seen.over.setdefault(said.job, heard.t)
            case _:
                return
        seen.news.set()

    def on_items(self, heard: HeardItems) -> None:
        """Take items."""
        if heard.batch.request_id == self.seen.request_id:
            self.seen.last_items = heard.t


class Leaver(Protocol):
    """A client that asks, and leaves when it is told to."""

    num_items: int

    async def ask(self, body: dict[str, Any]) -> None:
        """Send the request."""
        ...

    def leave(self) -> float:
        """Leave; returns when."""
        ...

    async def close(self) -> None:
        """Release what the client itself still holds."""
        ...


class HttpLeaver:
    """An HTTP client on a connection of its own; leaving is closing it. With `reads` off it takes no answer."""

    def __init__(self, base: str, *, reads: bool = True) -> None:
        self._url = urlsplit(base)
        self._reads = reads
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.num_items = 0

    async def ask(self, body: dict[str, Any]) -> None:
        """Send the request."""
        reader, self._writer = await asyncio.open_connection(self._url.hostname, self._url.port, limit=4096)
        payload = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        self._writer.write(head.encode() + payload)
        if self._reads:
            self._task = asyncio.create_task(self._read(reader))
        else:
            self._writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket it is there

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(65_536):
                self.num_items += data.count(b'"content":')
        except OSError:
            pass

    def leave(self) -> float:
        """Close the connection at once."""
        assert self._writer is not None
        now = time.monotonic()
        self._writer.transport.abort()
        return now

    async def close(self) -> None:
        """End the reader."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class NativeLeaver:
    """A NATS client; it leaves by a word, or silently, by no longer listening."""

    def __init__(self, nats: Nats, *, silent: bool = False, acknowledges: bool = True) -> None:
        self._nats = nats
        self._silent = silent
        self._acknowledges = acknowledges
        self._subscription: Any = None
        self._ack_to = ""
        self._left = False
        self.num_items = 0

    async def ask(self, body: dict[str, Any]) -> None:
        """Publish the request."""
        inbox = self._nats.new_inbox()
        self._subscription = await self._nats.subscribe(inbox, cb=self._on_frame)
        await self._nats.publish("requests.chat", json.dumps(body).encode(), reply=inbox)

    async def _on_frame(self, message: Msg) -> None:
        if message.reply:
            self._ack_to = message.reply
        if self._left:
            if not self._silent and message.reply:  # there may have been nobody to say it to when it left
                await self._nats.publish(message.reply, b'{"done": true}')
            return
        if not message.data:
            return
        frame = json.loads(message.data)
        self.num_items += len(frame.get("items", ()))
        if self._acknowledges and self._ack_to:
            await self._nats.publish(self._ack_to, json.dumps({"next": [self.num_items]}).encode())

    def leave(self) -> float:
        """Say that no more is wanted, or stop listening."""
        now, self._left = time.monotonic(), True
        asyncio.ensure_future(self._go())
        return now

    async def _go(self) -> None:
        if self._silent:
            await self._subscription.unsubscribe()
        elif self._ack_to:
            await self._nats.publish(self._ack_to, b'{"done": true}')
        await self._nats.flush()

    async def close(self) -> None:
        """Stop listening."""
        if not self._silent:
            await self._subscription.unsubscribe()


async def until(condition: Callable[[], bool], news: asyncio.Event, limit_s: float) -> bool:
    """Wait until a condition holds, looking whenever something was heard and every few milliseconds."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        news.clear()
        try:
            async with asyncio.timeout(0.003):
                await news.wait()
        except TimeoutError:
            pass
    return True
