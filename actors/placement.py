"""Where to run a request: pure, over the last heartbeats and what was sent since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from schemas.subjects import Ref

# A view of load older than this counts as busy: heartbeats come every 250 ms.
STALE_AFTER_S = 2.0


class Candidate(Protocol):
    """What placement wants to know of a member."""

    @property
    def ref(self) -> Ref: ...
    @property
    def load(self) -> Mapping[str, Any]: ...
    @property
    def last_heard(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """`first` gets the dispatch; with `decode` it hands the sequences over there, without it runs them to the end."""

    first: Ref
    decode: Ref | None


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
) -> Placement | None:
    """Choose engines for a request, or None when nobody can take it.

    Prefers a pair of prefill and decode, then a `both`, then any engine at all: every engine can run a request whole,
    so that one survivor is enough. A request that ends with its first token is never handed over, nor is a short prompt
    with one choice when the decode engine has nothing to do, or no more than the prefill engine: a prefill engine is
    there so that prompts do not hold up running streams; where none runs the hand-off is only a delay, and a prompt
    that would have to queue there starts sooner elsewhere, in chunks that keep the pace of the streams.

    Args:
        in_flight: tokens' worth of work sent to each engine since its last heartbeat, by this sender.
        prompt_tokens: the length of the prompt, all prompts together.
        whole_below: prompts shorter than this may run whole on a decode engine; 0: all are handed over.
        avoid: engines to take only when no other is left (suspects).
    """

    def best(candidates: Sequence[Candidate]) -> Ref | None:
        return least_loaded([c for c in candidates if c.ref not in avoid], in_flight, now)

    prefill, decode, both = best(engines.prefill), best(engines.decode), best(engines.both)
    if both is not None and (prefill is None or decode is None):
        return Placement(both, None)
    if prefill is not None and decode is not None:
        pair = Placement(prefill, decode)
        if num_choices == 1 and max_tokens > 1 and prompt_tokens < whole_below:
            there = next(c for c in engines.decode if c.ref == decode)
            ahead = next(c for c in engines.prefill if c.ref == prefill)
            sooner = _cost(there, in_flight, now) <= _cost(ahead, in_flight, now)
            pair = Placement(decode, None) if sooner or _idle(there, in_flight, now) else pair
        if both is None:
            return Placement(prefill, None) if max_tokens <= 1 else pair
        costs = {c.ref: _cost(c, in_flight, now) for c in [*engines.prefill, *engines.decode, *engines.both]}
        return Placement(both, None) if costs[both] < max(costs[prefill], costs[decode]) else pair
    for survivor in (decode, prefill):
        if survivor is not None:
            return Placement(survivor, None)
    if avoid:
        return place(
            engines,
            in_flight,
            now,
            num_choices=num_choices,
            max_tokens=max_tokens,
            prompt_tokens=prompt_tokens,
            whole_below=whole_below,
        )
    return None


def least_loaded(candidates: Sequence[Candidate], in_flight: Mapping[Ref, int], now: float) -> Ref | None:
    """Return the candidate with the least work, or None without candidates."""
    if not candidates:
        return None
    return min(candidates, key=lambda c: (_cost(c, in_flight, now), c.ref)).ref


def _idle(c: Candidate, in_flight: Mapping[Ref, int], now: float) -> bool:
    """Whether a fresh view shows nothing that a prompt could hold up."""
    busy = any(c.load.get(name, 0) for name in ("running", "waiting", "expected", "queued_tokens"))
    return not busy and not in_flight.get(c.ref, 0) and now - c.last_heard <= STALE_AFTER_S


def _cost(c: Candidate, in_flight: Mapping[Ref, int], now: float) -> tuple[int, float]:
    """Order engines: fresh views first, then by work waiting and running there, in tokens' worth of steps."""
    load = c.load
    stale = 1 if now - c.last_heard > STALE_AFTER_S else 0
    work = (
        float(load.get("queued_tokens", 0))
        + 64.0 * sum(float(load.get(name, 0)) for name in ("running", "waiting", "expected"))
        + float(in_flight.get(c.ref, 0))
    )
    total = float(load.get("total_blocks", 0)) or 1.0
    used = float(load.get("blocks_in_use", 0)) / total
    return stale, work + 256.0 * used
