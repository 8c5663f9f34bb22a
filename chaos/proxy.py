"""A TCP proxy before NATS: delays what passes, breaks connections, and cuts off one node; seeded.

A connection says its name in its CONNECT line, and the names of a node's connections begin with the node's (`light-0`,
`light-0-stream`, `light-0-heartbeat`), so that a node is cut off as a whole. A cut is silent: connections stay open and
nothing passes, until `heal`; new ones wait too. TCP loses nothing: loss shows as delay, or as a broken connection.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from chaos.gremlin import draw

CHUNK = 64 * 1024
HELD_NBYTES = 4 * 1024 * 1024  # per direction; beyond it the sender waits, as behind a slow line
CONNECT = re.compile(rb"CONNECT (\{.*?\})\r\n")


@dataclass(slots=True)
class Delay:
    """How long each piece is under way, in seconds: at least `low`, at most `high`."""

    low: float = 0.0
    high: float = 0.0


@dataclass(eq=False, slots=True)
class _Way:
    """One direction of a connection: pieces and the moments at which they are due, in order."""

    held: deque[tuple[float, bytes]] = field(default_factory=deque)
    nbytes: int = 0
    last: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, number: int, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.name = ""
        self._proxy = proxy
        self._number = number
        self._writers = (client, server)
        self._pieces = 0

    def is_of(self, node: str) -> bool:
        """Whether this connection is one of a node's."""
        return self.name == node or self.name.startswith(f"{node}-")

    def break_now(self) -> None:
        """Reset both sides."""
        for writer in self._writers:
            writer.transport.abort()

    async def take(self, reader: asyncio.StreamReader, way: _Way, *, first: bool) -> None:
        """Read one side until it ends; `first` looks for the name."""
        begun = b""
        while data := await reader.read(CHUNK):
            if first:
                begun += data
                if (found := CONNECT.search(begun)) is not None or len(begun) > CHUNK:
                    self.name = str(json.loads(found[1]).get("name", "")) if found is not None else "?"
                    first = False
            self._pieces += 1
            delay = self._proxy.delay
            share = draw(self._proxy.seed, self._number, self._pieces) if delay.high > delay.low else 0.0
            way.last = max(way.last, self._proxy.now() + delay.low + share * (delay.high - delay.low))
            way.held.append((way.last, data))
            way.nbytes += len(data)
            way.changed.set()
            while way.nbytes > HELD_NBYTES:
                way.changed.clear()
                await way.changed.wait()
        way.held.append((way.last, b""))
        way.changed.set()

    async def give(self, writer: asyncio.StreamWriter, way: _Way) -> None:
        """Write what is due to the other side, unless this connection is cut off."""
        while True:
            while not way.held:
                way.changed.clear()
                await way.changed.wait()
            due, data = way.held[0]
            if (wait := due - self._proxy.now()) > 0:
                await asyncio.sleep(wait)
            await self._proxy.passable(self)
            way.held.popleft()
            if not data:
                writer.write_eof()  # a plain end is passed on as such: the other direction goes on
                return
            way.nbytes -= len(data)
            way.changed.set()
            writer.write(data)
            await writer.drain()
            self._proxy.passed += len(data)


class Proxy:
    """Stands at `port` before a server.

    Args:
        host, port: of the server behind it.
        seed: decides each delay within its bounds.
        now: monotonic seconds.
    """

    def __init__(self, host: str, port: int, *, seed: int = 0, now: Callable[[], float] | None = None) -> None:
        self.seed = seed
        self.delay = Delay()
        self.port = 0
        self.passed = 0  # bytes
        self.now = now or asyncio.get_running_loop().time
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self._cut: set[str] = set()
        self._healed = asyncio.Event()

    async def start(self, port: int = 0) -> int:
        """Listen on 127.0.0.1; returns the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.break_now()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    # --- faults ---------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of the connections that are open."""
        return sorted(link.name for link in self._links)

    def cut(self, node: str) -> int:
        """Let nothing pass from or to a node, silently; returns how many of its connections are open."""
        self._cut.add(node)
        return sum(link.is_of(node) for link in self._links)

    def heal(self, node: str) -> None:
        """End a cut; what was held back passes."""
        self._cut.discard(node)
        self._healed.set()
        self._healed = asyncio.Event()

    def reset(self, node: str = "") -> int:
        """Break the connections of a node, or all; returns how many. They may come back at once."""
        found = [link for link in self._links if not node or link.is_of(node)]
        for link in found:
            link.break_now()
        return len(found)

    async def passable(self, link: Link) -> None:
        """Wait while a connection is cut off."""
        while any(link.is_of(node) for node in self._cut):
            await self._healed.wait()

    # --- inside ---------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # either side has gone, or the proxy stops
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        self._number += 1
        link = Link(self, self._number, writer, back)
        self._links.add(link)
        up, down = _Way(), _Way()
        works = [
            asyncio.ensure_future(link.take(reader, up, first=True)),
            asyncio.ensure_future(link.take(there, down, first=False)),
            asyncio.ensure_future(link.give(back, up)),
            asyncio.ensure_future(link.give(writer, down)),
        ]
        try:
            # Until both sides have ended, each with a plain end, or one of them was broken.
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_EXCEPTION)
            if len(done) == len(works) and not any(work.exception() for work in done):
                for side in (back, writer):
                    side.close()
                    await side.wait_closed()
        finally:
            self._links.discard(link)
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            back.transport.abort()
