"""Where to run a request: pure, over the last heartbeats, what was sent since, and what is stored of its prompt.

The engine with the least estimated time to the first token: the work that waits there, the load of stored blocks, the
prefill of the rest (`actors.ttft`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.ttft import Choice, Costs, LoadCost, PrefillCost, View, least_ttft
from schemas.subjects import Ref

# A view of load older than this counts as busy: heartbeats come every 250 ms.
STALE_AFTER_S = 2.0
SEQUENCE_TOKENS = 64  # what a sequence is worth beside a prompt's tokens, for what it will still take
FULL_TOKENS = 256.0  # and a pool that is full
ALIKE = 1.5  # engines whose costs differ by less are taken for equal: else noise would decide who gets more
TYPICAL_TOKENS = 512.0  # of a prompt, where no engine tells
UNKNOWN = Costs(PrefillCost(0.005, 1e-3), LoadCost(1.0, 5e4, 0.003))  # until an engine tells


class Candidate(Protocol):
    """What placement wants to know of a member."""

    @property
    def ref(self) -> Ref: ...
    @property
    def load(self) -> Mapping[str, Any]: ...
    @property
    def last_heard(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt's first tokens that an engine need not compute: in its own pool, up to there in host memory, in all.

    The store that it asks would fetch what follows, up to `far`, from another host in `far_s`.
    """

    resident: int = 0
    memory: int = 0
    total: int = 0
    far: int = 0
    far_s: float = 0.0
    store: Ref | None = field(default=None, compare=False)  # which of its host's stores has it


@dataclass(frozen=True, slots=True)
class Placement:
    """`first` gets the dispatch; with `decode` it hands the sequences over there, without it runs them to the end.

    The rest says how it came about: the estimate, how many tokens are to be computed, and what decided (`only`,
    `load`, `prefix`).
    """

    first: Ref
    decode: Ref | None
    estimate_s: float = field(default=0.0, compare=False)
    new_tokens: int = field(default=0, compare=False)
    service_s: float = field(default=0.0, compare=False)  # the estimate without the queue
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines that may take work now, by role."""

    prefill: Sequence[Candidate]
    decode: Sequence[Candidate]
    both: Sequence[Candidate]


def place(
    engines: Engines,
    in_flight: Mapping[Ref, int],
    now: float,
    *,
    num_choices: int,
    max_tokens: int,
    prompt_tokens: int = 0,
    whole_below: int = 0,
    avoid: frozenset[Ref] = frozenset(),
    stored: Mapping[Ref, Stored] | None = None,
    disk_s_per_token: Mapping[Ref, float] | None = None,
    tie: str = "",
) -> Placement | None:
    """Choose engines for a request, or None when nobody can take it.

    Prefers a pair of prefill and decode, then a `both`, then any engine at all: every engine can run a request whole,
    so that one survivor is enough. A request that ends with its first token is never handed over, nor is a prompt
    with one choice of which a decode engine has little to compute, and where that is sooner than a prefill elsewhere
    and the way back: a prefill engine is there so that prompts do not hold up running streams; where none runs the
    hand-off is only a delay, and a prompt that would have to queue there starts sooner elsewhere, in chunks that keep
    the pace of the streams.

    Args:
        in_flight: tokens' worth of work sent to each engine since its last heartbeat, by this sender.
        prompt_tokens: the length of the prompt, all prompts together.
        whole_below: prompts of which fewer tokens must be computed may run whole on a decode engine; 0: all are
            handed over.
        avoid: engines to take only when no other is left (suspects).
        stored: what each engine need not compute of the prompt.
        disk_s_per_token: what it takes the store of an engine's host to read a token's KV from its disk.
        tie: of the request: spreads requests over engines that are equal.
    """
    everyone = [*engines.prefill, *engines.decode, *engines.both]
    if avoid and any(c.ref not in avoid for c in everyone):
        kept = ([c for c in kind if c.ref not in avoid] for kind in (engines.prefill, engines.decode, engines.both))
        engines = Engines(*kept)
        everyone = [c for c in everyone if c.ref not in avoid]
    views = views_of(everyone, in_flight, now, stored or {}, disk_s_per_token or {}, tie=tie)
    finder = _Finder(views, max(1, prompt_tokens))
    prefill, decode, both = (finder.best(kind) for kind in (engines.prefill, engines.decode, engines.both))
    if prefill is None or decode is None:
        return both or decode or prefill
    to = min(engines.decode, key=lambda c: _order(views[c.ref])).ref
    pair = finder.pair(prefill, to) if max_tokens > 1 else prefill
    if num_choices == 1 and max_tokens > 1 and decode.new_tokens < whole_below:
        there = next(c for c in engines.decode if c.ref == decode.first)
        mine, theirs = (views[decode.first].stale, decode.estimate_s), (views[prefill.first].stale, pair.estimate_s)
        if mine <= theirs or _idle(there, in_flight, now):
            pair = decode
    return both if both is not None and _estimate(views, both) < _estimate(views, pair) else pair


def views_of(
    engines: Sequence[Candidate],
    in_flight: Mapping[Ref, int],
    now: float,
    stored: Mapping[Ref, Stored],
    disk_s_per_token: Mapping[Ref, float],
    *,
    tie: str = "",
) -> dict[Ref, View]:
    """Return what is known of each engine for one prompt; the arguments are those of `place`."""
    told = {c.ref: _costs(c, disk_s_per_token.get(c.ref, 0.0)) for c in engines}
    lengths = sorted(filter(None, map(_typical, engines)))
    typical = lengths[len(lengths) // 2] if lengths else 0.0
    costs = _alike(told, [c.ref for c in engines if c.load.get("unmeasured")], typical or TYPICAL_TOKENS)
    token_s = {ref: max(own.prefill.average_s(typical), 1e-6) for ref, own in costs.items()}
    return {
        c.ref: _view(c, _work(c, in_flight) * token_s[c.ref], now, costs[c.ref], stored.get(c.ref, Stored()), tie)
        for c in engines
    }


def least_loaded(candidates: Sequence[Candidate], in_flight: Mapping[Ref, int], now: float) -> Ref | None:
    """Return the candidate with the least work, or None without candidates."""
    if not candidates:
        return None
    return min(candidates, key=lambda c: (_stale(c, now), _work(c, in_flight), c.ref)).ref


class _Finder:
    """The best of some engines for one prompt."""

    def __init__(self, views: Mapping[Ref, View], tokens: int) -> None:
        self._views, self._tokens = views, tokens

    def best(self, candidates: Iterable[Candidate]) -> Placement | None:
        """Return the engine with the least estimate, for all of the work."""
        refs = [c.ref for c in candidates]
        choice = least_ttft([self._views[ref] for ref in refs], self._tokens, UNKNOWN)
        if choice is None:
            return None
        ref = next(ref for ref in refs if self._views[ref].name == choice.name)
        new = self._tokens - choice.loaded_tokens - choice.copied_tokens
        return Placement(ref, None, choice.ttft_s, new, choice.service_s, self._why(refs, ref, choice))

    def pair(self, first: Placement, decode: Ref) -> Placement:
        """Return a hand-off: copying the blocks takes what loading them from the store would."""
        costs = self._views[decode].costs
        assert costs is not None
        estimate = first.estimate_s + costs.load.seconds(self._tokens)
        return Placement(first.first, decode, estimate, first.new_tokens, first.service_s, first.reason)

    def _why(self, refs: Sequence[Ref], chosen: Ref, choice: Choice) -> str:
        if len(refs) == 1:
            return "only"
        others = (self._views[ref] for ref in refs)
        known = choice.loaded_tokens + choice.copied_tokens
        return "prefix" if known and min(others, key=_order).name != self._views[chosen].name else "load"


def _estimate(views: Mapping[Ref, View], placement: Placement) -> tuple[bool, float]:
    """Order placements by their estimates; a pair is as busy as its busier half."""
    first = views[placement.first]
    if placement.decode is None:
        return first.stale, placement.estimate_s
    then = views[placement.decode]
    return first.stale or then.stale, placement.estimate_s + max(0.0, then.queued_s - first.queued_s)


def _order(view: View) -> tuple[bool, float, int, int, str]:
    return view.stale, view.queued_s, -view.free_blocks, view.tie, view.name


def _view(c: Candidate, queued_s: float, now: float, costs: Costs, stored: Stored, tie: str) -> View:
    name = "/".join(c.ref.wire())
    return View(
        name=name,
        queued_s=queued_s,
        stored_tokens=stored.total,
        free_blocks=int(c.load.get("free_blocks", 0)),
        stale=_stale(c, now),
        resident_tokens=stored.resident,
        memory_tokens=stored.memory,
        far_tokens=stored.far,
        far_s=stored.far_s,
        costs=costs,
        tie=zlib.crc32(f"{tie}/{name}".encode()) if tie else 0,
    )


def _costs(c: Candidate, disk_s_per_token: float) -> Costs:
    """Return what an engine says of its costs, where that makes sense."""
    prefill, load = _numbers(c.load.get("prefill_cost"), 3), _numbers(c.load.get("load_cost"), 2)
    disk = LoadCost(1.0, 1.0 / disk_s_per_token) if disk_s_per_token > 0.0 else None
    return Costs(
        # Queues are in tokens: these must take some time, or all queues would be equal.
        PrefillCost(prefill[0], max(prefill[1], 1e-6), prefill[2]) if prefill else UNKNOWN.prefill,
        LoadCost(1.0, 1.0 / max(load[1], 1e-9), load[0]) if load else UNKNOWN.load,
        disk=disk,
    )


def _numbers(said: Any, count: int) -> list[float]:
    if not isinstance(said, (list, tuple)) or len(said) != count:
        return []
    right = all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0.0 for x in said)
    return [float(x) for x in said] if right else []


def _typical(c: Candidate) -> float:
    """Return the length of prompts that an engine knows best, 0 if it does not tell."""
    return next(iter(_numbers([c.load.get("prefill_tokens")], 1)), 0.0)


def _alike(costs: dict[Ref, Costs], unmeasured: Container[Ref], typical: float) -> dict[Ref, Costs]:
    """Give engines that compute about as fast as the one in the middle its costs of computing.

    They are compared at the length that they have all measured: what a fit says of others can be anything.

    So do `unmeasured` ones: what they tell is a guess, and one that is too high would keep all work from them, and with
    it what they could measure.
    """
    measured = [ref for ref in costs if ref not in unmeasured]
    if len(costs) < 2 or not measured:
        return costs
    seconds = {ref: own.prefill.average_s(typical) for ref, own in costs.items()}
    middle = sorted(measured, key=lambda ref: (seconds[ref], ref))[(len(measured) - 1) // 2]
    usual = costs[middle].prefill
    return {
        ref: Costs(usual, own.load, disk=own.disk)
        if ref in unmeasured or seconds[middle] / ALIKE <= seconds[ref] <= seconds[middle] * ALIKE
        else own
        for ref, own in costs.items()
    }


def _idle(c: Candidate, in_flight: Mapping[Ref, int], now: float) -> bool:
    """Whether a fresh view shows nothing that a prompt could hold up."""
    busy = any(c.load.get(name, 0) for name in ("running", "waiting", "expected", "queued_tokens"))
    return not busy and not in_flight.get(c.ref, 0) and not _stale(c, now)


def _stale(c: Candidate, now: float) -> bool:
    return now - c.last_heard > STALE_AFTER_S


def _work(c: Candidate, in_flight: Mapping[Ref, int]) -> float:
    """Return the work waiting and running at an engine, in tokens' worth of steps."""
    load = c.load
    work = (
        float(load.get("queued_tokens", 0))
        + SEQUENCE_TOKENS * sum(float(load.get(name, 0)) for name in ("running", "waiting", "expected"))
        + float(in_flight.get(c.ref, 0))
    )
    total = float(load.get("total_blocks", 0)) or 1.0
    return work + FULL_TOKENS * float(load.get("blocks_in_use", 0)) / total
