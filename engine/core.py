"""The engine's core: sequences in, steps, items out. One thread owns it; nothing here waits or reads a clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from engine.costs import Work, total_work
from engine.drain import DrainRate
from engine.failures import NOT_NUMBERS
from engine.fairness import Fairness
from engine.lending import Lending
from engine.live import (
    Candidate,
    HeldBlocks,
    Live,
    NeverFits,
    Outcome,
    Progress,
    Spent,
    StepResult,
    check_ids,
    check_sequence,
    end_reason,
    make_row,
)
from engine.parking import Parking
from engine.plan import BatchPlan, Note, Row, Runner, Sampled
from engine.planner import Planner
from engine.prefills import Prefills
from engine.roster import Roster
from engine.scheduler import Decision, Scheduler
from engine.sequence import Key, Phase, Sequence
from engine.speculation.drafter import Drafter, Wish
from engine.speculation.speculator import MAX_DRAFT, Speculator
from kvstore.block import BLOCK_TOKENS, num_blocks_for
from kvstore.homes import home_key
from kvstore.pool import BlockPool
from schemas.errors import BadRequest, Overloaded
from schemas.messages import BlockRef

__all__ = ["Candidate", "EngineCore", "HeldBlocks", "NeverFits", "Progress", "StepResult"]

MAX_CANDIDATES = 4096
AHEAD_TOKENS = 1024  # of a pool, made ready while there is nothing to do
CREDIT_STEPS = 2.0  # full steps' tokens that a tenant may have to its credit
KEPT = 32  # one in so many places is kept for tenants with few, where tenants share an engine
TOUCHED_AT_ONCE = 4  # blocks: whoever calls waits no longer than that


class EngineCore:
    """Runs sequences over a runner and a pool.

    Commands (`add`, `reserve`, `activate`, `abort`, …) take effect between steps. A sequence lives here from `add` or
    `reserve` until it is reported as ended or failed, released, or aborted; its blocks go back in the same moment.
    """

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        scheduler: Scheduler,
        *,
        root: Callable[[str], bytes],
        now: Callable[[], float],
        wall: Callable[[], float],
        max_waiting: int = 4096,
        cache_outputs: bool = False,
        parking_tokens: int = 0,
        drafter: Drafter | None = None,
        max_draft: int = MAX_DRAFT,
        tenant_weights: Mapping[str, float] | None = None,
        pace_s: Mapping[int, float] | None = None,
        note: Note | None = None,
    ) -> None:
        """Bind the runner to the pool.

        Args:
            runner: computes steps.
            pool: the blocks; this core is their owner.
            scheduler: decides steps.
            root: tenant salt to the start of its hash chain.
            now: monotonic seconds, for durations.
            wall: Unix seconds, for deadlines.
            max_waiting: `add` refuses beyond this.
            cache_outputs: also keep blocks that decode wrote for later prompts. Off by default: a prompt that meets
                them must get the same bits as if it had computed them itself, which not every runner can promise.
            parking_tokens: tokens whose KV can be kept in host memory for preempted sequences.
            drafter: guesses ids ahead where that pays; without one nothing is guessed.
            max_draft: most ids guessed per sequence and step, 1 to 8.
            tenant_weights: shares of tenants where several wait; absent ones have 1.
            pace_s: by priority, the longest mean time between a sequence's tokens; absent: as `StepCosts` says.
            note: told what each step computes.
        """
        self.runner = runner
        self.pool = pool
        self.scheduler = scheduler
        self.max_context = min(runner.max_context, pool.num_blocks * BLOCK_TOKENS)
        self._root = root
        self._note = note
        self.now = now
        self.wall = wall
        self._max_waiting = max_waiting
        self._cache_outputs = cache_outputs
        self._fair = Fairness(
            tenant_weights, capacity=pool.num_blocks * BLOCK_TOKENS, credit=CREDIT_STEPS * scheduler.token_budget
        )
        self._roster = Roster(scheduler.rank, fair=self._fair, aging_s=scheduler.aging_s)
        self._drain = DrainRate()
        self._expired = Spent()
        self._lent = Lending(pool)
        self._parking = Parking(parking_tokens // BLOCK_TOKENS * pool.block_nbytes, pool.block_nbytes, now)
        self._over: list[tuple[Key, str]] = []  # ended outside a step, to be told by the next one
        self._candidates: deque[Candidate] = deque(maxlen=MAX_CANDIDATES)
        self.offering = True  # what is computed is worth storing: some store takes it
        self.offer_all = False  # also blocks that came from a tier: it may be another than the one they belong in
        self._counts: dict[str, float] = dict.fromkeys(
            "steps tokens items preempted preempted_recompute preempted_parked parked_bytes failed crashes aborted "
            "prompt_tokens cached_tokens drafted accepted nan_rows".split(),
            0,
        )
        self._planner = Planner(
            scheduler, pool, self._roster, self._lent, self._parking, self._counts, now, pace_s
        )  # fmt: skip
        self.costs, self._pace = self._planner.costs, self._planner.pace
        self._measured: tuple[Work, float] | None = None  # the last step's work and seconds, until `learn`
        self._prefills = Prefills()
        self._speculator = None if drafter is None else Speculator(drafter, self.costs, now, max_draft)
        runner.bind(pool.view(), pool.num_blocks)

    # --- commands: sequences that are computed here ------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. With `handoff` it stops after its first ids and holds its blocks.

        Raises:
            NeverFits: if its ids and one more exceed the context window or the whole pool.
            BadRequest: if it has no ids, an id outside the vocabulary, or a key that is in use.
            Overloaded: if the queue is full.
        """
        self._check(seq)
        if seq.key in self._lent.expected:
            raise BadRequest(f"sequence {seq.key.request_id}/{seq.key.choice} is expected from elsewhere")
        if len(self._roster.waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._roster.waiting)} sequences wait already", retry_after_s=1.0)
        live = self._roster.enter(seq, self._root(seq.salt))
        if (reason := self._end_reason(live)) is not None:
            self._end_early(live, reason)
            return
        self._roster.wait(live, self.now(), self._stored(live))

    def _stored(self, live: Live) -> int:
        return self.pool.peek(live.cacheable)[0] * BLOCK_TOKENS

    def want_load(self, key: Key) -> list[bytes]:
        """Return the hashes of a waiting sequence's blocks that follow those in the device tier."""
        live = self._waiting(key)
        return [] if live is None else live.cacheable[self.pool.peek(live.cacheable)[0] :]

    def load_parents(self, key: Key) -> list[bytes]:
        """Return the hash before each of `want_load(key)`."""
        live = self._waiting(key)
        if live is None:
            return []
        return [live.parent(i) for i in range(self.pool.peek(live.cacheable)[0], len(live.cacheable))]

    def begin_load(self, key: Key, num_blocks: int) -> list[int] | None:
        """Lend blocks to load into; until `load_prefix` or `abandon_load` the sequence does not start.

        Returns:
            None if the sequence has started or gone, or there is no room.
        """
        if self._waiting(key) is None or key in self._lent.loads or num_blocks <= 0 or not self._has_room(num_blocks):
            return None
        return self._lent.begin_load(key, num_blocks)

    def load_prefix(self, key: Key, blocks: list[int], hashes: list[bytes]) -> int:
        """Insert loaded, verified blocks and let the sequence start; returns how many of its tokens are now stored."""
        if not self._lent.end_load(key, blocks, hashes):
            return 0
        live = self._waiting(key)
        if live is None:
            return 0
        stored = self._stored(live)
        self._roster.recount(live, stored)
        return stored

    def abandon_load(self, key: Key, *, writer: str | None = None) -> None:
        """Give loading up; the sequence computes its prompt. `writer` may still write until `absolve(writer)`."""
        self._lent.cancel_load(key, writer)

    # --- commands: sequences that come from elsewhere ----------------------------------------------

    def reserve(self, key: Key, num_tokens: int, num_choices: int = 1, *, tenant: str = "") -> list[int] | None:
        """Lend blocks for KV that arrives by transfer.

        Where tenants share the engine, a few places are kept for those (`tenant`) with far less running than another.

        Returns:
            The blocks, or None if there is no room now: ask again later. The same key gets the same blocks.

        Raises:
            NeverFits: if that many tokens and one more can never fit.
            BadRequest: if the key is in use by a sequence.
        """
        if key in self._lent.expected:
            return self._lent.expected[key].blocks
        if num_tokens + 1 > self.max_context:
            raise NeverFits(num_tokens, self.max_context)
        if key in self._roster.live:
            raise BadRequest(f"sequence {key.request_id}/{key.choice} runs already")
        now = self.now()
        self._fair.saw(tenant, now)
        taking_part = len(self._roster.running) + self._lent.num_choices
        places = self.scheduler.max_running
        if self._fair.shared(now) and not self._has_little(tenant):
            places -= places // KEPT
        if taking_part and taking_part + num_choices > places:
            return None
        needed = num_blocks_for(num_tokens)
        # What waits here comes first, or a stream of hand-offs would keep it waiting for ever.
        head = next(self._roster.in_turn(now), None)
        queued = 0 if head is None else num_blocks_for(len(head.context))
        if not self._has_room(needed) or not self.pool.can_allocate(needed + queued):
            return None
        return self._lent.expect(key, needed, num_choices)

    def _has_little(self, tenant: str) -> bool:
        """Whether a tenant has less than half as much running as another."""
        running = Counter(live.seq.tenant for live in self._roster.running)
        return 2 * running[tenant] < max(running.values(), default=0)

    def activate(self, sequences: list[Sequence], blocks: list[int], num_computed: int) -> None:
        """Turn reserved blocks, written and verified, into running sequences.

        Several choices share the full blocks; each gets its own copy of a partial last one (or computes those few
        tokens again if no block is free for it).

        Args:
            sequences: the choices of one prompt; the reservation is found by the first one's key.
            blocks: as `reserve` returned them, or the first of them: those behind are free again.
            num_computed: tokens whose KV lies in them.

        Raises:
            BadRequest: if there is no such reservation, or a sequence does not belong to it; nothing has changed then.
        """
        first = sequences[0].key
        reservation = self._lent.expected.get(first)
        if reservation is None or reservation.blocks[: len(blocks)] != blocks:
            raise BadRequest(f"no blocks are reserved for {first.request_id}/{first.choice}")
        for seq in sequences:
            self._check(seq)
            if not 0 < num_computed < seq.num_tokens or num_blocks_for(num_computed) != len(blocks):
                raise BadRequest(f"{num_computed} tokens in {len(blocks)} blocks are not a prefix of {seq.num_tokens}")
        del self._lent.expected[first]
        self.pool.free(reservation.blocks[len(blocks) :])
        num_full = num_computed // BLOCK_TOKENS
        for position, seq in enumerate(sequences):
            live = self._roster.enter(seq, self._root(seq.salt))
            if position == 0:
                seq.blocks, seq.num_computed = list(blocks), num_computed
            else:
                self.pool.share(blocks[:num_full])
                seq.blocks, seq.num_computed = blocks[:num_full], num_full * BLOCK_TOKENS
                if num_full < len(blocks) and self.pool.can_allocate(1):
                    seq.blocks += self.pool.allocate(1)
                    self.pool.copy(blocks[-1], seq.blocks[-1])
                    seq.num_computed = num_computed
            seq.num_hashed = 0
            live.came = seq.num_computed
            self._roster.start(live)
            self._pace.began(live, self.now())
            self._publish(live)
            if (reason := self._end_reason(live)) is not None:
                self._end_early(live, reason)

    # --- commands: moves to another engine ---------------------------------------------------------

    def progress(self, keys: list[Key]) -> dict[Key, Progress]:
        """Return how far those of these sequences are that live here; its full blocks do not change any more."""
        found = [self._roster.live[key] for key in keys if key in self._roster.live]
        return {live.seq.key: self._progress(live, live.seq.num_computed // BLOCK_TOKENS) for live in found}

    def suspend(self, keys: list[Key]) -> dict[Key, Progress] | None:
        """Take decoding sequences out of the steps, with their blocks; they wait for `resume`, `release` or `abort`.

        Returns:
            Those that live here, with all blocks that hold something; None, and no change, if one does not decode now.
        """
        found = [self._roster.live[key] for key in keys if key in self._roster.live]
        if any(live.seq.phase is not Phase.RUNNING or live.seq.num_uncomputed != 1 for live in found):
            return None
        for live in found:
            self._roster.hold(live)
        return {live.seq.key: self._progress(live, num_blocks_for(live.seq.num_computed)) for live in found}

    def resume(self, keys: list[Key]) -> None:
        """Let suspended sequences take part in steps again."""
        for key in keys:
            live = self._roster.live.get(key)
            if live is not None and live.seq.phase is Phase.HELD:
                self._roster.start(live)

    def _progress(self, live: Live, num_blocks: int) -> Progress:
        seq = live.seq
        decoding = seq.phase is Phase.RUNNING and seq.num_uncomputed == 1
        return Progress(self.pool.refs(seq.blocks[:num_blocks]), seq.num_computed, seq.num_tokens, decoding)

    # --- commands: endings -------------------------------------------------------------------------

    def release(self, key: Key) -> bool:
        """The hand-off of a held prompt is complete: its blocks become cached."""
        live = self._roster.live.get(key)
        if live is None or live.seq.phase is not Phase.HELD:
            return False
        self._remove(live)
        return True

    def abort(self, key: Key, *, writer: str | None = None) -> bool:
        """Drop a sequence or reservation in whatever phase; false if there is none.

        Args:
            key: which one.
            writer: somebody who may still write into its blocks; they wait for `absolve(writer)`.
        """
        if key in self._roster.live:
            self._remove(self._roster.live[key], writer=writer)
        elif not self._lent.cancel(key, writer):
            return False
        self._counts["aborted"] += 1
        return True

    def absolve(self, writer: str) -> int:
        """The writer can write no more: free what waited for it."""
        return self.pool.absolve(writer)

    # --- commands: write-back ----------------------------------------------------------------------

    def stored_candidates(self, limit: int = 256) -> list[Candidate]:
        """Return prompt blocks computed here since the last call; they stay as they are until `written`."""
        out: list[Candidate] = []
        while self._candidates and len(out) < limit:
            candidate = self._candidates.popleft()
            if self.pool.block_of(candidate.hash) == candidate.block:
                self.pool.share([candidate.block])
                out.append(candidate)
        return out

    def written(self, blocks: list[int]) -> None:
        """These candidates have been stored, or never will be."""
        self.pool.free(blocks)

    # --- the step ----------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Compute one batch. A runner that raises fails the sequences of this batch and no others."""
        self.learn()
        started = self.now()
        ended = self._expire()
        late = self._shed()
        decision = self._planner.schedule()
        drafts = self._drafts(decision)
        rows = [make_row(self._roster.live[seq.key], n, drafts.get(seq.key, ())) for seq, n, _ in decision.grants]
        sampled, crash = self._execute(rows)
        outcome = self._commit(rows, sampled, crash)
        result = self._emit(decision, rows, outcome, ended, crash, started, late)
        self._after_step(rows, started)
        return result

    def _after_step(self, rows: list[Row], started: float) -> None:
        prompts = sum(len(row.ids) for row in rows if row.start < row.prompt_len)
        queued = bool(self._roster.waiting) or any(live.prefilling for live in self._roster.running)
        self._drain.step(prompts, started, self.now(), queued)
        self._fair.observe()

    def learn(self) -> None:
        """Fit the costs to the last step, unless that has been done: its ids need not wait for it."""
        measured, self._measured = self._measured, None
        if measured is not None:
            self.costs.observe(*measured)

    def fail_running(self, message: str) -> StepResult:
        """Fail every sequence that takes part in steps: the core's own step went wrong, so none can be trusted."""
        self._counts["crashes"] += 1
        over, self._over = self._over, []
        failed = []
        for live in [*self._roster.running, *self._roster.waiting]:
            self._remove(live)
            failed.append((live.seq.key, message))
        return StepResult(ended=over, failed=failed, crash=message)

    def _expire(self) -> list[tuple[Key, str]]:
        ended, self._over = self._over, []
        for live in self._roster.late(self.wall(), self._lent.loads):
            self._expired = self._expired.plus(live.spent)
            self._remove(live)
            ended.append((live.seq.key, "expired"))
        return ended

    def _shed(self) -> list[tuple[Key, float]]:
        """Refuse those whose first token would be too late if they began now; never of an engine that has time."""
        if not len(self._roster.running):
            return []
        out = []
        for live in self._roster.hopeless(self.wall(), self._lent.loads, self._pace.first_token_s):
            self._remove(live)
            rate = self._drain.rate(self.now())
            out.append((live.seq.key, (self._roster.queued + live.queued) / rate if rate > 0.0 else 1.0))
        return out

    def _drafts(self, decision: Decision) -> dict[Key, list[int]]:
        """Return guessed ids for sequences of a step of decodes alone, and see that they have room."""
        decoding = (seq.num_uncomputed == 1 and not seq.handoff for seq, _, _ in decision.grants)
        if self._speculator is None or not all(decoding):
            return {}
        spare = self.scheduler.token_budget - len(decision.grants)
        share = min(self._speculator.max_draft, spare // max(1, len(decision.grants)))
        if share <= 0:
            return {}
        wishes = []
        for seq, _, _ in decision.grants:
            # One id comes without a guess.
            room = min(seq.sampling.max_tokens - len(seq.outputs) - 1, self.max_context - seq.num_tokens)
            wishes.append(Wish(seq.key, self._roster.live[seq.key].context, min(share, room)))
        base = total_work((seq.num_computed, 1) for seq, _, _ in decision.grants)
        drafts = self._speculator.propose(wishes, base)
        for key, ids in drafts.items():
            seq = self._roster.live[key].seq
            missing = num_blocks_for(seq.num_tokens + len(ids)) - len(seq.blocks)
            if missing > 0:
                # Never the last blocks: guesses must not cost anybody his place.
                if self.pool.can_allocate(missing + len(self._roster.running)):
                    seq.blocks += self.pool.allocate(missing)
                else:
                    del ids[len(seq.blocks) * BLOCK_TOKENS - seq.num_tokens :]
        return {key: ids for key, ids in drafts.items() if ids}

    def _execute(self, rows: list[Row]) -> tuple[list[Sampled], str | None]:
        if not rows:
            return [], None
        plan = BatchPlan(int(self._counts["steps"]), rows)
        self._counts["steps"] += 1
        if self._note is not None:
            self._note.begin(tuple(dict.fromkeys(row.key.request_id for row in rows)))
        started = self.now()
        try:
            sampled = self.runner.execute(plan)
        except Exception as exc:  # whatever a runner raises is the end of this batch only
            self._counts["crashes"] += 1
            return [], f"{type(exc).__name__}: {exc}"
        finally:
            if self._note is not None:
                self._note.end()
        took = self.now() - started
        self._measured = total_work((row.start, len(row.ids)) for row in rows), took
        self._prefills.add(rows, took)
        if self._speculator is not None and all(len(row.ids) == 1 + len(row.draft) for row in rows):
            drafted, accepted = self._speculator.settle(rows, sampled, took)
            self._counts["drafted"] += drafted
            self._counts["accepted"] += accepted
        return sampled, None

    def _commit(self, rows: list[Row], sampled: list[Sampled], crash: str | None) -> Outcome:
        """Account for what was computed: items, prompts to hold, endings, failures."""
        by_key: dict[Key, list[Sampled]] = {}
        for one in sampled:
            by_key.setdefault(one.key, []).append(one)
        out = Outcome([], [], [], [])
        for row in rows:
            live = self._roster.live[row.key]
            seq, got = live.seq, by_key.get(row.key, [])
            error = crash or next((one.error for one in got if one.error is not None), None) or check_ids(row, got)
            if error is not None:
                self._counts["nan_rows"] += error == NOT_NUMBERS
                out.failed.append((live, error))
                continue
            was_prefilling = live.prefilling
            # Of a guessed part only what was right stays computed: all but the last of the ids chosen.
            seq.num_computed += len(row.ids) if not row.draft else len(got)
            reason = None if seq.handoff else self._extend(live, got)
            if got:
                self._fair.charge(seq.tenant, 0, len(got))
                if live.paced is None and not seq.handoff:
                    self._pace.began(live, self.now())
            self._publish(live)
            if was_prefilling and not live.prefilling:
                self._prefills.complete(seq)
                self._offer(live)
            if not row.sample:
                continue
            out.items.extend(got)
            if seq.handoff:
                out.held.append(live)
            elif reason is not None:
                self._pace.ended(live)
                out.ended.append((live, reason))
        return out

    def _emit(
        self,
        decision: Decision,
        rows: list[Row],
        outcome: Outcome,
        over: list[tuple[Key, str]],
        crash: str | None,
        started: float,
        late: list[tuple[Key, float]],
    ) -> StepResult:
        """Settle the phases and report."""
        items, held, ended, failed = outcome
        cached: dict[Key, int] = {}
        for key in {one.key for one in items if one.index == 0} if items else ():
            cached[key] = self._roster.live[key].seq.num_cached
        holding = {live.seq.key: self._hold(live) for live in held}
        firsts: dict[Key, list[Sampled]] = {key: [] for key in holding}
        if holding:
            for one in items:
                if one.key in firsts:
                    firsts[one.key].append(one)
            items = [one for one in items if one.key not in firsts]
        for live, _ in ended:
            self._remove(live)
        for live, _ in failed:
            self.pool.unpublish(live.seq.blocks)
            self._remove(live)
        num_tokens = sum(len(row.ids) for row in rows)
        expired, self._expired = self._expired, Spent()
        prefills = self._prefills.take()
        for prefill in prefills:
            self._pace.computed(prefill.seconds)
        self._counts["tokens"] += num_tokens
        self._counts["items"] += len(items)
        self._counts["failed"] += len(failed)
        return StepResult(
            items=items,
            held=list(firsts.items()),
            held_blocks=holding,
            ended=over + [(live.seq.key, reason) for live, reason in ended],
            failed=[(live.seq.key, message) for live, message in failed],
            cached=cached,
            prefills=prefills,
            late=late,
            expired=expired,
            num_tokens=num_tokens,
            num_rows=len(rows),
            duration_s=self.now() - started,
            preempted=len(decision.preempt),
            crash=crash,
        )

    def _extend(self, live: Live, got: list[Sampled]) -> str | None:
        """Append ids one by one; those behind an end are dropped from `got`. Returns why it ended, if it did."""
        for at, one in enumerate(got):
            live.seq.outputs.append(one.id)
            live.context.append(one.id)
            reason = self._end_reason(live)
            if reason is not None:
                live.seq.num_computed -= len(got) - at - 1
                del got[at + 1 :]
                return reason
        return None

    # --- parts -------------------------------------------------------------------------------------

    def _check(self, seq: Sequence) -> None:
        if seq.key in self._roster.live:
            raise BadRequest(f"sequence {seq.key.request_id}/{seq.key.choice} runs already")
        check_sequence(seq, self.runner.vocab_size, self.max_context)

    def _waiting(self, key: Key) -> Live | None:
        return self._roster.live[key] if key in self._roster.waiting else None

    def _end_reason(self, live: Live) -> str | None:
        return end_reason(live.seq, self.runner.eos_ids, self.max_context)

    def _end_early(self, live: Live, reason: str) -> None:
        """End a sequence that came with all its ids."""
        self._remove(live)
        self._over.append((live.seq.key, reason))

    def _publish(self, live: Live) -> None:
        """Make full, computed blocks known by their hash."""
        seq = live.seq
        full = seq.num_computed // BLOCK_TOKENS
        if not self._cache_outputs and not seq.warm and full > live.prompt_hashes:
            full = live.prompt_hashes
        if full <= seq.num_hashed:
            return
        live.extend_hashes(full)
        for index in range(seq.num_hashed, full):
            self.pool.publish(seq.blocks[index], live.hashes[index], live.parent(index))
            if seq.warm and index >= live.prompt_hashes:
                self._offer_block(live, index)
        seq.num_hashed = full

    def _offer(self, live: Live) -> None:
        """A prompt is complete: its blocks are worth storing, unless they came from a tier."""
        for index in range(0 if self.offer_all else live.seq.num_cached // BLOCK_TOKENS, live.prompt_hashes):
            self._offer_block(live, index)

    def _offer_block(self, live: Live, index: int) -> None:
        if not self.offering:
            return
        seq = live.seq
        key = home_key(live.hashes, len(seq.prompt_ids))
        self._candidates.append(Candidate(live.hashes[index], live.parent(index), seq.blocks[index], seq.tenant, key))

    def _hold(self, live: Live) -> HeldBlocks:
        self._roster.hold(live)
        return HeldBlocks(self.pool.refs(live.seq.blocks), live.seq.num_computed, live.seq.num_cached)

    def _remove(self, live: Live, *, writer: str | None = None) -> None:
        seq = live.seq
        self._roster.leave(live)
        self._parking.drop(seq.key)
        self._prefills.forget(seq.key)
        if self._speculator is not None:
            self._speculator.forget(seq.key)
        self.abandon_load(seq.key, writer=writer)
        if seq.phase is Phase.HELD:
            self._lent.give_back(seq.blocks, writer)
        else:
            self.pool.free(seq.blocks)
        seq.phase = Phase.FINISHED
        seq.blocks = []

    def _has_room(self, needed: int) -> bool:
        """Whether blocks that cannot be preempted may take `needed` more: the first sequence must still finish."""
        first, num_running = self._roster.first, len(self._roster.running)
        if not self.pool.can_allocate(needed + num_running):
            return first is None and self.pool.can_allocate(needed)
        if first is None:
            return True
        seq = first.seq
        tokens = min(len(seq.prompt_ids) + seq.sampling.max_tokens, self.max_context)
        reserve = min(num_blocks_for(tokens), self.pool.num_blocks // 2)
        # Blocks in use that preemption cannot free (an upper bound).
        pinned = len(self._lent.blocks()) + self._roster.num_held_blocks + self.pool.num_quarantined
        return pinned + needed + reserve <= self.pool.num_blocks

    def prepare(self) -> bool:
        """Do a little of what later steps would have to wait for; false if there is nothing of the kind.

        The first write to each page of a pool costs the step more than the page is worth, as its threads meet there.
        """
        return self.pool.touch_ahead(AHEAD_TOKENS // BLOCK_TOKENS, TOUCHED_AT_ONCE) > 0

    # --- questions ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything."""
        return bool(self._roster.running or self._over or len(self._roster.waiting) > len(self._lent.loads))

    @property
    def next_deadline(self) -> float:
        """Earliest deadline of a sequence that a step would drop; infinite if there is none."""
        return self._roster.next_deadline

    def get(self, key: Key) -> Sequence | None:
        """Return a sequence that lives here; to be read only."""
        live = self._roster.live.get(key)
        return None if live is None else live.seq

    def spent(self, key: Key) -> Spent:
        """Return what was computed here for a sequence that lives here."""
        live = self._roster.live.get(key)
        return Spent() if live is None else live.spent

    def refs(self, key: Key) -> list[BlockRef]:
        """Return the blocks of a sequence or reservation for use by another process."""
        if key in self._lent.expected:
            return self.pool.refs(self._lent.expected[key].blocks)
        live = self._roster.live.get(key)
        return [] if live is None else self.pool.refs(live.seq.blocks)

    def load(self) -> dict[str, Any]:
        """Return the snapshot that rides in heartbeats."""
        return {
            **self._roster.load(),
            "expected": len(self._lent.expected),
            "free_blocks": self.pool.num_free,
            "total_blocks": self.pool.num_blocks,
            "blocks_in_use": self.pool.in_use,
            "blocks_quarantined": self.pool.num_quarantined,
            "blocks_cached": self.pool.num_cached,
            "steps": int(self._counts["steps"]),
            "prompt_tokens": int(self._counts["prompt_tokens"]),
            "cached_tokens": int(self._counts["cached_tokens"]),
            "preempted": int(self._counts["preempted"]),
            "max_context": self.max_context,
            "max_running": self.scheduler.max_running,
            "drain_rate": self._drain.rate(self.now()),
        }

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        return {
            "running": len(self._roster.running),
            "waiting": len(self._roster.waiting),
            "expected": len(self._lent.expected),
            "loading": len(self._lent.loads),
            "parking_bytes": self._parking.nbytes,
            **{f"{name}_total": count for name, count in self._counts.items()},
            **self.costs.statistics(),
            "step_longest_s": self.costs.longest_s(self.scheduler.token_budget, self.max_context) or 0.0,
            **self._fair.statistics(),
            "drain_tokens_per_second": self._drain.rate(self.now()),
            **self.pool.statistics(),
        }

    def check_integrity(self) -> None:
        """Assert that every block in use has an owner here (or a write-back), and that phases and lists agree."""
        self.pool.check_integrity()
        self._roster.check_integrity()
        self._parking.check_integrity()
        assert all(key in self._roster.waiting for key in self._parking.keys), "something runs and is parked"
        owned = {b for v in self._roster.live.values() for b in v.seq.blocks}
        owned |= set(self._lent.blocks())
        assert len(owned) <= self.pool.in_use + self.pool.num_quarantined, "more blocks are owned than in use"
