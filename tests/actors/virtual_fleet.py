"""All actors of an instance on the in-memory bus in virtual time, and a native client that follows the three lines.

Engines step on the loop instead of in a thread, and executors run at once, so that a run is a function of its seed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.kv_disk import DiskConfig
from chaos.virtual.engine import PACE_S as PACE_S
from chaos.virtual.engine import SteppedEngine as SteppedEngine
from chaos.virtual.engine import SteppedEngineActor as SteppedEngineActor
from chaos.virtual.nodes import LAYOUT, MODEL, Nodes, at_once
from chaos.virtual.nodes import LIGHT as LIGHT
from chaos.virtual.system import MemorySystem
from engine.plan import Runner
from engine.scripted_runner import Rules, ScriptedRunner
from kvstore.owners import Quotas
from runtime.bus import BusMessage
from runtime.virtual_clock import VirtualClock
from schemas.record import Sampling

SCRIPT = Rules({})


def answer(prompt: str, count: int, *, choice: int = 0) -> str:
    """The text that an undisturbed run gives to a greedy request."""
    ids = list(prompt.encode())
    return "".join(chr(SCRIPT(ids, choice, index, Sampling(temperature=0.0))) for index in range(count))


@dataclass(slots=True)
class Stream:
    """One request as its client sees it."""

    inbox: str
    asked_at: float
    deadline_s: float | None = None
    ids: list[list[int]] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    finish: dict[int, str] = field(default_factory=dict)
    accepted: dict[str, Any] | None = None
    terminal: dict[str, Any] | None = None
    ended_at: float = 0.0
    later_terminals: int = 0
    ack_subject: str = ""
    request_id: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts[0])

    @property
    def error(self) -> str | None:
        return (self.terminal or {}).get("error", {}).get("code") if self.terminal else None

    @property
    def num_items(self) -> int:
        return sum(map(len, self.ids))


class Fleet(Nodes):
    """The nodes of an instance, and native clients of it."""

    def __init__(
        self, system: MemorySystem, directory: Path, make_runner: Callable[[], Runner], whole_below: int = 0
    ) -> None:
        super().__init__(system, directory, make_runner, whole_below)
        self.streams: dict[str, Stream] = {}

    def serving(self, kind: str, stream: Stream) -> str:
        """The name of the node of this kind that holds a request; the first if none says so."""
        return self.holding(kind, stream.request_id)

    # --- a native client ------------------------------------------------------------------------

    async def ask(
        self,
        prompt: str | list[Any],
        *,
        max_tokens: int,
        deadline_s: float | None = None,
        headers: dict[str, str] | None = None,
        publish: bool = True,
        **fields: Any,
    ) -> Stream:
        """Publish a completion request; frames are taken and acknowledged from now on."""
        bus, clock = self.system.outside, self.system.clock
        inbox = bus.new_inbox()
        stream = Stream(inbox, clock.now(), deadline_s)
        choices = int(fields.get("n", 1)) * (1 if isinstance(prompt, str) else len(prompt))
        stream.ids, stream.texts = [[] for _ in range(choices)], [[] for _ in range(choices)]
        self.streams[inbox] = stream
        await bus.subscribe(inbox, lambda message: self._take(stream, message))
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        if deadline_s is not None:
            body["deadline_ms"] = round(deadline_s * 1000)
        if publish:
            data = json.dumps(body, ensure_ascii=False).encode()
            bus.publish("requests.completion", data, reply=inbox, headers=headers)
        return stream

    def _take(self, stream: Stream, message: BusMessage) -> None:
        if message.no_responders or inert(stream):
            return
        frame = json.loads(message.payload)
        stream.request_id = frame["id"]
        stream.ack_subject = message.reply or stream.ack_subject
        if stream.terminal is not None:
            stream.later_terminals += "terminal" in frame
            self._ack(stream, done=True)
            return
        stream.accepted = frame.get("accepted") or stream.accepted
        for choice, index, token_id, text, _ in frame.get("items", ()):
            if index == len(stream.ids[choice]):
                stream.ids[choice].append(token_id)
                stream.texts[choice].append(text)
        for choice, reason, total in frame.get("finish", ()):
            if total == len(stream.ids[choice]):
                stream.finish[choice] = reason
        terminal = frame.get("terminal")
        if terminal is not None and ("error" in terminal or terminal["items"] == [len(i) for i in stream.ids]):
            stream.terminal, stream.ended_at = terminal, self.system.clock.now()
        self._ack(stream, done=stream.terminal is not None)

    def _ack(self, stream: Stream, *, done: bool) -> None:
        body: dict[str, Any] = {"next": [len(i) for i in stream.ids], "window": 64}
        if done:
            body["done"] = True
        if stream.ack_subject:
            self.system.outside.publish(stream.ack_subject, json.dumps(body).encode())

    def cancel(self, stream: Stream) -> None:
        """Want no more."""
        stream.terminal = {"error": {"code": "left"}}
        self._ack(stream, done=True)

    async def end(self, stream: Stream, *, limit_s: float = 60.0) -> None:
        """Wait for the terminal."""
        await self.system.until(lambda: stream.terminal is not None, limit_s=limit_s)

    async def items(self, stream: Stream, count: int) -> None:
        """Wait until so many items have come."""
        await self.system.until(lambda: stream.num_items >= count, limit_s=30.0)


def inert(stream: Stream) -> bool:
    """Whether the client has left without a word."""
    return stream.inbox == ""


@asynccontextmanager
async def fleet(
    clock: VirtualClock,
    directory: Path,
    *,
    make_runner: Callable[[], Runner] = lambda: ScriptedRunner(SCRIPT),
    whole_below: int = 0,
    disk: DiskConfig | None = None,
    hosts: dict[str, str] | None = None,
    quotas: Quotas | None = None,
    pace_s: dict[str, float] | None = None,
    **layout: int,
) -> AsyncIterator[Fleet]:
    """Start an instance, two of whatever may be killed; errors in handlers are raised at the end."""
    loop = asyncio.get_running_loop()
    loop.run_in_executor = at_once  # type: ignore[method-assign, assignment]
    async with MemorySystem(clock=clock) as system:
        made = Fleet(system, directory, make_runner, whole_below)
        made.disk, made.quotas = disk, quotas
        made.hosts, made.pace_s = hosts or {}, pace_s or {}
        made.disk_folders = layout.get("kv", 1) > 1
        for kind, count in {**LAYOUT, **layout}.items():
            for number in range(count):
                made.make(kind, number)
        await system.start()
        ready = sum(len(n.actors) for n in made.nodes.values())
        await system.until(lambda: all(len(n.membership.members()) == ready for n in made.nodes.values()), limit_s=10.0)
        yield made
