"""Who is in the engine and in what phase: the lines of running and waiting sequences, each by rank."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Container, Iterator
from typing import Any

from engine.apart import Turns
from engine.fairness import Fairness
from engine.live import Live
from engine.scheduler import Shares
from engine.sequence import Key, Phase, Sequence
from kvstore.block import BLOCK_TOKENS
from kvstore.pool import BlockPool


class Line:
    """Sequences in the order of their places; none stands in it twice."""

    def __init__(self) -> None:
        """Start empty."""
        self._line: list[Live] = []
        self._keys: set[Key] = set()

    def add(self, live: Live) -> None:
        """Put a sequence in its place."""
        assert live.seq.key not in self._keys
        bisect.insort(self._line, live, key=_place)
        self._keys.add(live.seq.key)

    def discard(self, live: Live) -> None:
        """Take a sequence out, if it stands here."""
        if live.seq.key in self._keys:
            self._keys.remove(live.seq.key)
            del self._line[bisect.bisect_left(self._line, _place(live), key=_place)]

    @property
    def first(self) -> Live | None:
        """The first one, if any."""
        return self._line[0] if self._line else None

    def __iter__(self) -> Iterator[Live]:
        return iter(self._line)

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys


MAX_QUEUES = 32  # pairs of tenant and class that a heartbeat tells of: those with the most tokens


class Roster:
    """All sequences that live in an engine. The core moves blocks; this keeps phases and lines in agreement.

    Where several tenants wait, the best class among the first of each goes first (one that has waited `aging_s` counts
    as one class better, and so on), within it the tenant with the lowest virtual counter, and of a tenant by rank.
    """

    def __init__(
        self, rank: Callable[[Sequence], float], *, fair: Fairness | None = None, aging_s: float = 0.0
    ) -> None:
        """Start empty; `rank` orders the lines, arrival here breaks its ties."""
        self._rank = rank
        self._order = 0
        self._aging_s = aging_s
        self.fair = fair if fair is not None else Fairness()
        self.live: dict[Key, Live] = {}
        self.running = Line()
        self.waiting = Line()
        self.apart = Turns()
        self._lines: dict[str, Line] = {}  # those who wait, by tenant
        self._queued: dict[tuple[str, int], int] = {}  # tokens that wait, by tenant and class

    def enter(self, seq: Sequence, root: bytes) -> Live:
        """Take a sequence in; it stands in no line yet."""
        live = Live(seq, root, (self._rank(seq), self._order))
        self._order += 1
        self.live[seq.key] = live
        self.apart.add(seq)
        return live

    def wait(self, live: Live, now: float = 0.0, stored: int = 0) -> None:
        """Put a sequence into the queue, with nothing computed; `stored` of its tokens are in the pool."""
        self.running.discard(live)
        live.restart()
        self.waiting.add(live)
        seq = live.seq
        in_service = math.inf
        if seq.tenant not in self._lines:
            in_service = min((v.tag[0] for v in self.running if v.seq.num_uncomputed > 1), default=in_service)
        self.fair.arrived(seq.tenant, now, in_service=in_service)
        self._lines.setdefault(seq.tenant, Line()).add(live)
        live.queued = seq.num_tokens - stored
        pair = seq.tenant, seq.priority
        self._queued[pair] = self._queued.get(pair, 0) + live.queued

    def recount(self, live: Live, stored: int) -> None:
        """Note that `stored` tokens of a sequence that waits are in the pool now."""
        queued = live.seq.num_tokens - stored
        self._queued[live.seq.tenant, live.seq.priority] += queued - live.queued
        live.queued = queued

    def _unqueue(self, live: Live) -> None:
        """Take a sequence out of the queue, if it stands there."""
        seq = live.seq
        if seq.key not in self.waiting:
            return
        self.waiting.discard(live)
        self.fair.left(seq.tenant)
        line = self._lines[seq.tenant]
        line.discard(live)
        if not len(line):
            del self._lines[seq.tenant]
        pair = seq.tenant, seq.priority
        self._queued[pair] -= live.queued
        if not self._queued[pair]:
            del self._queued[pair]

    def start(self, live: Live) -> None:
        """Let a sequence take part in steps."""
        tenant = live.seq.tenant
        self._unqueue(live)
        live.tag = self.fair.counter(tenant), self.fair.served(tenant)
        self.fair.started(tenant)
        live.seq.phase = Phase.RUNNING
        self.running.add(live)

    def hold(self, live: Live) -> None:
        """Let a computed prompt wait for its hand-off."""
        self.running.discard(live)
        live.seq.phase = Phase.HELD

    def leave(self, live: Live) -> None:
        """Forget a sequence."""
        del self.live[live.seq.key]
        self.running.discard(live)
        self._unqueue(live)

    @property
    def first(self) -> Live | None:
        """The one that must always be able to finish: the first that runs, or else waits."""
        return self.running.first or self.waiting.first

    @property
    def next_deadline(self) -> float:
        """Earliest deadline in the lines; infinite if there is none."""
        lines = (v.seq.deadline for line in (self.running, self.waiting) for v in line)
        return min((at for at in lines if at > 0), default=float("inf"))

    def late(self, wall: float, but: Container[Key]) -> list[Live]:
        """Return those past their deadline; waiting ones in `but` are left alone."""
        late = [v for v in self.running if 0 < v.seq.deadline <= wall]
        return late + [v for v in self.waiting if 0 < v.seq.deadline <= wall and v.seq.key not in but]

    def hopeless(self, wall: float, but: Container[Key], needs_s: Callable[[int], float]) -> list[Live]:
        """Return those who wait, have not begun, and would be late if they began now; those in `but` are left alone.

        Args:
            wall: Unix seconds.
            but: as said.
            needs_s: what passes from a start to the first id, by tokens to compute.
        """
        promised = [v for v in self.waiting if v.seq.late_at > 0.0 and not v.seq.num_preempted and v.seq.key not in but]
        return [v for v in promised if wall + needs_s(v.queued) > v.seq.late_at]

    @property
    def queued(self) -> int:
        """Tokens that wait to be computed."""
        return sum(self._queued.values())

    def in_turn(self, now: float) -> Iterator[Live]:
        """Yield waiting sequences in the order of their turns; whoever asks for the next one has taken the last."""
        if len(self._lines) < 2:
            yield from self.waiting
            return
        heads = {tenant: iter(line) for tenant, line in self._lines.items()}
        firsts = {tenant: next(line) for tenant, line in heads.items()}
        counters = {tenant: self.fair.counter(tenant) for tenant in heads}
        while firsts:
            turn = min(firsts, key=lambda name: self._turn(firsts[name], (counters[name], self.fair.served(name)), now))
            live = firsts[turn]
            yield live
            counters[turn] += self.fair.price(turn, len(live.seq.prompt_ids))
            after = next(heads[turn], None)
            if after is None:
                del firsts[turn]
            else:
                firsts[turn] = after

    def shares(self, now: float) -> Shares | None:
        """Return whose prompts come first in the next step where tenants share it; None where they do not.

        A prompt that runs keeps the turn at which it started; the first that waits goes before those that run and have
        a later turn.
        """
        if not self.fair.several:
            return None
        prompts = [v for v in self.running if v.seq.num_uncomputed > 1]
        tenants = {v.seq.tenant for v in prompts}
        if len(tenants | self._lines.keys()) < 2:
            return None
        turns = [(self._turn(v, v.tag, now), v.seq.key) for v in prompts]
        head = next(self.in_turn(now), None)
        if head is not None:
            tag = self.fair.counter(head.seq.tenant), self.fair.served(head.seq.tenant)
            turns.append((self._turn(head, tag, now), head.seq.key))
        return Shares(tuple(key for _, key in sorted(turns)))

    def _turn(self, live: Live, tag: tuple[float, int], now: float) -> tuple[int, tuple[float, int], tuple[float, int]]:
        return self._level(live, now), tag, live.place

    def _level(self, live: Live, now: float) -> int:
        seq = live.seq
        return max(0, seq.priority - int((now - seq.arrival) / self._aging_s)) if self._aging_s > 0 else 0

    def ready(self, pool: BlockPool, but: Container[Key], now: float = 0.0) -> Iterator[Sequence]:
        """Yield waiting sequences that may start; one whose prompt is being computed waits to share the blocks."""
        computing = {v.hashes[v.prompt_hashes - 1] for v in self.running if v.prefilling and v.prompt_hashes}
        for live in self.in_turn(now):
            if live.seq.key in but:
                continue
            if live.prompt_hashes:
                last = live.hashes[live.prompt_hashes - 1]
                if last in computing:
                    continue
                if pool.block_of(last) is None:
                    computing.add(last)
            yield live.seq

    @property
    def num_held_blocks(self) -> int:
        """Blocks of prompts that wait for their hand-off; shared ones count once each."""
        return sum(len(v.seq.blocks) for v in self.live.values() if v.seq.phase is Phase.HELD)

    def load(self) -> dict[str, Any]:
        """Return counts of sequences, and of tokens that wait to be computed; who waits, if anybody does."""
        queued = self.queued
        queued += sum(v.seq.num_uncomputed for v in self.running if v.prefilling)
        held = sum(v.seq.phase is Phase.HELD for v in self.live.values())
        out = {"running": len(self.running), "waiting": len(self.waiting), "held": held, "queued_tokens": queued}
        if not self._queued:
            return out
        most = sorted(self._queued.items(), key=lambda entry: -entry[1])[:MAX_QUEUES]
        return {**out, "queues": [[tenant, number, tokens] for (tenant, number), tokens in most]}

    def check_integrity(self) -> None:
        """Assert that phases, lines and ids agree."""
        for line in (self.running, self.waiting):
            places = [v.place for v in line]
            assert places == sorted(places) and len(places) == len(line), "a line is out of order"
        for live in self.live.values():
            seq = live.seq
            assert (seq.key in self.running) == (seq.phase is Phase.RUNNING), seq
            assert (seq.key in self.waiting) == (seq.phase is Phase.WAITING), seq
            assert seq.num_computed <= len(seq.blocks) * BLOCK_TOKENS, seq
            assert live.context == seq.tokens, seq
        queued: dict[tuple[str, int], int] = {}
        for live in self.waiting:
            pair = live.seq.tenant, live.seq.priority
            assert 0 < live.queued <= live.seq.num_tokens, live.seq
            queued[pair] = queued.get(pair, 0) + live.queued
        assert queued == self._queued, "the sums of queues are off"
        assert sum(map(len, self._lines.values())) == len(self.waiting), "the tenants' lines are off"


def _place(live: Live) -> tuple[float, int]:
    return live.place
