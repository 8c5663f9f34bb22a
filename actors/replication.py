"""Copies of hot prefixes on other hosts, ahead of demand: what `actors.hot_prefixes` decides, seen and said.

Prompts are counted after they were placed, at the next tick, and only where there are stores on several hosts: nothing
of this is on the way to a first token. The store that gets the hint (`KvPrefetch`) decides when it copies, and how much
it may (`actors.kv_copies`).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.hot_prefixes import STAGES, Copy, HotPrefixes, Place, worth_copying
from actors.placement import UNKNOWN, Candidate, Stored, views_of
from actors.remote_cost import Way
from actors.ttft import View, estimate
from actors.whereabouts import Chain, Located, Whereabouts
from kvstore.block import BLOCK_TOKENS
from runtime.actor import Context
from schemas import messages as m
from schemas.subjects import Ref

PER_TICK = 4  # prompts; the others wait for the next tick
AGAIN_S = 5.0  # until a host is told of the same prefix again
MOST_ASKED = 64  # prompts that wait; more are not counted
MOST_TOLD = 1024  # the one told of longest ago is forgotten


class Engine(Candidate, Located, Protocol):
    """What is asked of an engine."""

    @property
    def load(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Seen:
    """An engine as it was when a prompt was placed: later heartbeats count the prompt itself."""

    ref: Ref
    host: str
    load: dict[str, Any]
    last_heard: float


@dataclass(frozen=True, slots=True)
class _Asked:
    chain: Chain
    engines: Sequence[_Seen]
    in_flight: Mapping[Ref, int]
    at: float


class Replication:
    """Follows what one admission actor places."""

    def __init__(self, context: Context, where: Whereabouts) -> None:
        """Nothing is hot yet."""
        self._context, self._where = context, where
        self._hot = HotPrefixes()
        self._asked: deque[_Asked] = deque(maxlen=MOST_ASKED)
        self._told: OrderedDict[tuple[bytes, str], float] = OrderedDict()
        self._hints = context.telemetry.counter("hot_prefix_hints_total", "Hot prefixes that a store was told to copy")

    def placed(self, engines: Sequence[Engine], in_flight: Mapping[Ref, int]) -> None:
        """A prompt was placed, with its engines in this state; what it begins with is counted later."""
        seen = [_Seen(engine.ref, engine.host, engine.load, engine.last_heard) for engine in engines]
        while self._where.asked:
            chain = self._where.asked.popleft()
            self._asked.append(_Asked(chain, seen, in_flight, self._context.clock.now()))

    def tick(self, now: float) -> None:
        """Count what was placed since the last tick; tell a store of what is hot and better had there too."""
        for _ in range(min(PER_TICK, len(self._asked))):
            asked = self._asked.popleft()
            known = asked.chain.hashes[: asked.chain.known]
            self._hot.ask(known, now)
            senders = max(1, sum(not member.silent for member in self._context.membership.members("admission")))
            blocks, asks = self._hot.hottest(known, now, senders=senders)
            if blocks >= STAGES[0]:
                self._consider(asked, asked.chain.cut(blocks), asks, now)

    def _consider(self, asked: _Asked, chain: Chain, asks: float, now: float) -> None:
        stored = self._where.of_chain(chain, asked.engines)
        engines = [engine for engine in asked.engines if engine.ref in stored]
        views = views_of(engines, asked.in_flight, asked.at, stored, self._where.disk_speeds(engines, stored))
        tokens, stores = BLOCK_TOKENS * len(chain.hashes), self._where.stores()
        soonest: dict[str, tuple[float, View, float, Ref | None]] = {}
        for engine in engines:
            if engine.host in stores:
                view = views[engine.ref]
                order = estimate(view, tokens + 1, UNKNOWN).ttft_s
                if engine.host not in soonest or order < soonest[engine.host][0]:
                    took = self._copy_s(engine, stores, chain, stored[engine.ref])
                    soonest[engine.host] = (order, view, took, stored[engine.ref].store)
        places = [
            Place(host, view, math.inf if self._told_of(chain, host, now) else took)
            for host, (_, view, took, _) in soonest.items()
        ]
        copy = worth_copying(tokens, places, asks, UNKNOWN)
        to = soonest[copy.to][3] if copy is not None else None
        if copy is not None and to is not None:
            self._tell(chain, copy, to, now)

    def _copy_s(self, engine: Engine, stores: Mapping[str, Sequence[Ref]], chain: Chain, stored: Stored) -> float:
        """What it takes the store that an engine asks to get what it lacks from the host that has all of it."""
        store = self._context.membership.get(stored.store) if stored.store is not None else None
        ways = store.load.get("ways") if store is not None and store.load.get("copies") else None
        nbytes = int(engine.load.get("block_nbytes", 0))
        if not isinstance(ways, dict) or nbytes <= 0:
            return math.inf
        missing = len(chain.hashes) - stored.memory // BLOCK_TOKENS
        took = [
            Way(*map(float, told)).seconds(missing * nbytes)
            for host, told in ways.items()
            if host in stores and host != engine.host
            and self._where.held(stores[host], chain) == len(chain.hashes)
        ]  # fmt: skip
        return min(took, default=math.inf)

    def _told_of(self, chain: Chain, host: str, now: float) -> bool:
        return now - self._told.get((chain.hashes[-1], host), -math.inf) < AGAIN_S

    def _tell(self, chain: Chain, copy: Copy, store: Ref, now: float) -> None:
        key = (chain.hashes[-1], copy.to)
        self._told[key] = now
        self._told.move_to_end(key)
        while len(self._told) > MOST_TOLD:
            self._told.popitem(last=False)
        self._hints.inc()
        parents = [chain.root, *chain.hashes[:-1]]
        hint = m.KvPrefetch(hashes=chain.hashes, parents=parents, far=True, owner=chain.owner)
        self._context.send(store, hint)

    def statistics(self) -> dict[str, float]:
        """Return gauges by name."""
        return {"hot_prefixes_counted": len(self._hot)}
