"""A fleet of replicas in virtual time: one sender places each request as it arrives, each replica serves in order.

What is modelled:

- A replica prefills one prompt at a time, first come first served, whole: no chunks, no preemption. Its time is the
  load of what its own store has, the copy of what another's store has if the placement says so, and the prefill of the
  rest times a factor drawn per request (the same under every placement). A copy costs its source nothing.
- Decoding happens elsewhere, at a fixed time per token: it takes no time from prefills. It only matters for when the
  next turn of a conversation comes, if turns follow the end of the turn before (`Load.closed`), not recorded times.
- A store takes a prompt's blocks when its prefill ends; what goes for them is up to the real eviction policy. Loads are
  as of the moment the prefill starts.
- The sender sees replicas as heartbeats tell, every 250 ms: queue, free blocks, and the stores' events, which a real
  index follows. Its own sends since are added to the queues.
- The sender's cost model is fitted to the prefills that ended, from a first guess that is three times too low.

So hints can be wrong: a block may be gone when its turn comes, or have come meanwhile.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from actors.backlog import Backlog
from actors.prefill_fit import PrefillFit
from actors.ttft import Choice, Costs, PrefillCost, View
from bench.replay.ahead import Ahead, Ordered, is_ahead
from bench.replay.placements import make
from bench.replay.store import Store, follow
from bench.replay.trace import BLOCK_TOKENS, Arrival, Trace
from bench.stats import percentile
from kvstore.index import BlockIndex, Event

HEARTBEAT_S = 0.25


@dataclass(frozen=True, slots=True)
class Fleet:
    """What serves."""

    replicas: int
    cache_tokens: int  # of each replica
    eviction: str
    costs: Costs
    decode_s_per_token: float = 0.04
    noise: float = 0.1  # standard deviation of the logarithm of what a prefill takes over what it should


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives: the trace with its times divided by `speed`.

    With `closed`, the next turn of a conversation comes a think time after the end of the turn before: that is the
    recorded gap less what the turn before takes on an idle replica without a cache.
    """

    trace: Trace
    speed: float = 1.0
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one placement did."""

    mean_s: float
    p50_s: float
    p99_s: float
    hit_rate: float  # tokens loaded or copied over all prompt tokens
    utilisation: float  # time that replicas computed or loaded, over the time that they were there
    busiest: float  # share of the requests that the busiest replica got
    growth: float  # mean of the last third over the mean of the first
    copied: float  # tokens copied from other replicas over all prompt tokens
    ahead: float = 0.0  # tokens copied before anybody asked for them there, likewise


@dataclass(slots=True)
class _Job:
    choice: Choice
    arrival: Arrival
    start_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class _News:
    """What a heartbeat tells of a prefill that ended."""

    at_s: float
    events: list[Event]
    free: int
    new: int
    prefix: int
    seconds: float


@dataclass(slots=True)
class _Replica:
    store: Store
    until: float = 0.0
    busy_s: float = 0.0
    requests: int = 0
    reports: deque[tuple[float, float]] = field(default_factory=deque)  # (arrival, busy until), oldest first
    told: float = 0.0  # busy until, as of the last heartbeat
    free: int = 0  # blocks, likewise
    news: deque[_News] = field(default_factory=deque)


def offered(load: Load, fleet: Fleet) -> float:
    """Return the prefill work that arrives, as if nothing were ever stored, over what the fleet can do."""
    work = sum(fleet.costs.prefill.seconds(arrival.input_tokens) for arrival in load.trace.arrivals)
    return work / (load.trace.span_s / load.speed) / fleet.replicas


class Replay:
    """One run: a placement on a fleet under a load."""

    def __init__(self, placement: str, fleet: Fleet, load: Load, seed: int = 1) -> None:
        """Make empty replicas."""
        copies = "+copies" in placement
        self._fleet, self._load = fleet, load
        self._placement = make(placement, seed)
        self._copy = fleet.costs.copy if copies else None
        self._replicas = {f"r{n:02}": self._replica(f"r{n:02}") for n in range(fleet.replicas)}
        self._index = BlockIndex()
        for replica in self._replicas.values():
            follow(self._index, replica.store)
        self._backlog = Backlog()
        low = fleet.costs.prefill
        self._fit = PrefillFit(PrefillCost(low.fixed_s / 3, low.per_token_s / 3, low.per_square_s / 3))
        self._heartbeat = -1
        self._noise = random.Random(seed)
        self._factors = [math.exp(self._noise.gauss(0.0, fleet.noise)) for _ in load.trace.arrivals]
        self._ttft = [0.0] * len(load.trace.arrivals)
        self._loaded = self._copied = self._ahead_tokens = 0
        self._ahead: Ahead | None = None
        if is_ahead(placement) and fleet.costs.copy is not None:
            self._ahead = Ahead(list(self._replicas), fleet.costs.copy)

    def _replica(self, name: str) -> _Replica:
        store = Store(name, self._fleet.cache_tokens // BLOCK_TOKENS, self._fleet.eviction)
        return _Replica(store, free=store.free_blocks)

    def run(self) -> Outcome:
        """Replay all requests."""
        last = 0.0
        waiting = self._load.closed
        followers: dict[int, list[int]] = {}
        queue: list[tuple[float, int]] = []
        for position, arrival in enumerate(self._load.trace.arrivals):
            if waiting and arrival.after is not None:
                followers.setdefault(arrival.after, []).append(position)
            else:
                queue.append((arrival.at_s / self._load.speed, position))
        heapq.heapify(queue)
        while queue:
            now, position = heapq.heappop(queue)
            last = max(last, now)
            end = self._serve(position, now)
            for follower in followers.get(position, ()):
                heapq.heappush(queue, (end + self._think_s(position, follower), follower))
        return self._outcome(last)

    def _think_s(self, before: int, after: int) -> float:
        first, second = self._load.trace.arrivals[before], self._load.trace.arrivals[after]
        gap = (second.at_s - first.at_s) / self._load.speed
        return max(0.0, gap - self._fleet.costs.prefill.seconds(first.input_tokens) - self._decode_s(first))

    def _decode_s(self, arrival: Arrival) -> float:
        return arrival.output_tokens * self._fleet.decode_s_per_token

    def _serve(self, position: int, now: float) -> float:
        """Place one request and serve it; returns when its answer ends."""
        arrival = self._load.trace.arrivals[position]
        self._hear(now)
        costs = replace(self._fleet.costs, prefill=self._fit.cost, copy=self._copy)
        views = list(self._views(arrival, now))
        choice = self._placement.choose(views, arrival.input_tokens, costs)
        self._backlog.sent(choice.name, choice.service_s, now)
        replica = self._replicas[choice.name]
        start = max(now, replica.until)
        end = start + self._work(replica, _Job(choice, arrival, start, self._factors[position]))
        replica.until = end
        replica.busy_s += end - start
        replica.requests += 1
        replica.reports.append((now, end))
        self._ttft[position] = end - now
        if self._ahead is not None:
            self._spread(self._ahead.placed(arrival.hashes, views, costs, now), arrival, now)
        return end + self._decode_s(arrival)

    def _work(self, replica: _Replica, job: _Job) -> float:
        """Return the time that a prompt takes at a replica, and note the news it makes when it ends."""
        arrival, costs = job.arrival, self._fleet.costs
        tokens, most = arrival.input_tokens, arrival.input_tokens - 1
        loaded = min(replica.store.use(arrival.hashes) * BLOCK_TOKENS, most)
        copied = 0
        if job.choice.copied_tokens and costs.copy is not None:
            donor = self._replicas[job.choice.copy_from].store
            there = min(donor.prefix(arrival.hashes) * BLOCK_TOKENS, most)
            copied = max(0, min(there, job.choice.loaded_tokens + job.choice.copied_tokens) - loaded)
        have = loaded + copied
        prefill = costs.prefill.seconds(tokens - have, have) * job.factor
        brought = costs.load.seconds(loaded) + (costs.copy.seconds(copied) if costs.copy is not None else 0.0)
        self._loaded += have
        self._copied += copied
        end = job.start_s + brought + prefill
        events, free = replica.store.events.collect(), replica.store.free_blocks
        replica.news.append(_News(end, events, free, tokens - have, have, prefill))
        return brought + prefill

    def _spread(self, ordered: Ordered | None, arrival: Arrival, now: float) -> None:
        """Let a replica have a copy of a prompt's first blocks, as far as somebody has them."""
        if ordered is None:
            return
        wanted = arrival.hashes[: ordered.blocks]
        there = max(replica.store.prefix(wanted) for replica in self._replicas.values())
        replica = self._replicas[ordered.to]
        found = replica.store.use(wanted[:there])
        self._ahead_tokens += BLOCK_TOKENS * (there - found)
        events, free = replica.store.events.collect(), replica.store.free_blocks
        replica.news.append(_News(now + ordered.seconds, events, free, 0, 0, 0.0))

    def _hear(self, now: float) -> None:
        """Take the last heartbeat of each replica before this moment, if it has not been heard."""
        number = int(now / HEARTBEAT_S)
        if number == self._heartbeat:
            return
        self._heartbeat, taken = number, number * HEARTBEAT_S
        for name, replica in self._replicas.items():
            while replica.reports and replica.reports[0][0] <= taken:
                replica.told = replica.reports.popleft()[1]
            self._backlog.heard(name, max(0.0, replica.told - taken), taken)
            while replica.news and replica.news[0].at_s <= taken:
                news = replica.news.popleft()
                replica.free = news.free
                if news.new:
                    self._fit.observe(news.new, news.prefix, news.seconds)
                lost = [event for event in news.events if not self._index.apply(event)]
                assert not lost, "the index missed an event"

    def _views(self, arrival: Arrival, now: float) -> Iterator[View]:
        known = self._index.longest_prefix(arrival.hashes)
        for name, replica in self._replicas.items():
            stored = min(known.get(name, 0) * BLOCK_TOKENS, arrival.input_tokens)
            yield View(name, self._backlog.queued_s(name, now), stored, replica.free)

    def mean_s(self, positions: Sequence[int]) -> float:
        """Return the mean time to first token of some of the requests, after a run."""
        return _mean([self._ttft[position] for position in positions])

    def _outcome(self, last: float) -> Outcome:
        third = max(1, len(self._ttft) // 3)
        replicas = self._replicas.values()
        tokens = self._load.trace.input_tokens
        end = max(last, *(replica.until for replica in replicas))
        return Outcome(
            mean_s=_mean(self._ttft),
            p50_s=percentile(self._ttft, 0.5),
            p99_s=percentile(self._ttft, 0.99),
            hit_rate=self._loaded / tokens,
            utilisation=sum(replica.busy_s for replica in replicas) / (end * len(replicas)),
            busiest=max(replica.requests for replica in replicas) / len(self._ttft),
            growth=_mean(self._ttft[-third:]) / _mean(self._ttft[:third]),
            copied=self._copied / tokens,
            ahead=self._ahead_tokens / tokens,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
