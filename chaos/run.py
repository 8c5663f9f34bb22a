"""Runs scenarios against a system and gathers what the clients saw."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from nats.aio.client import Client as Nats

from chaos import invariants, workload
from chaos.clients import bare_id, http_chat, native_chat
from chaos.faults import Done, Faults, send_signal
from chaos.gremlin import TAIL, Gremlin, Progress, Strike
from chaos.history import Event, Recorder
from chaos.invariants import Answer, Idle, Violation
from chaos.scenarios import Scenario
from chaos.watch import Seen, Watch

READY_LIMIT_S = 90.0
QUIET_S = 2.4  # the bound on stopping, and a heartbeat more
CAPS = {"running": 64, "waiting": 1024}  # what an engine may hold, as it is set by default
ATTEMPTS = 4  # a round whose fault does not count is run again this often
BURST = 8
FROZEN_S = 0.15
LONG_WORDS = 900  # of prompt text: long enough that computing it takes several heartbeats
BURST_WORDS = 100


@dataclass(slots=True)
class Outcome:
    """What one round came to."""

    scenario: str
    performed: int = 0
    effective: int = 0
    compared: int = 0
    failed: int = 0
    longest_gap_s: float = 0.0
    violations: list[Violation] = field(default_factory=list)


class Runner:
    """Drives the rounds: references first, then per round streams, a fault, and the checks over the round's history."""

    def __init__(
        self, recorder: Recorder, watch: Watch, http: httpx.AsyncClient, nats: Nats, model: str, *, seed: int,
        say: Callable[[str], None], streams: int = 4, tokens: int = 96, deadline_s: float = 120.0,
    ) -> None:
        self._recorder = recorder
        self._watch = watch
        self._http = http
        self._nats = nats
        self._model = model
        self._seed = seed
        self._say = say
        self._deadline_s = deadline_s
        self._loads = workload.streams(model, streams, tokens)
        self._faults = Faults(time.monotonic)
        self._longs = 0
        self._kinds: dict[str, int] = {}
        self.references: dict[str, Answer] = {}

    async def _send(self, load: workload.Load, name: str, recorder: Recorder | None = None) -> None:
        recorder = recorder or self._recorder
        if load.client == "http":
            await http_chat(recorder, self._http, name, load.key, load.body, deadline_s=self._deadline_s)
        else:
            await native_chat(recorder, self._nats, name, load.key, load.body, deadline_s=self._deadline_s)

    async def prepare(self) -> None:
        """Note how many actors of each kind there are, and run every request undisturbed.

        Raises:
            RuntimeError: if an undisturbed request fails.
        """
        for seen in self._watch.ready():
            kind = seen.beat.ref.kind
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        await self._refer(self._loads)

    async def _refer(self, loads: list[workload.Load]) -> None:
        recorder = Recorder(time.monotonic)
        await asyncio.gather(*(self._send(load, load.key, recorder) for load in loads))
        broken = invariants.one_ending(recorder.events) + invariants.no_gap_no_repeat(recorder.events)
        errors = [e for e in recorder.events if e.kind == "terminal" and e.data["error"] is not None]
        if broken or errors:
            raise RuntimeError(f"the undisturbed run failed: {[str(v) for v in broken]} {[e.data for e in errors]}")
        for load in loads:
            self.references[load.key] = invariants.answer(e for e in recorder.events if e.request == load.key)

    async def whole(self) -> None:
        """Wait until every kind of actor is there and ready in its full number.

        Raises:
            TimeoutError: if a replacement does not come.
        """

        def complete(watch: Watch) -> bool:
            ready = watch.ready()
            return all(sum(s.beat.ref.kind == k for s in ready) >= n for k, n in self._kinds.items())

        await self._watch.until(complete, timeout_s=READY_LIMIT_S, what="every replacement ready")

    async def rounds(self, scenario: Scenario, rounds: int) -> list[Outcome]:
        """Run a scenario until its fault has counted `rounds` times, with a few attempts more than that."""
        outcomes: list[Outcome] = []
        for round_ in range(rounds):
            for attempt in range(ATTEMPTS):
                await self.whole()
                outcome = await self._round(scenario, round_, f"{scenario.name}-{round_}.{attempt}")
                outcomes.append(outcome)
                bad = "".join(f"\n    {v}" for v in outcome.violations)
                self._say(
                    f"  {scenario.name} {round_ + 1}/{rounds}: {'counts' if outcome.effective else 'does not count'}, "
                    f"longest gap {outcome.longest_gap_s * 1000:.0f} ms, {outcome.compared} texts compared, "
                    f"{outcome.failed} failed, {len(outcome.violations)} violations{bad}"
                )
                if outcome.effective:
                    break
        return outcomes

    async def _round(self, scenario: Scenario, round_: int, label: str) -> Outcome:
        outcome = Outcome(scenario.name)
        start = len(self._recorder.events)
        engines = {s.name for s in self._watch.live("prefill", "decode", "both")}
        names = [f"{label}/{load.key}" for load in self._loads]
        longs: list[workload.Load] = []
        tasks = [
            asyncio.create_task(self._send(load, name)) for load, name in zip(self._loads, names, strict=True)
        ]
        extra: list[asyncio.Task[None]] = []
        gremlin = Gremlin(self._seed, round_)
        struck: tuple[Strike, Done] | None = None
        while struck is None and not all(t.done() for t in tasks):
            if scenario.works == "upstream" and all(t.done() for t in extra):
                extra.append(self._long(longs, label))
            struck = await self._strike(scenario, gremlin, names, longs, extra, label)
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks, *extra)
        await asyncio.sleep(QUIET_S)  # loads in the quiet after the last ending: they show that work stopped
        events = self._recorder.events[start:]
        await self._faults.settle()
        if struck is not None:
            outcome.performed = 1
            outcome.effective = int(self._counts(scenario, events, *struck, names))
            strike, done = struck
            self._recorder.add(
                "", "fault", fault=done.fault, victim=done.victim, pid=done.pid, effective=bool(outcome.effective),
                streams=list(strike.streams), at=done.at,
            )
        if longs:
            await self.whole()
            await self._refer(longs)  # after the fault: before it, their prompts would be in the cache
        victims = {struck[1].victim} if struck is not None else set()
        self._judge(outcome, events, names, {e: Idle() for e in engines - victims})
        return outcome

    def _judge(self, outcome: Outcome, events: list[Event], names: list[str], idle: dict[str, Idle]) -> None:
        outcome.violations = (
            invariants.one_ending(events)
            + invariants.no_gap_no_repeat(events)
            + invariants.same_text(events, self.references)
            + invariants.work_stops(events, idle)
            + invariants.bounded(events, CAPS)
        )
        ends = [e for e in events if e.kind == "terminal"]
        outcome.compared = sum(e.data["error"] is None for e in ends)
        sent = {e.request for e in events if e.kind == "sent"}
        outcome.failed = len(sent) - len({e.request for e in ends if e.data["error"] is None})
        for end in ends:
            if end.data["error"] is not None:
                self._say(f"    {end.request} failed: {end.data['error']}")
        outcome.longest_gap_s = invariants.longest_gap_s(e for e in events if e.request in names)

    def _long(self, longs: list[workload.Load], label: str, words: int = LONG_WORDS) -> asyncio.Task[None]:
        (load,) = workload.long_prompts(self._model, 1, words=words, first=self._longs)
        self._longs += 1
        longs.append(load)
        return asyncio.create_task(self._send(load, f"{label}/{load.key}"))

    def _progress(self, names: list[str]) -> list[Progress]:
        out = []
        for name, load in zip(names, self._loads, strict=True):
            if name in self._recorder.ids and name not in self._recorder.ended:
                out.append(Progress(bare_id(self._recorder.ids[name]), self._recorder.done[name], load.total))
        return out

    async def _strike(
        self, scenario: Scenario, gremlin: Gremlin, names: list[str], longs: list[workload.Load],
        extra: list[asyncio.Task[None]], label: str,
    ) -> tuple[Strike, Done] | None:
        progress = self._progress(names)
        victims = {s.name: s for s in self._watch.live(*scenario.kinds)}
        serving = {name: seen.held for name, seen in victims.items()}
        match scenario.works:
            case "streams":
                strike = gremlin.decide(progress, serving)
            case "upstream":
                strike = gremlin.decide_upstream(progress, self._pending(longs, label), serving)
            case "burst":
                everyone = frozenset(p.request_id for p in progress if p.done >= gremlin.moment(p.total))
                strike = gremlin.decide_upstream(progress, everyone, dict.fromkeys(serving, everyone))
        if strike is None:
            return None
        seen = victims[strike.victim]
        if scenario.works == "burst":
            return strike, await self._burst(seen, longs, extra, label)
        return strike, self._faults.perform(scenario.fault, seen.beat.pid, seen.name)

    async def _burst(
        self, seen: Seen, longs: list[workload.Load], extra: list[asyncio.Task[None]], label: str
    ) -> Done:
        send_signal(seen.beat.pid, signal.SIGSTOP)
        try:
            extra.extend(self._long(longs, label, BURST_WORDS) for _ in range(BURST))
            await asyncio.sleep(FROZEN_S)
        finally:
            done = self._faults.kill(seen.beat.pid, seen.name)
        return done

    def _pending(self, longs: list[workload.Load], label: str) -> frozenset[str]:
        names = [f"{label}/{load.key}" for load in longs]
        waiting = [n for n in names if n in self._recorder.ids and not self._recorder.done[n]]
        return frozenset(bare_id(self._recorder.ids[n]) for n in waiting if n not in self._recorder.ended)

    def _counts(self, scenario: Scenario, events: list[Event], strike: Strike, done: Done, names: list[str]) -> bool:
        """Say, with hindsight, whether the fault counts."""
        ids = {name: bare_id(self._recorder.ids[name]) for name in names if name in self._recorder.ids}
        for name, request_id in ids.items():
            items = [e.t for e in events if e.request == name and e.kind == "item"]
            after = sum(t > done.at for t in items)
            if request_id in strike.streams and len(items) - after >= 1 and after >= TAIL:
                break
        else:
            return False
        if scenario.works == "streams":
            return True
        others = {e.request for e in events if e.kind == "accepted" and e.t < done.at} - set(names)
        begun = {e.request for e in events if e.kind == "item" and e.t < done.at}
        return bool(others - begun)


def summary(outcomes: list[Outcome], *, seed: int, engine: str) -> dict[str, Any]:
    """Return the figures of a run."""

    def figures(part: list[Outcome]) -> dict[str, Any]:
        gaps = sorted(o.longest_gap_s * 1000 for o in part if o.effective)
        found = [v for o in part for v in o.violations]
        return {
            "faults_performed": sum(o.performed for o in part),
            "faults_effective": sum(o.effective for o in part),
            "texts_compared": sum(o.compared for o in part),
            "failed": sum(o.failed for o in part),
            "gaps": sum(v.invariant == "gap" or " gap:" in v.detail for v in found),
            "repeats": sum(v.invariant == "repeat" or " repeat:" in v.detail for v in found),
            "differing": sum(v.invariant == "same_text" for v in found),
            "violations": len(found),
            "longest_gap_ms": {
                "p50": round(gaps[(len(gaps) - 1) // 2], 1) if gaps else None,
                "max": round(gaps[-1], 1) if gaps else None,
            },
        }

    names = list(dict.fromkeys(o.scenario for o in outcomes))
    scenarios = {name: figures([o for o in outcomes if o.scenario == name]) for name in names}
    return {"check": "chaos", "seed": seed, "engine": engine, **figures(outcomes), "scenarios": scenarios}
