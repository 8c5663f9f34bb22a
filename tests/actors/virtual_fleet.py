"""All actors of an instance on the in-memory bus in virtual time, and a native client that follows the three lines.

Engines step on the loop instead of in a thread, and executors run at once, so that a run is a function of its seed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.admission import AdmissionActor, AdmissionConfig
from actors.detokenize import DetokenizeActor
from actors.engine_host import EngineActor
from actors.kv import KvActor
from actors.kv_disk import DiskConfig
from actors.tokenize import TokenizeActor
from actors.transfer import TransferActor
from actors.transfer_peers import PeerConfig
from engine.core import EngineCore
from engine.live import StepResult
from engine.plan import Runner
from engine.scripted_runner import Rules, ScriptedRunner
from headrace.byte_text import ByteText
from kvstore.owners import Quotas
from runtime.actor import Actor, Context
from runtime.bus import BusMessage
from runtime.node import Node
from runtime.virtual_clock import VirtualClock
from schemas.record import Sampling
from tests.support.memory_system import MemorySystem

MODEL = "bytes"
PACE_S = 0.02
TOKEN_BUDGET = 128
NUM_BLOCKS = 256
PREFIX = "headrace-test-"
SCRIPT = Rules({})


def answer(prompt: str, count: int, *, choice: int = 0) -> str:
    """The text that an undisturbed run gives to a greedy request."""
    ids = list(prompt.encode())
    return "".join(chr(SCRIPT(ids, choice, index, Sampling(temperature=0.0))) for index in range(count))


class SteppedEngine:
    """What `EngineThread` is to its actor, on the loop: a step every `PACE_S` while there is work."""

    def __init__(
        self, core: EngineCore, deliver: Callable[[StepResult], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.core = core
        self.steps = 0
        self.load = core.load()
        self.statistics = core.statistics()
        self.frozen = self.stopped = False
        self._deliver, self._loop = deliver, loop
        self._timer: asyncio.TimerHandle | None = None

    def call(self, fn: Callable[[EngineCore], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.stopped:
            future.cancel()
            return future
        try:
            future.set_result(fn(self.core))
        except Exception as exc:
            future.set_exception(exc)
        self.load = self.core.load()
        self.wake()
        return future

    def wake(self) -> None:
        if self._timer is None and self.core.has_work and not self.frozen and not self.stopped:
            self._timer = self._loop.call_later(PACE_S, self._step)

    def _step(self) -> None:
        self._timer = None
        if self.stopped or self.frozen or not self.core.has_work:
            return
        result = self.core.step()
        self.steps += 1
        self.load, self.statistics = self.core.load(), self.core.statistics()
        if result.eventful or result.num_tokens:
            self._deliver(result)
        self.wake()

    def stop(self) -> bool:
        self.stopped = True
        return True


class SteppedEngineActor(EngineActor):
    """An engine that steps on the loop."""

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.prefix.index.start()
        self.thread = SteppedEngine(self._build(), self._deliver, self._loop)  # type: ignore[assignment]
        self.state = "ready"

    @property
    def stepped(self) -> SteppedEngine:
        assert isinstance(self.thread, SteppedEngine)
        return self.thread


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


class Fleet:
    """Nodes named `<kind>-<number>`, with one actor each; a `light` node has three, as in the default layout."""

    def __init__(
        self, system: MemorySystem, directory: Path, make_runner: Callable[[], Runner], whole_below: int = 0
    ) -> None:
        self.system = system
        self.whole_below = whole_below  # 0: every request takes every hop
        self.disk: DiskConfig | None = None
        self.hosts: dict[str, str] = {}  # of nodes that are not on the first host
        self.quotas: Quotas | None = None
        self.directory = directory
        self.make_runner = make_runner
        self.nodes: dict[str, Node] = {}
        self.streams: dict[str, Stream] = {}

    # --- nodes ----------------------------------------------------------------------------------

    def make(self, kind: str, number: int) -> Node:
        """Make a node; a second one of that name is a new incarnation."""
        name = f"{kind}-{number}"
        node = self.nodes[name] = self.system.node(name, host=self.hosts.get(name, "host-a"))
        for each in LIGHT if kind == "light" else (kind,):
            node.add(each, str(number), lambda context, each=each: self._actor(each, context))
        return node

    def _actor(self, kind: str, context: Context) -> Actor:
        match kind:
            case "admission":
                return AdmissionActor(context, config=AdmissionConfig(models=(MODEL,), whole_below=self.whole_below))
            case "tokenize":
                return TokenizeActor(context, load_encoder=ByteText)
            case "detokenize":
                return DetokenizeActor(context, load_vocabulary=ByteText)
            case "transfer":
                return TransferActor(context, peers=PeerConfig() if self.hosts else None)
            case "kv":
                return KvActor(
                    context, directory=self.directory, prefix=PREFIX, num_blocks=64, disk=self.disk,
                    remote=bool(self.hosts), quotas=self.quotas,
                )  # fmt: skip
            case _:
                return SteppedEngineActor(
                    context, role=kind, make_runner=self.make_runner, directory=self.directory,
                    prefix=PREFIX, num_blocks=NUM_BLOCKS, token_budget=TOKEN_BUDGET, max_running=16,
                )  # fmt: skip

    def actor(self, name: str) -> Any:
        """The actor of a node."""
        return self.nodes[name].actors[0]

    def engines(self) -> list[SteppedEngineActor]:
        """All engines that live."""
        return [
            a
            for name, n in self.nodes.items()
            for a in n.actors
            if isinstance(a, SteppedEngineActor) and not self.system._slots[name].gone
        ]

    def serving(self, kind: str, stream: Stream) -> str:
        """The name of the node of this kind that holds a request; the first if none says so."""
        names = [n for n in self.nodes if n.startswith(f"{kind}-")]
        for name in names:
            if stream.request_id in self.actor(name).load().get("requests", ()):
                return name
        return names[0]

    async def kill(self, name: str, *, again_after_s: float | None = 0.3) -> None:
        """SIGKILL; a supervisor says so and starts it again, if `again_after_s` is set."""
        kind, _, number = name.partition("-")
        await self.system.kill(self.nodes[name])
        if again_after_s is not None:
            await self.system.clock.sleep(again_after_s)
            await self.system.start(self.make(kind, int(number)))

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.system.freeze(self.nodes[name])
        actor = self.actor(name)
        if isinstance(actor, SteppedEngineActor):
            actor.stepped.frozen = True

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self.system.thaw(self.nodes[name])
        actor = self.actor(name)
        if isinstance(actor, SteppedEngineActor):
            actor.stepped.frozen = False
            actor.stepped.wake()

    # --- a native client ------------------------------------------------------------------------

    async def ask(
        self,
        prompt: str | list[Any],
        *,
        max_tokens: int,
        deadline_s: float | None = None,
        headers: dict[str, str] | None = None,
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
        bus.publish("requests.completion", json.dumps(body, ensure_ascii=False).encode(), reply=inbox, headers=headers)
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

    # --- what must hold at rest -----------------------------------------------------------------

    def busy(self) -> list[str]:
        """What still holds something of a request."""
        out = [f"{a.ref}: {sorted(a.works)}" for a in self.engines() if a.works]
        for a in self.engines():
            load = a.stepped.core.load()
            held = {k: load.get(k, 0) for k in ("running", "waiting", "held", "expected", "blocks_quarantined")}
            if any(held.values()) or a.stepped.core.pool.in_use:
                out.append(f"{a.ref}: {held}, {a.stepped.core.pool.in_use} blocks in use")
        for name, node in self.nodes.items():
            if not self.system._slots[name].gone and not all(a.idle for a in node.actors):
                out.append(f"{name} is not idle")
        return out

    async def rest(self, *, limit_s: float = 2.0) -> None:
        """Wait until nothing is held anywhere; the ledgers of all pools balance."""
        try:
            await self.system.until(lambda: not self.busy(), limit_s=limit_s)
        except TimeoutError:
            raise AssertionError(f"after {limit_s} s: {self.busy()}") from None
        for a in self.engines():
            a.stepped.core.check_integrity()


def inert(stream: Stream) -> bool:
    """Whether the client has left without a word."""
    return stream.inbox == ""


LIGHT = ("admission", "tokenize", "detokenize")
LAYOUT = {"admission": 2, "tokenize": 2, "detokenize": 2, "kv": 1, "transfer": 1, "prefill": 1, "decode": 2}


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
    **layout: int,
) -> AsyncIterator[Fleet]:
    """Start an instance, two of whatever may be killed; errors in handlers are raised at the end."""
    loop = asyncio.get_running_loop()
    loop.run_in_executor = _at_once  # type: ignore[method-assign, assignment]
    async with MemorySystem(clock=clock) as system:
        made = Fleet(system, directory, make_runner, whole_below)
        made.disk, made.quotas = disk, quotas
        made.hosts = hosts or {}
        for kind, count in {**LAYOUT, **layout}.items():
            for number in range(count):
                made.make(kind, number)
        await system.start()
        ready = sum(len(n.actors) for n in made.nodes.values())
        await system.until(lambda: all(len(n.membership.members()) == ready for n in made.nodes.values()), limit_s=10.0)
        yield made


def _at_once(_: Any, fn: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    try:
        future.set_result(fn(*args))
    except Exception as exc:
        future.set_exception(exc)
    return future
