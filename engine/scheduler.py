"""Which tokens the next step computes: a pure policy.

Every sequence has tokens, and a count of those whose KV is computed; it wants the rest computed. Prompt chunks, decode
and recovery are that one rule. The oldest running sequence is planned first, then those that miss one token, then
prompts in chunks, then waiting ones in order of arrival. When blocks run out, the youngest give theirs back and compute
again later, so the oldest always progresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import NamedTuple

from engine.sequence import Key, Sequence


class Grant(NamedTuple):
    """A sequence computes `num_tokens` more in this step, with `num_blocks` more blocks."""

    seq: Sequence
    num_tokens: int
    num_blocks: int


class Hit(NamedTuple):
    """What the device tier has of a waiting sequence: tokens, and blocks of them that count as free now."""

    num_tokens: int = 0
    num_idle: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """One step: preempt these, admit those, then compute the grants."""

    preempt: tuple[Key, ...] = ()
    admit: tuple[tuple[Key, Hit], ...] = ()
    grants: tuple[Grant, ...] = ()


def _no_hit(seq: Sequence) -> Hit:
    return Hit()


def _all_blocks(seq: Sequence) -> int:
    return len(seq.blocks)


class Scheduler:
    """Decides steps under a token budget; holds its limits and nothing else."""

    def __init__(self, block_tokens: int, token_budget: int, max_running: int, max_chunk: int) -> None:
        """Set the limits.

        Args:
            block_tokens: tokens in a block.
            token_budget: most tokens in one step.
            max_running: most sequences that take part in steps.
            max_chunk: most prompt tokens of one sequence in one step.

        Raises:
            ValueError: if a limit is not positive, or the budget cannot give each running sequence a token.
        """
        if min(block_tokens, token_budget, max_running, max_chunk) <= 0:
            raise ValueError("the limits of a scheduler are positive")
        if token_budget < max_running:
            raise ValueError(f"a budget of {token_budget} tokens cannot serve {max_running} running sequences")
        self.block_tokens = block_tokens
        self.token_budget = token_budget
        self.max_running = max_running
        self.max_chunk = max_chunk

    def plan(
        self,
        waiting: Iterable[Sequence],
        running: Listing[Sequence],
        free_blocks: int,
        now: float,
        *,
        lookup: Callable[[Sequence], Hit] = _no_hit,
        reclaim: Callable[[Sequence], int] = _all_blocks,
    ) -> Decision:
        """Decide a step.

        Args:
            waiting: candidates, first come first; looked at only as far as there is room.
            running: oldest first.
            free_blocks: blocks that can be allocated now.
            now: for policies that age; unused by this one.
            lookup: what the device tier has of a waiting sequence.
            reclaim: blocks that a running sequence would give back.
        """
        draft = _Draft(self, running, free_blocks, reclaim)
        if running:
            draft.grant(running[0])
            prompts = []
            for seq in running[1:]:
                if seq.num_uncomputed > 1:
                    prompts.append(seq)
                else:
                    draft.grant(seq)
            for seq in prompts:
                draft.grant(seq)
        if not draft.preempted:
            draft.admit(waiting, lookup)
        return Decision(tuple(draft.preempted), tuple(draft.admitted), tuple(draft.grants.values()))


class _Draft:
    """A decision in the making."""

    def __init__(
        self, limits: Scheduler, running: Listing[Sequence], free: int, reclaim: Callable[[Sequence], int]
    ) -> None:
        self.limits = limits
        self.budget = limits.token_budget
        self.free = free
        self.grants: dict[Key, Grant] = {}
        self.preempted: list[Key] = []
        self.admitted: list[tuple[Key, Hit]] = []
        self._running = running
        self._last = len(running) - 1  # youngest that is not preempted
        self._reclaim = reclaim

    def grant(self, seq: Sequence) -> None:
        """Give a running sequence its tokens; younger ones make room for it."""
        if seq.num_uncomputed <= 0 or self.budget <= 0 or seq.key in self.preempted:
            return
        size, have = self.limits.block_tokens, len(seq.blocks)
        room = have * size - seq.num_computed
        while room + self.free * size < 1:
            if not self._preempt_younger(seq):
                return
        count = min(seq.num_uncomputed, self.budget, self.limits.max_chunk, room + self.free * size)
        blocks = -(-(seq.num_computed + count) // size) - have if count > room else 0
        self.budget -= count
        self.free -= blocks
        self.grants[seq.key] = Grant(seq, count, blocks)

    def admit(self, waiting: Iterable[Sequence], lookup: Callable[[Sequence], Hit]) -> None:
        """Start waiting sequences in order, each only if its whole prompt has room beside the running ones."""
        size = self.limits.block_tokens
        num_running = len(self._running)
        promised = sum(self._outstanding(seq) for seq in self._running if seq.num_uncomputed > 1)
        if num_running >= self.limits.max_running or self.budget <= 0:
            return
        for seq in waiting:
            hit = lookup(seq)
            held = hit.num_tokens // size
            needed = -(-seq.num_tokens // size) - held
            # One spare block for each running sequence: else the newcomer is soon preempted for their growth.
            fits = needed + hit.num_idle + promised + num_running <= self.free
            if not fits and not (num_running == 0 and hit.num_idle < self.free):
                return  # nobody overtakes: a long prompt would starve
            missing = seq.num_tokens - hit.num_tokens
            count = min(missing, self.budget, self.limits.max_chunk, (self.free - hit.num_idle) * size)
            blocks = -(-(hit.num_tokens + count) // size) - held
            self.admitted.append((seq.key, hit))
            self.grants[seq.key] = Grant(seq, count, blocks)
            self.budget -= count
            self.free -= blocks + hit.num_idle
            promised += needed - blocks
            num_running += 1
            if num_running >= self.limits.max_running or self.budget <= 0:
                return

    def _outstanding(self, seq: Sequence) -> int:
        """Blocks that a running prompt still needs after this step."""
        grant = self.grants.get(seq.key)
        have = len(seq.blocks) + (grant.num_blocks if grant else 0)
        return max(0, -(-seq.num_tokens // self.limits.block_tokens) - have)

    def _preempt_younger(self, seq: Sequence) -> bool:
        if self._last < 0 or self._running[self._last] is seq:
            return False
        victim = self._running[self._last]
        self._last -= 1
        self.preempted.append(victim.key)
        self.free += self._reclaim(victim)
        undone = self.grants.pop(victim.key, None)
        if undone is not None:
            self.budget += undone.num_tokens
            self.free += undone.num_blocks
        return True
