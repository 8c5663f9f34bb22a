"""One round of the failover bench: streams, a fault under them, the gap that clients see, and what it is made of."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from nats.aio.client import Client as Nats

from bench.client import LoadFailed, Timing
from bench.dynamo import Dynamo
from bench.load import one
from bench.migration import Counters, counters, grown, share_loaded
from bench.tap import Heard, HeardItems, Tap
from chaos.faults import Faults
from chaos.instance import Address
from chaos.watch import Watch
from chaos.workload import FILLER
from schemas.messages import Dispatch, ExitNotice
from schemas.subjects import Ref

HEALTHY_S = 10.3  # a child that dies younger than its supervisor's patience is started again ever later
WATCH_S = 12.0  # a stream that shows nothing for so long after a fault counts as stuck
FROZEN_S = 15.0  # longer than anybody would watch
ATTEMPTS = 25
POLL_S = 0.002
HEARD_S = 0.05
PROMPT = FILLER * 3 + "What follows from that?"


@dataclass(slots=True)
class Round:
    """What one fault came to; times in ms.

    `again_ms` is what passed from a stream's new placing to its next id, the longest of those that moved: there the
    survivor computed several streams again, one after the other, and went on with its own. `one_prefill_ms` is what one
    such prompt takes alone.
    """

    gap_ms: float
    failed: int
    differing: int
    compared: int
    stuck: int
    moved: int = 0
    loaded_share: float = 0.0  # blocks that engines loaded meanwhile over those of the moved prompts
    again_ms: float = 0.0
    one_prefill_ms: float = 0.0  # 0: not known
    noticed_ms: float = 0.0
    placed_ms: float = 0.0
    shown_ms: float = 0.0


class Victims(Protocol):
    """A system whose decode processes can be hurt."""

    async def whole(self) -> None:
        """Wait until it is complete and a process may be hurt."""
        ...

    def choose(self, number: int) -> int | None:
        """Return the pid of a process that serves streams now and may be hurt."""
        ...

    def explain(self, at: float, found: Round) -> None:
        """Fill in what the gap after a fault at `at` was made of, where that can be known."""
        ...

    async def prefill_ms(self, ask: Callable[[], Awaitable[Any]]) -> float:
        """Let one request run alone; returns what its prompt took an engine, 0 where that cannot be known."""
        ...

    async def counted(self) -> Counters:
        """Return the counters of all engines now, as far as they are known."""
        ...


class OurVictims:
    """The decode engines of an instance; the tap knows whom they serve, and when a stream was placed anew."""

    def __init__(self, nats: Nats, where: Address) -> None:
        self._nats = nats
        self._where = where
        self._watch = Watch(time.monotonic)
        self._born: dict[str, float] = {}  # epoch -> when it was first seen ready
        self._heard: list[Heard] = []
        self._items: list[HeardItems] = []
        self._count = 0
        self._struck: Ref | None = None

    async def start(self) -> None:
        """Listen."""
        await self._watch.start(self._nats)
        await Tap(self._on_message, self._items.append).start(self._nats)
        await self._watch.until(lambda w: w.ready("decode", "both"), timeout_s=30.0, what="an engine heard")
        await asyncio.sleep(0.6)
        self._count = len(self._watch.ready("decode", "both"))

    def _on_message(self, heard: Heard) -> None:
        if isinstance(heard.message, (Dispatch, ExitNotice)):
            self._heard.append(heard)

    def _age_s(self, epoch: str) -> float:
        return time.monotonic() - self._born.setdefault(epoch, time.monotonic())

    async def whole(self) -> None:
        """Wait until all engines are ready and one of them has lived long enough."""
        self._heard.clear()
        self._items.clear()

        def ripe(watch: Watch) -> bool:
            ready = watch.ready("decode", "both")
            ages = [self._age_s(seen.beat.ref.epoch) for seen in ready]
            return len(ready) >= self._count and max(ages) >= HEALTHY_S

        await self._watch.until(ripe, timeout_s=90.0, what="all engines ready, one of them long since")

    def choose(self, number: int) -> int | None:
        """Return the oldest engine that sends items now."""
        since = time.monotonic() - 0.3
        serving = {h.sender.epoch for h in self._items if h.t > since and h.sender is not None}
        able = [s for s in self._watch.ready("decode", "both") if s.beat.ref.epoch in serving]
        able = [s for s in able if self._age_s(s.beat.ref.epoch) >= HEALTHY_S]
        if not able:
            return None
        seen = max(able, key=lambda s: self._age_s(s.beat.ref.epoch))
        self._struck = seen.beat.ref
        return seen.beat.pid

    def explain(self, at: float, found: Round) -> None:
        """Read from the bus when the exit was told, the streams placed anew, and their next ids chosen."""
        last: dict[str, int] = {}
        for items in self._items:
            if items.t <= at + 0.001 and items.sender == self._struck:
                for item in items.batch.items:
                    last[items.batch.request_id] = max(last.get(items.batch.request_id, -1), item.index)
        exits = [h.t for h in self._heard if isinstance(h.message, ExitNotice) and h.t > at]
        found.noticed_ms = (min(exits) - at) * 1000 if exits else 0.0
        placed: dict[str, float] = {}
        for h in self._heard:
            if isinstance(h.message, Dispatch) and h.t > at and h.message.request_id in last:
                placed[h.message.request_id] = h.t
        next_at: dict[str, float] = {}
        for items in self._items:
            name = items.batch.request_id
            if name in placed and items.t > placed[name] and name not in next_at and items.sender != self._struck:
                if any(item.index > last[name] for item in items.batch.items):
                    next_at[name] = items.t
        found.moved = len(next_at)
        if next_at:
            found.placed_ms = (max(placed.values()) - at) * 1000
            found.again_ms = max(next_at[name] - placed[name] for name in next_at) * 1000
            found.shown_ms = found.gap_ms - (max(next_at.values()) - at) * 1000

    async def prefill_ms(self, ask: Callable[[], Awaitable[Any]]) -> float:
        """Hear when it was placed, and when its first id was chosen."""
        self._heard.clear()
        self._items.clear()
        await ask()
        await asyncio.sleep(HEARD_S)  # the client may see its text before this one hears the items
        return computed_ms(self._heard, self._items)

    async def counted(self) -> Counters:
        """Read the page of metrics."""
        async with self._where.client() as http:
            return counters((await http.get("/metrics")).text)


def computed_ms(heard: list[Heard], items: list[HeardItems]) -> float:
    """Return the time from the first request's placing to its first items; 0 if one of them was not heard."""
    placed = next((h for h in heard if isinstance(h.message, Dispatch)), None)
    if placed is None or not isinstance(placed.message, Dispatch):
        return 0.0
    name = placed.message.request_id
    chosen = next((i.t for i in items if i.batch.request_id == name and i.batch.items), placed.t)
    return (chosen - placed.t) * 1000


class DynamoVictims:
    """Dynamo's workers, by turns."""

    def __init__(self, dynamo: Dynamo) -> None:
        self._dynamo = dynamo

    async def whole(self) -> None:
        """Start what has died, and wait for it."""
        await self._dynamo.whole()

    def choose(self, number: int) -> int | None:
        """Return one of them: its router deals streams out by turns, so each serves some."""
        return self._dynamo.pid(number % self._dynamo.workers)

    def explain(self, at: float, found: Round) -> None:
        """Nothing is known of its inside."""

    async def prefill_ms(self, ask: Callable[[], Awaitable[Any]]) -> float:
        """Nothing is known of its inside."""
        return 0.0

    async def counted(self) -> Counters:
        """Nothing is known of its inside."""
        return {}


@dataclass(slots=True)
class Rounds:
    """Runs rounds of one fault at one number of streams; `warm` ones ask for warm failover."""

    victims: Victims
    base: str
    model: str
    streams: int
    tokens: int
    fault: str  # kill or stop
    seed: int
    say: Callable[[str], None]
    warm: bool = False
    _turn: int = field(default=0)

    def _prompts(self) -> list[str]:
        self._turn += 1
        head = f"{self.seed} {self.fault} {self.streams} {'warm ' * self.warm}{self._turn}"
        return [f"{head} {i}: " + PROMPT for i in range(self.streams)]

    async def one(self, number: int) -> Round:
        """Run rounds until a fault has struck a process that served a stream.

        Raises:
            TimeoutError: if none could be struck.
        """
        for _ in range(ATTEMPTS):
            await self.victims.whole()
            found = await self._try(number)
            if found is not None:
                self.say(f"  {self.fault} {self.streams} {number}: {found}")
                return found
        raise TimeoutError("no process that may be hurt served a stream")

    async def _try(self, number: int) -> Round | None:
        prompts = self._prompts()
        timings = [Timing(0.0) for _ in prompts]
        fields = {"warm_failover": True} if self.warm else {}
        before = await self.victims.counted()
        tasks = [
            asyncio.create_task(one(self.base, self.model, prompt, self.tokens, timing, **fields))
            for prompt, timing in zip(prompts, timings, strict=True)
        ]
        faults = Faults(time.monotonic)
        try:
            while min(len(t.chunks_at) for t in timings) < self.tokens // 4:
                if any(t.done() for t in tasks):
                    break
                await asyncio.sleep(POLL_S)
            pid = self.victims.choose(number)
            if pid is None or any(t.done() for t in tasks):
                await asyncio.gather(*tasks)
                return None
            shown = statistics.median_low([len(t.texts) for t in timings])
            done = faults.kill(pid, "decode") if self.fault == "kill" else faults.freeze(pid, "decode", for_s=FROZEN_S)
            stuck = await self._watch(tasks, timings, done.at)
            silent = {id(t) for t in stuck}
            gap_s = max(_gap(t, done.at, time.monotonic() if id(t) in silent else None) for t in timings)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await faults.settle()
        failed = sum(isinstance(e, (LoadFailed, OSError, EOFError)) for e in ended)
        found = Round(gap_s * 1000, failed, 0, 0, len(stuck))
        self.victims.explain(done.at, found)
        if self.fault == "stop":
            _kill_if_alive(pid, self.victims)
        await self.victims.whole()
        loaded = grown(before, await self.victims.counted(), "kv_blocks_loaded_total")
        found.loaded_share = share_loaded(loaded, found.moved * min(t.prompt_tokens for t in timings))
        references = await asyncio.gather(*(one(self.base, self.model, p, self.tokens) for p in prompts))
        pairs = [(e.text, r.text) for e, r in zip(ended, references, strict=True) if isinstance(e, Timing)]
        found.compared, found.differing = len(pairs), sum(a != b for a, b in pairs)
        found.one_prefill_ms = await self._one_prefill(references[0].texts[:shown])
        return found

    async def _one_prefill(self, shown: list[str]) -> float:
        """Measure what one stream that moved takes to compute again: its prompt, and behind it what was shown of it."""
        prompt = self._prompts()[0] + "".join(shown)
        return await self.victims.prefill_ms(lambda: one(self.base, self.model, prompt, 2))

    async def _watch(self, tasks: list[asyncio.Task[Timing]], timings: list[Timing], at: float) -> list[Timing]:
        """Wait for all streams; returns those that show nothing any more."""
        while True:
            done, running = await asyncio.wait(tasks, timeout=0.5)
            silent = [
                t for task, t in zip(tasks, timings, strict=True)
                if not task.done() and time.monotonic() - max(at, t.chunks_at[-1]) > WATCH_S
            ]  # fmt: skip
            if len(silent) == len(running):
                return silent


def _kill_if_alive(pid: int, victims: Victims) -> None:
    """Dynamo's frozen worker was thawed, and its streams are gone; a fresh one makes the next round like the first."""
    if isinstance(victims, DynamoVictims):
        os.kill(pid, signal.SIGKILL)


def _gap(timing: Timing, at: float, now: float | None) -> float:
    """Return the longest silence in seconds that ended after `at`; one that has not ended lasts until `now`."""
    times = [*timing.chunks_at, *([now] if now is not None else [])]
    return max((b - a for a, b in zip(times, times[1:], strict=False) if b > at), default=0.0)
