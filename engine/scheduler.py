"""Which tokens the next step computes: a pure policy.

Every sequence has tokens, and a count of those whose KV is computed; it wants the rest computed. Prompt chunks, decode
and recovery are that one rule. The first running sequence is planned first, then those that miss one token, then
prompts in chunks, then waiting ones in order. When blocks run out, those of the lowest class, and of these the last,
give theirs back and go on later; the first always progresses.

The order is by rank: the time of arrival, put off by `aging_s` for each class below the highest. So a sequence that
waits improves against those that come later, and only what arrives within `aging_s` per class after it can overtake it:
nobody starves, and an order once given never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import NamedTuple

from engine.sequence import Key, Sequence

AGING_S = 10.0


class Grant(NamedTuple):
    """A sequence computes `num_tokens` more in this step, with `num_blocks` more blocks."""

    seq: Sequence
    num_tokens: int
    num_blocks: int


class Hit(NamedTuple):
    """What need not be computed of a waiting sequence.

    `num_tokens` lie in the device tier, `num_idle` of their blocks count as free now; of its first `num_parked` tokens
    those behind the device tier's come back from the parking area, into blocks that it still needs.
    """

    num_tokens: int = 0
    num_idle: int = 0
    num_parked: int = 0

    @property
    def num_ready(self) -> int:
        """Tokens that are computed when the sequence starts."""
        return max(self.num_tokens, self.num_parked)


@dataclass(frozen=True, slots=True)
class Decision:
    """One step: preempt these, admit those, then compute the grants."""

    preempt: tuple[Key, ...] = ()
    admit: tuple[tuple[Key, Hit], ...] = ()
    grants: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True)
class Shares:
    """How tenants share the prompts of a step.

    Running prompts come in the order of `turns`, which may name the first that waits among them. Behind the first
    tenant's prompts those of others take at most `beside(tokens, limit)` tokens, if that is given.
    """

    turns: tuple[Key, ...] = ()
    beside: Callable[[int, int], int] | None = None


def _no_hit(seq: Sequence) -> Hit:
    return Hit()


def _all_blocks(seq: Sequence) -> int:
    return len(seq.blocks)


class Scheduler:
    """Decides steps under a token budget; holds its limits and nothing else."""

    def __init__(
        self, block_tokens: int, token_budget: int, max_running: int, max_chunk: int, *, aging_s: float = AGING_S
    ) -> None:
        """Set the limits.

        Args:
            block_tokens: tokens in a block.
            token_budget: most tokens in one step.
            max_running: most sequences that take part in steps.
            max_chunk: most prompt tokens of one sequence in one step.
            aging_s: seconds of waiting that make up for one class.

        Raises:
            ValueError: if a limit is not positive, or the budget cannot give each running sequence a token.
        """
        if min(block_tokens, token_budget, max_running, max_chunk) <= 0 or aging_s < 0:
            raise ValueError("the limits of a scheduler are positive")
        if token_budget < max_running:
            raise ValueError(f"a budget of {token_budget} tokens cannot serve {max_running} running sequences")
        self.block_tokens = block_tokens
        self.token_budget = token_budget
        self.max_running = max_running
        self.max_chunk = max_chunk
        self.aging_s = aging_s

    def rank(self, seq: Sequence) -> float:
        """Return what sequences are ordered by, the lowest first; it never changes."""
        return seq.arrival + seq.priority * self.aging_s

    def plan(
        self,
        waiting: Iterable[Sequence],
        running: Listing[Sequence],
        free_blocks: int,
        *,
        prompt_tokens: int | None = None,
        max_running: int | None = None,
        shares: Shares | None = None,
        lookup: Callable[[Sequence], Hit] = _no_hit,
        reclaim: Callable[[Sequence], int] = _all_blocks,
    ) -> Decision:
        """Decide a step.

        Args:
            waiting: candidates by rank; looked at only as far as there is room.
            running: by rank.
            free_blocks: blocks that can be allocated now.
            prompt_tokens: most tokens of prompts in this step, for the pace of the others; None: as the budget says.
            max_running: start no more than so many take part, for the same reason; None: as the limit says.
            shares: where tenants share the step; None: prompts come by rank.
            lookup: what need not be computed of a waiting sequence.
            reclaim: blocks that a running sequence would give back.
        """
        draft = _Draft(self, running, free_blocks, prompt_tokens, max_running, shares, reclaim)
        queue = _Queue(waiting)
        if running:
            prompts = [at for at, seq in enumerate(running) if seq.num_uncomputed > 1]
            if shares is None and prompts and prompts[0] == 0:
                draft.grant(prompts.pop(0))
            for at, seq in enumerate(running):
                if seq.num_uncomputed <= 1:
                    draft.grant(at)
            if shares is not None:
                places = {running[at].key: at for at in prompts}
                prompts = []
                for key in shares.turns:
                    if key in places:
                        draft.grant(places.pop(key))
                    elif queue.first is not None and queue.first.key == key and not draft.preempted:
                        draft.admit(queue, lookup, at_most=1)
                prompts = list(places.values())
            for at in prompts:
                draft.grant(at)
        if not draft.preempted:
            draft.admit(queue, lookup)
        return Decision(tuple(draft.preempted), tuple(draft.admitted), tuple(draft.grants.values()))


class _Queue:
    """Candidates, of which the next one is looked at before the last one is taken; asked for one at a time."""

    def __init__(self, waiting: Iterable[Sequence]) -> None:
        self._rest = iter(waiting)
        self._first: Sequence | None = None
        self._asked = False

    @property
    def first(self) -> Sequence | None:
        """The next one, if any."""
        if not self._asked:
            self._first, self._asked = next(self._rest, None), True
        return self._first

    def take(self) -> None:
        """The first one has started."""
        self._asked = False


class _Draft:
    """A decision in the making."""

    def __init__(
        self,
        limits: Scheduler,
        running: Listing[Sequence],
        free: int,
        prompt_tokens: int | None,
        max_running: int | None,
        shares: Shares | None,
        reclaim: Callable[[Sequence], int],
    ) -> None:
        self.limits = limits
        self.budget = limits.token_budget
        self.prompts = self.budget if prompt_tokens is None else max(1, prompt_tokens)  # left for prompts
        self.max_running = limits.max_running if max_running is None else min(max_running, limits.max_running)
        self.free = free
        self.grants: dict[Key, Grant] = {}
        self.preempted: dict[Key, None] = {}
        self.admitted: list[tuple[Key, Hit]] = []
        self._running = running
        self._beside = shares.beside if shares is not None else None
        self._leader: str | None = None  # the tenant whose prompt came first
        self._led = 0  # tokens of its prompts
        self.promised = 0  # blocks that admitted prompts still need after this step
        self._reclaim = reclaim

    def grant(self, at: int) -> None:
        """Give a running sequence its tokens; later ones make room for it."""
        seq = self._running[at]
        want = self._limit(seq, seq.num_uncomputed)
        if want <= 0 or seq.key in self.preempted:
            return
        size, have = self.limits.block_tokens, len(seq.blocks)
        room = have * size - seq.num_computed
        while room + self.free * size < 1:
            if not self._preempt_after(at):
                return
        # A victim may have given tokens back as well.
        count = min(self._limit(seq, seq.num_uncomputed), room + self.free * size)
        blocks = -(-(seq.num_computed + count) // size) - have if count > room else 0
        self.free -= blocks
        self._spend(seq, seq.num_uncomputed, count)
        self.grants[seq.key] = Grant(seq, count, blocks)

    def admit(self, queue: _Queue, lookup: Callable[[Sequence], Hit], at_most: int | None = None) -> None:
        """Start waiting sequences in order, each only if its whole prompt has room beside the running ones."""
        size = self.limits.block_tokens
        num_running = len(self._running) + len(self.admitted)
        last = None if at_most is None else len(self.admitted) + at_most
        promised = sum(self._outstanding(seq) for seq in self._running if seq.num_uncomputed > 1) + self.promised
        while num_running < self.max_running and self.budget > 0 and len(self.admitted) != last:
            seq = queue.first
            if seq is None:
                return
            hit = lookup(seq)
            missing = seq.num_tokens - hit.num_ready
            limit = self._limit(seq, missing)
            if limit <= 0:
                return
            held = hit.num_tokens // size
            needed = -(-seq.num_tokens // size) - held
            # One spare block for each running sequence: else the newcomer is soon preempted for their growth.
            fits = needed + hit.num_idle + promised + num_running <= self.free
            restored = hit.num_ready - hit.num_tokens
            room = (self.free - hit.num_idle) * size - restored
            if not fits and not (num_running == 0 and room > 0):
                return  # nobody overtakes: a long prompt would starve
            count = min(limit, room)
            blocks = -(-(hit.num_ready + count) // size) - held
            self.admitted.append((seq.key, hit))
            self.grants[seq.key] = Grant(seq, count, blocks)
            self._spend(seq, missing, count)
            self.free -= blocks + hit.num_idle
            promised += needed - blocks
            self.promised += needed - blocks
            num_running += 1
            queue.take()

    def _limit(self, seq: Sequence, missing: int) -> int:
        """Return how many of the tokens that a sequence misses this step can take: one is a decode, more a prompt."""
        if missing <= 1:
            return min(missing, self.budget)
        if self._beside is not None and self._leader not in (None, seq.tenant):
            self.prompts, self._beside = min(self.prompts, self._beside(self._led, self.prompts)), None
        return min(missing, self.budget, self.prompts, self.limits.max_chunk)

    def _spend(self, seq: Sequence, missing: int, count: int) -> None:
        self.budget -= count
        if missing > 1:
            self.prompts -= count
            self._leader = self._leader or seq.tenant
            self._led += count if seq.tenant == self._leader else 0

    def _outstanding(self, seq: Sequence) -> int:
        """Blocks that a running prompt still needs after this step."""
        grant = self.grants.get(seq.key)
        have = len(seq.blocks) + (grant.num_blocks if grant else 0)
        return max(0, -(-seq.num_tokens // self.limits.block_tokens) - have)

    def _preempt_after(self, at: int) -> bool:
        """Take the blocks of a sequence behind `at`: of the lowest class the last one; false if there is none."""
        behind = [i for i in range(at + 1, len(self._running)) if self._running[i].key not in self.preempted]
        if not behind:
            return False
        victim = self._running[max(behind, key=lambda i: (self._running[i].priority, i))]
        self.preempted[victim.key] = None
        self.free += self._reclaim(victim)
        undone = self.grants.pop(victim.key, None)
        if undone is not None:
            self._spend(victim, victim.num_uncomputed, -undone.num_tokens)
            self.free += undone.num_blocks
        return True
