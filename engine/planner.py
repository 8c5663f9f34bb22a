"""Between the scheduler's decision and the runner's rows: who gives blocks back, who starts, who gets which blocks."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from engine.apart import EVERYBODY
from engine.costs import StepCosts, Work
from engine.lending import Lending
from engine.pace import Pace
from engine.parking import Parking
from engine.roster import Roster
from engine.scheduler import Decision, Hit, Scheduler, Shares
from engine.sequence import Sequence
from kvstore.block import BLOCK_TOKENS, num_blocks_for
from kvstore.pool import BlockPool


class Planner:
    """Asks the pure scheduler, and carries its decision out on pool, lines and parking area."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        roster: Roster,
        lent: Lending,
        parking: Parking,
        counts: dict[str, float],
        now: Callable[[], float],
        pace_s: Mapping[int, float] | None = None,
    ) -> None:
        """Use the core's own parts; `counts` are its counters.

        Args:
            pace_s: by priority, the longest mean time between a sequence's tokens; absent: no such promise.
        """
        self._now = now
        self.costs = StepCosts()
        self.pace = Pace(self.costs, pace_s)
        self._scheduler = scheduler
        self._pool = pool
        self._roster = roster
        self._lent = lent
        self._parking = parking
        self._counts = counts

    def schedule(self) -> Decision:
        """Decide a step and make it so: preempted sequences lost their blocks, granted ones have theirs."""
        decision = self._plan()
        if decision.preempt:
            self._preempt(decision)
            if not decision.grants:
                # Shared blocks made the gain look smaller than it was: what is free now is the truth.
                again = self._plan()
                self._preempt(again)
                decision = replace(again, preempt=decision.preempt + again.preempt)
        self._allocate(decision)
        return decision

    def _plan(self) -> Decision:
        if self._roster.apart:
            decision = self._plan_apart()
            if decision is not None:
                return decision
        return self._scheduler.plan(
            self._roster.ready(self._pool, self._lent.loads, self._now()),
            [live.seq for live in self._roster.running],
            self._pool.num_free,
            prompt_tokens=self._prompt_tokens(),
            shares=self._shares(),
            max_running=self._max_running(),
            lookup=self._lookup,
            reclaim=self._reclaimable,
        )

    def _plan_apart(self) -> Decision | None:
        """Decide a step of those whose turn it is; None if none of them can do anything without the others' blocks."""
        roster = self._roster
        for turn in roster.apart.order():
            decision = self._plan_turn(turn, roster.apart.requests())
            if decision.grants or decision.preempt:
                roster.apart.took(turn)
                return decision
        return None

    def _plan_turn(self, turn: str, apart: Container[str]) -> Decision:
        def has_it(seq: Sequence) -> bool:
            return seq.key.request_id == turn if turn != EVERYBODY else seq.key.request_id not in apart

        roster, shared = self._roster, turn == EVERYBODY
        running = [live.seq for live in roster.running if has_it(live.seq)]
        return self._scheduler.plan(
            (seq for seq in roster.ready(self._pool, self._lent.loads, self._now()) if has_it(seq)),
            running,
            self._pool.num_free,
            prompt_tokens=self._prompt_tokens() if shared else None,
            shares=self._shares() if shared else None,
            max_running=self._max_running() - (len(roster.running) - len(running)),
            lookup=self._lookup,
            reclaim=self._reclaimable,
        )

    def _prompt_tokens(self) -> int | None:
        """Return how many prompt tokens the pace of the running decodes leaves room for; None: as many as you like."""
        prompts = [live.seq for live in self._roster.running if live.seq.num_uncomputed > 1]
        num_decodes = len(self._roster.running) - len(prompts)
        joining = min(len(prompts) + len(self._roster.waiting), self._scheduler.max_running - num_decodes)
        short = self._in_short_steps()
        if not num_decodes or joining <= 0:
            return self.costs.short_chunk(Work(0, 0.0), self._scheduler.token_budget) if short else None
        context = sum(live.seq.num_computed + 1 for live in self._roster.running)
        decodes = Work(num_decodes, context - sum(seq.num_computed + 1 for seq in prompts))
        start = prompts[0].num_computed if prompts else 0
        budget, most_s = self._scheduler.token_budget, self.pace.step_s(self._roster.running, self._now())
        count = self.costs.prompt_tokens(decodes, joining, start, budget, most_s=most_s)
        return self.costs.short_chunk(decodes, count) if short else count

    def _in_short_steps(self) -> bool:
        """Whether somebody would wait for the end of a long step who must not: another tenant, or who was promised."""
        return self.pace.promised or (self._roster.fair.several and self._roster.fair.shared(self._now()))

    def _shares(self) -> Shares | None:
        """Return how tenants share the step, if they do: others lengthen a leader's step by little."""
        shares = self._roster.shares(self._now())
        return None if shares is None else replace(shares, beside=self.costs.beside)

    def _max_running(self) -> int:
        return self.pace.most_running(self._roster.running, self._scheduler.max_running)

    def _lookup(self, seq: Sequence) -> Hit:
        length, idle = self._pool.peek(self._roster.live[seq.key].cacheable)
        return Hit(length * BLOCK_TOKENS, idle, self._parking.num_tokens(seq.key))

    def _reclaimable(self, seq: Sequence) -> int:
        return self._pool.num_reclaimable(seq.blocks)

    def _preempt(self, decision: Decision) -> None:
        for key in decision.preempt:
            live = self._roster.live[key]
            self._park(live.seq)
            self._pool.free(live.seq.blocks)
            self._roster.wait(live, self._now())
            live.seq.num_preempted += 1
            self._counts["preempted"] += 1

    def _park(self, seq: Sequence) -> None:
        """Keep a copy of what is lost by preemption, if copying is quicker than computing it again."""
        num_blocks = num_blocks_for(seq.num_computed)
        again_s = self.costs.prefill_s(seq.num_computed, self._scheduler.max_chunk)
        if again_s is None or not self._parking.can_park(num_blocks) or self._parking.seconds(num_blocks) >= again_s:
            self._counts["preempted_recompute"] += 1
            return
        nbytes = self._parking.park(seq.key, self._pool.view(), seq.blocks[:num_blocks], seq.num_computed)
        self._counts["preempted_parked"] += 1
        self._counts["parked_bytes"] += nbytes

    def _allocate(self, decision: Decision) -> None:
        # Hits are pinned before anything is allocated, or an allocation could evict them.
        for key, hit in decision.admit:
            live = self._roster.live[key]
            seq = live.seq
            seq.blocks = self._pool.match(live.cacheable)
            assert len(seq.blocks) * BLOCK_TOKENS == hit.num_tokens, "the device tier changed during planning"
            seq.num_computed = hit.num_ready
            seq.num_hashed = len(seq.blocks)
            if seq.num_preempted == 0:
                # Of the prompt alone: a sequence that was resumed may find blocks of its own output.
                seq.num_cached = min(hit.num_tokens, (len(seq.prompt_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
                self._counts["prompt_tokens"] += len(seq.prompt_ids)
                self._counts["cached_tokens"] += seq.num_cached
            first_time = seq.num_preempted == 0
            live.started = self._now()
            self._roster.start(live)
            if first_time:
                self._roster.fair.charge(seq.tenant, len(seq.prompt_ids) - seq.num_cached)
        for seq, _, num_blocks in decision.grants:
            if num_blocks:
                seq.blocks += self._pool.allocate(num_blocks)
        for key, hit in decision.admit:
            if hit.num_parked > hit.num_tokens:
                seq = self._roster.live[key].seq
                self._parking.restore(key, self._pool.view(), seq.blocks, hit.num_tokens // BLOCK_TOKENS)
            else:
                self._parking.drop(key)
