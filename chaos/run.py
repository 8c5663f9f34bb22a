"""Runs scenarios against a system: requests without a pause, faults under them, and what the clients saw."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from nats.aio.client import Client as Nats

from chaos import invariants, workload
from chaos.clients import bare_id, http_chat, native_chat
from chaos.faults import Done, Faults, Target, send_signal
from chaos.gremlin import TAIL, Gremlin, Progress, draw
from chaos.history import Event, Recorder
from chaos.invariants import Answer
from chaos.judge import CAPS, Verdict, by_scenario, figures, judge
from chaos.scenarios import Act, Scenario
from chaos.watch import Seen, Watch
from schemas.subjects import Ref

READY_LIMIT_S = 90.0
STRIKE_LIMIT_S = 20.0
AFTERMATH_S = 30.0
QUIET_S = 2.4  # the bound on stopping, and a heartbeat more
ATTEMPTS = 4  # a fault that does not count is tried again this often
SEGMENT = 8  # faults that are judged together
BURST = 8
FROZEN_S = 0.15
LONG_WORDS = 900  # of prompt text: long enough that computing it takes several heartbeats
BURST_WORDS = 100
# A supervisor takes five short lives in a minute for a crash loop, which is not what is examined here.
SHORT_LIFE_S = 11.5
MAX_SHORT_LIVES = 3

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


@dataclass(slots=True)
class Strike:
    """A fault that was performed, and whom it met."""

    done: Done
    streams: tuple[str, ...]  # the clients' names of requests in the window


@dataclass(slots=True)
class Outcome:
    """What one attempt at a scenario came to; the last one of a part also has what the whole part came to."""

    scenario: str
    performed: int = 0
    effective: int = 0
    compared: int = 0
    failed: int = 0
    longest_gap_s: float = 0.0
    violations: list[invariants.Violation] = field(default_factory=list)


class Runner:
    """Drives scenarios: references first, then requests without a pause, and faults whenever the system is whole.

    Args:
        recorder, watch, http, nats: the clients' side.
        model: name that the requests ask for.
        seed: decides victims and moments.
        say: told a line per fault.
        streams: requests that run at any time.
        tokens: of each stream.
        deadline_s: of each request.
        faults: what performs faults.
    """

    def __init__(
        self, recorder: Recorder, watch: Watch, http: httpx.AsyncClient, nats: Nats, model: str, *, seed: int,
        say: Callable[[str], None], streams: int = 4, tokens: int = 96, deadline_s: float = 120.0,
        faults: Faults | None = None,
    ) -> None:  # fmt: skip
        self._recorder = recorder
        self._watch = watch
        self._http = http
        self._nats = nats
        self._model = model
        self._seed = seed
        self._say = say
        self._streams = streams
        self._tokens = tokens
        self._deadline_s = deadline_s
        self._faults = faults or Faults(time.monotonic)
        self._loads: dict[str, list[workload.Load]] = {}
        self._current: list[workload.Load] = []
        self._active: dict[str, workload.Load] = {}
        self._going = False
        self._longs: list[workload.Load] = []
        self._num_longs = self._num_segments = 0
        self._kinds: dict[str, int] = {}
        self._lives: dict[str, list[float]] = {}
        self._struck: set[str] = set()
        self._out: dict[Ref, float] = {}
        self.references: dict[str, Answer] = {}
        self.verdict = Verdict()

    # --- requests -------------------------------------------------------------------------------

    async def _send(self, load: workload.Load, name: str, recorder: Recorder | None = None) -> None:
        recorder = recorder or self._recorder
        limits = {"deadline_s": self._deadline_s}
        if load.client == "http":
            await http_chat(recorder, self._http, name, load.key, load.body, path=PATHS[load.api], **limits)
        else:
            subject = f"requests.{load.api}"
            await native_chat(recorder, self._nats, name, load.key, load.body, subject=subject, **limits)

    async def prepare(self, scenarios: Sequence[Scenario] = ()) -> None:
        """Note how many actors of each kind there are, and run every request of the scenarios undisturbed.

        Raises:
            RuntimeError: if an undisturbed request fails.
        """
        for seen in self._watch.ready():
            kind = seen.beat.ref.kind
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        for name in dict.fromkeys(s.loads for s in scenarios):
            await self._prepare_loads(name)

    async def _prepare_loads(self, name: str) -> None:
        loads = workload.LOADS[name](self._model, self._tokens)
        if any(load.stops for load in loads):
            said, _ = await self._undisturbed(loads)
            loads = [load.stopped_by(said[load.key].texts[0]) for load in loads]
        said, items = await self._undisturbed(loads)
        self._loads[name] = [replace(load, items=items[load.key]) if load.stops else load for load in loads]
        self._keep_references(said)

    def _keep_references(self, said: dict[str, Answer]) -> None:
        for key, answer in said.items():
            self.references[key] = answer
            self._recorder.add("", "reference", key=key, texts=list(answer.texts), reasons=list(answer.reasons))

    async def _undisturbed(self, loads: list[workload.Load]) -> tuple[dict[str, Answer], dict[str, int]]:
        """Run these requests; returns what each says, and how many items it had."""
        recorder = Recorder(time.monotonic)
        await asyncio.gather(*(self._send(load, load.key, recorder) for load in loads))
        broken = invariants.one_ending(recorder.events) + invariants.no_gap_no_repeat(recorder.events)
        errors = [e for e in recorder.events if e.kind == "terminal" and e.data["error"] is not None]
        if broken or errors:
            raise RuntimeError(f"the undisturbed run failed: {[str(v) for v in broken]} {[e.data for e in errors]}")
        said = {k.key: invariants.answer(e for e in recorder.events if e.request == k.key) for k in loads}
        return said, dict(recorder.done)

    async def _work(self, at: int, label: str) -> None:
        """Keep one request running."""
        turn = 0
        while self._going:
            load = self._current[(at + turn) % len(self._current)]
            name = f"{label}/{at}.{turn}/{load.key}"
            self._active[name] = load
            await self._send(load, name)
            del self._active[name]
            turn += 1

    def _long(self, label: str, words: int = LONG_WORDS) -> asyncio.Task[None]:
        (load,) = workload.long_prompts(self._model, 1, words=words, first=self._num_longs)
        self._num_longs += 1
        self._longs.append(load)
        return asyncio.create_task(self._send(load, f"{label}/{load.key}"))

    # --- the system -----------------------------------------------------------------------------

    async def whole(self) -> None:
        """Wait until every kind of actor is there and ready in its full number.

        Raises:
            TimeoutError: if a replacement does not come.
        """

        def complete(watch: Watch) -> bool:
            ready = [s for s in watch.ready() if not self._is_out(s)]
            return all(sum(s.beat.ref.kind == k for s in ready) >= n for k, n in self._kinds.items())

        await self._watch.until(complete, timeout_s=READY_LIMIT_S, what="every replacement ready")

    def _known(self) -> set[Ref]:
        return {s.beat.ref for s in self._watch.seen.values()}

    def _is_out(self, seen: Seen) -> bool:
        """Whether this incarnation was struck and has not spoken since."""
        return seen.t < self._out.get(seen.beat.ref, 0.0)

    def _victims(self, kind: str) -> dict[str, Seen]:
        """Actors of a kind that may be struck: those that a supervisor would not take for crashing on their own."""
        now = time.monotonic()
        found = {}
        for seen in self._watch.live(kind):
            lives = self._lives.get(seen.name, [])
            if lives and now - lives[-1] > SHORT_LIFE_S:
                lives.clear()
            if len(lives) < MAX_SHORT_LIVES and not self._is_out(seen):
                found[seen.name] = seen
        return found

    # --- parts and faults -----------------------------------------------------------------------

    async def rounds(self, scenario: Scenario, rounds: int) -> list[Outcome]:
        """Run a scenario until it has counted `rounds` times, with a few attempts more than that."""
        return await self.campaign([(scenario, round_) for round_ in range(rounds)])

    async def campaign(
        self, plan: Sequence[tuple[Scenario, int]], *, until: Callable[[], bool] = lambda: False
    ) -> list[Outcome]:
        """Run scenarios one after another, in parts that are judged each by itself.

        Args:
            plan: scenarios and their rounds.
            until: asked before each part; true ends the run early.
        """
        outcomes: list[Outcome] = []
        for at in range(0, len(plan), SEGMENT):
            if until():
                break
            outcomes += await self._segment(plan[at : at + SEGMENT])
        return outcomes

    async def _segment(self, plan: Sequence[tuple[Scenario, int]]) -> list[Outcome]:
        for scenario, _ in plan:
            if scenario.loads not in self._loads:
                await self._prepare_loads(scenario.loads)
        await self.whole()
        label = f"part-{self._num_segments}"
        self._num_segments += 1
        self._recorder.forget()
        self._out = {ref: until for ref, until in self._out.items() if until != math.inf or ref in self._known()}
        self._recorder.add("", "segment", label=label)
        engines = {s.name for s in self._watch.live("prefill", "decode", "both")}
        self._struck.clear()
        self._longs = []
        self._current, self._going = self._loads[plan[0][0].loads], True
        workers = [asyncio.create_task(self._work(at, label)) for at in range(self._streams)]
        outcomes: list[Outcome] = []
        try:
            for scenario, round_ in plan:
                self._current = self._loads[scenario.loads]
                outcomes += await self._attempts(scenario, round_, label)
        finally:
            self._going = False
            await asyncio.gather(*workers)
        await asyncio.sleep(QUIET_S)  # loads in the quiet after the last ending: they show that work stopped
        self._recorder.add("", "baseline", engines=sorted(engines - self._struck), caps=CAPS)
        events = list(self._recorder.events)
        await self._faults.settle()
        if self._longs:
            await self.whole()
            said, _ = await self._undisturbed(self._longs)  # after the faults: before, they would be in the cache
            self._keep_references(said)
        self._judge(outcomes[-1], events)
        return outcomes

    def _judge(self, outcome: Outcome, events: list[Event]) -> None:
        verdict = judge(events, self.references)
        self.verdict += verdict
        outcome.violations, outcome.compared, outcome.failed = verdict.violations, verdict.compared, verdict.failed
        bad = "".join(f"\n    {v}" for v in [*verdict.violations, *verdict.errors])
        self._say(
            f"  {verdict.compared} texts compared, {verdict.failed} failed, {len(verdict.violations)} violations{bad}"
        )

    async def _attempts(self, scenario: Scenario, round_: int, label: str) -> list[Outcome]:
        outcomes = []
        for attempt in range(ATTEMPTS):
            await self.whole()
            outcome = await self._fault(scenario, round_, f"{label}/{scenario.name}-{round_}.{attempt}")
            outcomes.append(outcome)
            self._say(
                f"  {scenario.name} {round_}: {outcome.effective} of {outcome.performed} faults count, "
                f"longest stall {outcome.longest_gap_s * 1000:.0f} ms"
            )
            if outcome.effective >= len(scenario.acts):
                break
        return outcomes

    async def _fault(self, scenario: Scenario, round_: int, label: str) -> Outcome:
        outcome = Outcome(scenario.name)
        gremlin = Gremlin(int(draw(self._seed, scenario.name) * 2**32), round_)
        extra: list[asyncio.Task[None]] = []
        struck: list[Strike] = []
        limit = time.monotonic() + STRIKE_LIMIT_S
        while not struck and time.monotonic() < limit:
            if scenario.works == "upstream" and all(t.done() for t in extra):
                extra.append(self._long(label))
            first = await self._first(scenario, gremlin, extra, label)
            if first is not None:
                struck.append(first)
            await asyncio.sleep(0.005)
        for number, act in enumerate(scenario.acts[1:] if struck else (), 1):
            await asyncio.sleep(act.after_s)
            strike = await self._next(act, gremlin, struck, number)
            if strike is not None:
                struck.append(strike)
        if struck:
            await self._aftermath(struck)
        await asyncio.gather(*extra)
        events = list(self._recorder.events)
        for strike in struck:
            effective = self._counts(scenario, events, strike)
            stall_s = _stall_s(events, strike)
            self._recorder.add(
                "", "fault", fault=strike.done.fault, victim=strike.done.victim, pid=strike.done.pid, at=strike.done.at,
                streams=list(strike.streams), effective=effective, scenario=scenario.name, round=round_,
                stall_s=stall_s,
            )  # fmt: skip
            outcome.performed += 1
            outcome.effective += effective
            outcome.longest_gap_s = max(outcome.longest_gap_s, stall_s)
        return outcome

    def _progress(self) -> list[Progress]:
        out = []
        for name, load in self._active.items():
            if name in self._recorder.ids and name not in self._recorder.ended and load in self._current:
                out.append(Progress(bare_id(self._recorder.ids[name]), self._recorder.done[name], load.total))
        return out

    def _names(self, ids: Sequence[str]) -> tuple[str, ...]:
        wanted = set(ids)
        return tuple(n for n in self._active if bare_id(self._recorder.ids.get(n, "")) in wanted)

    async def _first(
        self, scenario: Scenario, gremlin: Gremlin, extra: list[asyncio.Task[None]], label: str
    ) -> Strike | None:
        act, progress = scenario.acts[0], self._progress()
        victims = self._victims(act.victim)
        serving = {name: seen.held for name, seen in victims.items()}
        match scenario.works:
            case "streams":
                strike = gremlin.decide(progress, serving)
            case "upstream":
                strike = gremlin.decide_upstream(progress, self._pending(label), serving)
            case "burst":
                everyone = frozenset(p.request_id for p in progress if p.done >= gremlin.moment(p.total))
                strike = gremlin.decide_upstream(progress, everyone, dict.fromkeys(serving, everyone))
        if strike is None:
            return None
        seen = victims[strike.victim]
        names = self._names(strike.streams)
        on = {name: self._names(sorted(one.held)) for name, one in victims.items()}
        others = tuple((name, one.beat.pid) for name, one in victims.items() if name != strike.victim)
        if scenario.works == "burst":
            send_signal(seen.beat.pid, signal.SIGSTOP)
            try:
                extra.extend(self._long(label, BURST_WORDS) for _ in range(BURST))
                await asyncio.sleep(FROZEN_S)
            finally:
                done = await self._perform(act, seen, gremlin, 0)
            return Strike(done, names)
        done = await self._perform(act, seen, gremlin, 0, others)
        return Strike(done, names if done.victim == strike.victim else on[done.victim])

    async def _next(self, act: Act, gremlin: Gremlin, before: list[Strike], number: int) -> Strike | None:
        """Perform one more act of a scenario, under the streams that are in the window now."""
        taken = {s.done.victim for s in before}
        victims = {n: s for n, s in self._victims(act.victim).items() if n not in taken and s.beat.state == "ready"}
        window = {p.request_id for p in self._progress() if p.in_window}
        met = {bare_id(self._recorder.ids.get(n, "")) for s in before for n in s.streams} & window
        if act.who == "serving":
            serving = {n: s for n, s in victims.items() if s.held & (met or window)}
            victims = serving or victims
        if not victims:
            return None
        names = sorted(victims)
        seen = victims[names[int(draw(gremlin.seed, gremlin.round_, "victim", number) * len(names))]]
        ids = sorted(met | (seen.held & window)) or sorted(window)
        return Strike(await self._perform(act, seen, gremlin, number), self._names(ids))

    async def _perform(
        self, act: Act, seen: Seen, gremlin: Gremlin, number: int, others: tuple[tuple[str, int], ...] = ()
    ) -> Done:
        low, high = act.for_s
        for_s = low + (high - low) * draw(gremlin.seed, gremlin.round_, "for", number)
        now = time.monotonic()
        if act.fault == "kill":
            self._lives.setdefault(seen.name, []).append(now)
        self._out[seen.beat.ref] = math.inf if act.fault in ("kill", "drain") else now + for_s
        self._struck.add(seen.name)
        target = Target(seen.name, seen.beat.pid, for_s, seen.beat.node, others)
        return await self._faults.perform(act.fault, target)

    def _pending(self, label: str) -> frozenset[str]:
        """Ids of this attempt's long prompts that were accepted and have no item yet."""
        recorder = self._recorder
        waiting = [n for n in recorder.ids if n.startswith(f"{label}/") and not recorder.done[n]]
        return frozenset(bare_id(recorder.ids[n]) for n in waiting if n not in recorder.ended)

    async def _aftermath(self, struck: list[Strike]) -> None:
        """Wait until it is clear whether the faults count: their streams have gone on for long enough, or ended."""
        had = {n: self._recorder.done.get(n, 0) for s in struck for n in s.streams}
        limit = time.monotonic() + AFTERMATH_S
        while time.monotonic() < limit:
            recorder = self._recorder
            if all(n in recorder.ended or recorder.done.get(n, 0) > had[n] + TAIL for n in had):
                return
            await asyncio.sleep(0.02)

    def _counts(self, scenario: Scenario, events: list[Event], strike: Strike) -> bool:
        """Say, with hindsight, whether a fault counts."""
        for name in strike.streams:
            items = [e.t for e in events if e.request == name and e.kind == "item"]
            after = sum(t > strike.done.at for t in items)
            if len(items) - after >= 1 and after >= TAIL:
                break
        else:
            return False
        if scenario.works == "streams":
            return True
        at = strike.done.at
        others = {e.request for e in events if e.kind == "accepted" and e.t < at and "/long-" in e.request}
        begun = {e.request for e in events if e.kind == "item" and e.t < at}
        return bool(others - begun)


def _stall_s(events: list[Event], strike: Strike) -> float:
    """Return the longest silence of the struck streams that ended after the fault, in seconds."""
    longest = 0.0
    for name in strike.streams:
        times = [e.t for e in events if e.request == name and e.kind == "item"]
        pairs = zip(times, times[1:], strict=False)
        longest = max([longest, *(b - a for a, b in pairs if b > strike.done.at)])
    return longest


def interleaved(scenarios: Sequence[Scenario], rounds: int, seed: int) -> list[tuple[Scenario, int]]:
    """Return every scenario `rounds` times, each round in an order of the seed's choosing."""
    plan: list[tuple[Scenario, int]] = []
    for round_ in range(rounds):
        plan += [(s, round_) for s in sorted(scenarios, key=lambda s: draw(seed, "order", round_, s.name))]
    return plan


def summary(runner: Runner, *, seed: int, engine: str) -> dict[str, Any]:
    """Return the figures of a run."""
    verdict = runner.verdict
    return {"check": "chaos", "seed": seed, "engine": engine, **figures(verdict), "scenarios": by_scenario(verdict)}
