"""The scheduler as a pure policy, driven by a small model of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import Decision, Hit, Scheduler
from engine.sequence import Key, Phase, Sequence
from schemas.record import Sampling

SIZE = 16


def seq(name: str, length: int, *, computed: int = 0, blocks: int | None = None, **fields: Any) -> Sequence:
    """A sequence of `length` tokens of which `computed` lie in blocks."""
    held = -(-computed // SIZE) if blocks is None else blocks
    return Sequence(Key(name, 0), [1] * length, Sampling(), num_computed=computed, blocks=list(range(held)), **fields)


def names(decision: Decision) -> dict[str, int]:
    """Tokens granted, by name."""
    return {grant.seq.key.request_id: grant.num_tokens for grant in decision.grants}


def test_limits_that_cannot_work_are_refused() -> None:
    """Limits are positive, and a step can give each running sequence a token."""
    for limits in ((0, 1, 1, 1), (16, 0, 1, 1), (16, 8, 9, 1), (16, 8, 4, 0)):
        with pytest.raises(ValueError):
            Scheduler(*limits)


def test_decode_comes_before_prompts_and_prompts_are_cut_into_chunks() -> None:
    """Those that miss one token get it; a prompt gets what is left of the budget, at most a chunk."""
    running = [seq("a", 20, computed=19), seq("long", 500, computed=32), seq("b", 20, computed=19)]

    decision = Scheduler(SIZE, 34, 8, 32).plan([seq("new", 40)], running, 100)

    assert names(decision) == {"a": 1, "b": 1, "long": 32}
    assert not decision.admit and not decision.preempt


def test_the_first_is_planned_first_even_if_it_is_a_prompt() -> None:
    """Decode rows behind it cannot eat the whole budget of the first sequence."""
    running = [seq("old", 100, computed=32)] + [seq(f"d{i}", 20, computed=19) for i in range(3)]

    assert names(Scheduler(SIZE, 4, 4, 32).plan([], running, 100)) == {"old": 4}


def test_nobody_overtakes_in_the_queue() -> None:
    """A prompt that does not fit now keeps shorter ones behind it, or it would never start."""
    decision = Scheduler(SIZE, 512, 8, 256).plan([seq("big", 200), seq("small", 10)], [seq("r", 17, computed=16)], 8)

    assert names(decision) == {"r": 1}


def test_a_hit_counts_as_computed_and_its_idle_blocks_as_taken() -> None:
    """Found tokens are not granted again; blocks that counted as free and are now shared do not count any more."""
    decision = Scheduler(SIZE, 512, 8, 256).plan(
        [seq("warm", 100), seq("next", 40)], [], 10, lookup=lambda s: Hit(64, 4) if s.num_tokens == 100 else Hit()
    )

    assert names(decision) == {"warm": 36}
    assert decision.admit == ((Key("warm", 0), Hit(64, 4)),)
    assert decision.grants[0].num_blocks == 3


def test_the_youngest_gives_its_blocks_to_the_oldest() -> None:
    """Without free blocks the youngest goes back to the queue, and only it."""
    running = [seq("old", 33, computed=32), seq("mid", 20, computed=19), seq("young", 40, computed=39)]

    decision = Scheduler(SIZE, 64, 8, 32).plan([seq("new", 1)], running, 0)

    assert decision.preempt == (Key("young", 0),)
    assert names(decision) == {"old": 1, "mid": 1}
    assert not decision.admit


def test_what_a_preempted_sequence_was_granted_comes_back() -> None:
    """A younger decode row had its token and block already: the older prompt gets both, and the victim's own blocks."""
    running = [seq("old", 20, computed=19), seq("prompt", 200, computed=32), seq("young", 33, computed=32)]

    decision = Scheduler(SIZE, 49, 8, 48).plan([], running, 1)

    assert decision.preempt == (Key("young", 0),)
    assert names(decision) == {"old": 1, "prompt": 48}


def test_a_sequence_that_cannot_go_on_alone_waits_without_harm() -> None:
    """If blocks are held by nobody who can be preempted, the oldest simply waits."""
    assert Scheduler(SIZE, 64, 8, 32).plan([], [seq("old", 33, computed=32)], 0) == Decision()


def test_prompts_share_what_the_pace_of_decodes_leaves() -> None:
    """The allowance is for all prompts of a step together, running and new; decodes do not count against it."""
    running = [seq("a", 20, computed=19), seq("long", 100, computed=80), seq("b", 20, computed=19)]

    decision = Scheduler(SIZE, 256, 8, 256).plan([seq("new", 40)], running, 100, prompt_tokens=32)

    assert names(decision) == {"a": 1, "b": 1, "long": 20, "new": 12}


def test_the_first_is_held_to_the_allowance_as_well() -> None:
    """A prompt that came before the decodes beside it takes no more than their pace allows."""
    running = [seq("old", 500, computed=32), seq("a", 20, computed=19)]

    assert names(Scheduler(SIZE, 256, 8, 256).plan([], running, 100, prompt_tokens=16)) == {"old": 16, "a": 1}


def test_what_was_parked_is_not_granted_again_but_needs_its_blocks() -> None:
    """64 tokens are found and 35 restored: one is computed, and all blocks behind the found ones are allocated."""
    warm = seq("warm", 100)

    decision = Scheduler(SIZE, 512, 8, 256).plan([warm], [], 10, lookup=lambda s: Hit(64, 4, 99))

    assert names(decision) == {"warm": 1}
    assert decision.grants[0].num_blocks == 3


def test_the_lowest_class_gives_way_first_then_the_last() -> None:
    """Batch before agent before interactive, whatever their order; nobody before the one in need."""
    running = [seq("old", 33, computed=32), seq("batch", 33, computed=32, priority=2)]
    running += [seq("agent", 33, computed=32, priority=1), seq("young", 33, computed=32)]
    scheduler = Scheduler(SIZE, 64, 8, 32)

    assert scheduler.plan([], running, 0).preempt == (Key("batch", 0),)
    assert scheduler.plan([], running[2:], 0).preempt == (Key("young", 0),), "the agent's came first and stays"


def test_a_class_counts_as_so_many_seconds() -> None:
    """Batch work that has waited longer than its handicap is ahead of what arrives now."""
    scheduler = Scheduler(SIZE, 64, 8, 32, aging_s=10.0)
    batch = seq("batch", 5, priority=2, arrival=100.0)

    assert scheduler.rank(batch) > scheduler.rank(seq("soon", 5, arrival=119.0))
    assert scheduler.rank(batch) < scheduler.rank(seq("late", 5, arrival=121.0))


@dataclass
class Engine:
    """A small model of an engine around the policy; asserts at each step what holds for every decision."""

    scheduler: Scheduler
    free: int
    prompt_tokens: int | None = None
    steps: int = 0
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    todo: dict[Key, int] = field(default_factory=dict)
    order: dict[Key, int] = field(default_factory=dict)
    started: list[Sequence] = field(default_factory=list)  # in the order of their first step

    def place(self, seq: Sequence) -> tuple[float, int]:
        return self.scheduler.rank(seq), self.order[seq.key]

    def arrive(self, new: Sequence, outputs: int) -> None:
        self.waiting.append(new)
        self.todo[new.key], self.order[new.key] = outputs, len(self.order)

    def step(self) -> None:
        self.waiting.sort(key=self.place)
        first = self.running[0] if self.running else None

        decision = self.scheduler.plan(self.waiting, self.running, self.free, prompt_tokens=self.prompt_tokens)

        for key in decision.preempt:
            victim = next(s for s in self.running if s.key == key)
            assert victim is not first, "the first is never a victim"
            self.running.remove(victim)
            self.free += len(victim.blocks)
            victim.blocks, victim.num_computed, victim.phase = [], 0, Phase.WAITING
            self.waiting.append(victim)
        assert not (decision.preempt and decision.admit)
        assert [key for key, _ in decision.admit] == [s.key for s in self.waiting[: len(decision.admit)]]
        for key, hit in decision.admit:
            assert hit == Hit() and self.waiting[0].key == key, "nobody overtakes"
            new = self.waiting.pop(0)
            self.running.append(new)
            if new not in self.started:
                self.started.append(new)
        self.running.sort(key=self.place)
        self._grants(decision, first)
        self.steps += 1
        assert self.steps < 20_000

    def _grants(self, decision: Decision, first: Sequence | None) -> None:
        limits, grants = self.scheduler, decision.grants
        assert len(self.running) <= limits.max_running
        assert sum(g.num_tokens for g in grants) <= limits.token_budget
        of_prompts = sum(g.num_tokens for g in grants if g.seq.num_uncomputed > 1)
        assert self.prompt_tokens is None or of_prompts <= self.prompt_tokens
        assert len({g.seq.key for g in grants}) == len(grants)
        assert grants, "somebody always progresses"
        assert first is None or first.key in {g.seq.key for g in grants}, "the first always progresses"
        for granted, num_tokens, blocks in grants:
            assert granted in self.running and 0 < num_tokens <= max(1, limits.max_chunk)
            self.free -= blocks
            granted.blocks += [0] * blocks
            granted.num_computed += num_tokens
            assert granted.num_computed <= len(granted.blocks) * SIZE < granted.num_computed + SIZE
            if granted.num_uncomputed == 0:
                granted.outputs.append(1)
                self.todo[granted.key] -= 1
        assert self.free >= 0, "blocks are never given twice"
        for done in [s for s in self.running if self.todo[s.key] <= 0]:
            self.running.remove(done)
            self.free += len(done.blocks)


SHAPES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 120), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=10
)  # arrival, prompt length, outputs, class


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    SHAPES,
    st.integers(12, 30),
    st.integers(1, 6),
    st.integers(6, 40),
    st.integers(1, 40),
    st.none() | st.integers(1, 20),
)
def test_every_sequence_ends_within_the_limits(
    shapes: list[tuple[int, int, int, int]],
    num_blocks: int,
    max_running: int,
    budget: int,
    chunk: int,
    prompt_tokens: int | None,
) -> None:
    """Over whole lives: budget, running limit and blocks are kept, the first always progresses, all finish."""
    engine = Engine(Scheduler(SIZE, budget, max_running, chunk), num_blocks, prompt_tokens)
    arrivals = sorted((*shape, number) for number, shape in enumerate(shapes))
    while arrivals or engine.waiting or engine.running:
        while arrivals and (arrivals[0][0] <= engine.steps or not (engine.waiting or engine.running)):
            at, length, outputs, priority, number = arrivals.pop(0)
            engine.arrive(seq(str(number), length, priority=priority, arrival=at), outputs)
        engine.step()
    assert engine.free == num_blocks


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2), st.integers(1, 60), st.integers(0, 12), st.integers(1, 3), st.integers(1, 29))
def test_nobody_starves_under_a_flood_of_a_higher_class(
    priority: int, length: int, aging: int, max_running: int, stride: int
) -> None:
    """One step a second, and each second an interactive request that fills the engine: only those that were there
    before, or that come within the handicap of its class, start before a sequence; and it ends while the flood lasts.
    """
    engine = Engine(Scheduler(SIZE, 16, max_running, 16, aging_s=aging), 24)
    low = seq("low", length, priority=priority, arrival=5)
    for second in range(400):
        if second == 5:
            engine.arrive(low, 3)
        engine.arrive(seq(f"s{second}", 1 + second * stride % 30, arrival=second), 1)
        engine.step()
        if engine.todo.get(low.key) == 0:
            break

    assert engine.todo[low.key] == 0, "it ended although there was always more urgent work"
    before = engine.started[: engine.started.index(low)]
    assert all(other.arrival <= low.arrival + priority * aging for other in before)
