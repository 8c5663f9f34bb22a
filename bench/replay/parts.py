"""The parts of a replay: each runs, prints its table and returns its figures; targets it has go to the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.ttft import Costs
from bench.replay.crowds import crowds
from bench.replay.facts import BUSY_YET_STABLE, COLLAPSE, HIT_RATE_TOLERANCE, Facts, Target, Verdict
from bench.replay.fleet import Fleet, Load, Outcome, Replay, offered
from bench.replay.store import POLICIES, UNLIMITED, hit_rate
from bench.replay.trace import Trace

CAPACITIES = {"1M": 1_000_000, "3M": 3_000_000, "10M": 10_000_000, "20M": 20_000_000, "unlimited": UNLIMITED}
OURS, COPIES, BASELINE, COLLAPSING = "ours", "ours+copies", "least-load", "longest-prefix"
AHEAD, BOTH = "ours+ahead", "ours+copies+ahead"
PLACEMENTS = ("random", "round-robin", BASELINE, COLLAPSING, OURS, AHEAD, COPIES)
WITHOUT_HASHES = ("random", "round-robin", BASELINE, OURS)
LIGHTER = 0.8  # of the load


@dataclass(frozen=True, slots=True)
class Setting:
    """What all parts have in common."""

    trace: Trace
    facts: Facts | None
    costs: Costs
    replicas: Sequence[int]
    cache_tokens: int
    load: float
    eviction: str
    bunched: bool  # the first tick's requests all start at once, on as many replicas, which then all have block 0
    seed: int
    console: Console
    verdict: Verdict

    def fleet(self, replicas: int, eviction: str | None = None) -> Fleet:
        """Return a fleet of so many replicas."""
        return Fleet(replicas, self.cache_tokens, eviction or self.eviction, self.costs)

    def run(self, placement: str, fleet: Fleet, load: float, *, closed: bool = False) -> tuple[Outcome, float]:
        """Replay at an offered load; returns how it went, and how much faster than recorded requests came."""
        speed = load / offered(Load(self.trace), fleet)
        return Replay(placement, fleet, Load(self.trace, speed, closed), self.seed).run(), speed


def hits(setting: Setting) -> dict[str, Any]:
    """Token hit rate of one store by policy and capacity."""
    table = Table("policy", *CAPACITIES, title="token hit rate of one store, by its capacity in tokens")
    rates: dict[str, dict[str, float]] = {}
    endless = hit_rate(setting.trace, UNLIMITED, "lru")  # nothing is evicted, so all policies are one
    for policy in POLICIES:
        rates[policy] = {
            name: endless if tokens == UNLIMITED else hit_rate(setting.trace, tokens, policy)
            for name, tokens in CAPACITIES.items()
        }
        table.add_row(policy, *(f"{rate:.3f}" for rate in rates[policy].values()))
    setting.console.print(table)
    if setting.facts is not None:
        for name, published in setting.facts.lru.items():
            off = abs(rates["lru"][name] - published)
            setting.verdict.targets.append(
                Target(f"LRU at {name}: off the published rate by", off, most=HIT_RATE_TOLERANCE)
            )
    return {policy: {name: round(rate, 4) for name, rate in row.items()} for policy, row in rates.items()}


def placements(setting: Setting) -> dict[str, Any]:
    """Time to first token by placement, at the offered load."""
    names = PLACEMENTS if setting.trace.has_hashes else WITHOUT_HASHES
    out: dict[str, Any] = {}
    for replicas in setting.replicas:
        fleet = setting.fleet(replicas)
        found = {name: setting.run(name, fleet, setting.load) for name in names}
        outcomes, speed = {name: outcome for name, (outcome, _) in found.items()}, found[names[0]][1]
        title = f"{replicas} replicas, offered load {setting.load:.2f} (recorded times ÷ {speed:.2f})"
        _show(setting.console, title, outcomes)
        out[str(replicas)] = {"speed": round(speed, 3), **{name: _row(outcome) for name, outcome in outcomes.items()}}
        ratio = outcomes[BASELINE].mean_s / outcomes[OURS].mean_s
        out[str(replicas)]["least_load_over_ours"] = round(ratio, 3)
        if setting.facts is not None and setting.facts.over_least_load is not None:
            low, high = BUSY_YET_STABLE
            setting.verdict.targets += [
                Target(f"{replicas} replicas: utilisation under least-load", outcomes[BASELINE].utilisation, low, high),
                Target(f"{replicas} replicas: least-load over ours", ratio, least=setting.facts.over_least_load),
            ]
            if not setting.bunched:
                collapse = outcomes[COLLAPSING].mean_s / outcomes[OURS].mean_s
                setting.verdict.targets.append(
                    Target(f"{replicas} replicas: longest-prefix over ours", collapse, least=COLLAPSE)
                )
    return out


def lighter(setting: Setting) -> dict[str, Any]:
    """The same at a lighter load, where queues are short."""
    load = LIGHTER * setting.load
    return _pairs(setting, f"offered load {load:.2f}", load, closed=False)


def turns(setting: Setting) -> dict[str, Any]:
    """The same with next turns that wait for the turn before: a slow fleet is asked less."""
    linked = sum(arrival.after is not None for arrival in setting.trace.arrivals)
    title = f"{linked:,} next turns follow the turn before, offered load {setting.load:.2f} at the recorded gaps"
    return _pairs(setting, title, setting.load, closed=True)


def evictions(setting: Setting) -> dict[str, Any]:
    """Our placement by the eviction policy of the replicas' stores."""
    out: dict[str, Any] = {}
    for replicas in setting.replicas:
        outcomes = {policy: setting.run(OURS, setting.fleet(replicas, policy), setting.load)[0] for policy in POLICIES}
        _show(setting.console, f"{replicas} replicas, ours, by eviction policy", outcomes)
        out[str(replicas)] = {policy: _row(outcome) for policy, outcome in outcomes.items()}
    return out


def hot(setting: Setting) -> dict[str, Any]:
    """Crowds that ask for the same long prefixes: copies on demand, ahead of it, both, and none."""
    trace, asked = crowds(setting.seed)
    names, out = (OURS, AHEAD, COPIES, BOTH), {}
    for replicas in setting.replicas:
        fleet, outcomes, theirs = setting.fleet(replicas), {}, {}
        load = Load(trace, setting.load / offered(Load(trace), fleet))
        for name in names:
            replay = Replay(name, fleet, load, setting.seed)
            outcomes[name] = replay.run()
            theirs[name] = round(replay.mean_s(asked), 4)
        _show(setting.console, f"{replicas} replicas, crowds, offered load {setting.load:.2f}", outcomes)
        said = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in theirs.items())
        setting.console.print(f"mean of prompts with a hot prefix: {said}")
        rows = {name: _row(outcome) | {"hot_mean_s": theirs[name]} for name, outcome in outcomes.items()}
        out[str(replicas)] = rows
    return out


def _pairs(setting: Setting, title: str, load: float, *, closed: bool) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for replicas in setting.replicas:
        fleet = setting.fleet(replicas)
        outcomes = {name: setting.run(name, fleet, load, closed=closed)[0] for name in (BASELINE, OURS)}
        _show(setting.console, f"{replicas} replicas, {title}", outcomes)
        ratio = outcomes[BASELINE].mean_s / outcomes[OURS].mean_s
        if closed and setting.facts is not None and setting.facts.over_least_load is not None:
            name = f"{replicas} replicas, turns in turn: least-load over ours"
            setting.verdict.targets.append(Target(name, ratio, least=setting.facts.over_least_load))
        out[str(replicas)] = {
            **{name: _row(outcome) for name, outcome in outcomes.items()},
            "least_load_over_ours": round(ratio, 3),
        }
    return out


def _show(console: Console, title: str, outcomes: dict[str, Outcome]) -> None:
    # Seconds; shares of prompt tokens found and copied; share of time busy; share of requests at the busiest replica.
    table = Table(title=title)
    table.add_column("TTFT, s", no_wrap=True)
    for head in ("mean", "p50", "p99", "hits", "copied", "busy", "top"):
        table.add_column(head, no_wrap=True, justify="right")
    for name, o in outcomes.items():
        seconds = (f"{value:,.2f}" for value in (o.mean_s, o.p50_s, o.p99_s))
        shares = (f"{value:.3f}" for value in (o.hit_rate, o.copied + o.ahead, o.utilisation, o.busiest))
        table.add_row(name, *seconds, *shares)
    console.print(table)


def _row(outcome: Outcome) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(outcome).items()}


PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "hits": hits,
    "placements": placements,
    "lighter": lighter,
    "turns": turns,
    "evictions": evictions,
    "hot": hot,
}
NEED_HASHES = frozenset({"hits", "turns", "evictions"})
