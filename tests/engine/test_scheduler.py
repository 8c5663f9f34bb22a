"""The scheduler as a pure policy, driven by a small model of an engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import Decision, Hit, Scheduler
from engine.sequence import Key, Phase, Sequence
from schemas.record import Sampling

SIZE = 16


def seq(name: str, length: int, *, computed: int = 0, blocks: int | None = None) -> Sequence:
    """A sequence of `length` tokens of which `computed` lie in blocks."""
    held = -(-computed // SIZE) if blocks is None else blocks
    return Sequence(Key(name, 0), [1] * length, Sampling(), num_computed=computed, blocks=list(range(held)))


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

    decision = Scheduler(SIZE, 34, 8, 32).plan([seq("new", 40)], running, 100, 0.0)

    assert names(decision) == {"a": 1, "b": 1, "long": 32}
    assert not decision.admit and not decision.preempt


def test_the_oldest_is_planned_first_even_if_it_is_a_prompt() -> None:
    """Younger decode rows cannot eat the whole budget of the oldest sequence."""
    running = [seq("old", 100, computed=32)] + [seq(f"d{i}", 20, computed=19) for i in range(3)]

    assert names(Scheduler(SIZE, 4, 4, 32).plan([], running, 100, 0.0)) == {"old": 4}


def test_nobody_overtakes_in_the_queue() -> None:
    """A prompt that does not fit now keeps shorter ones behind it, or it would never start."""
    decision = Scheduler(SIZE, 512, 8, 256).plan(
        [seq("big", 200), seq("small", 10)], [seq("r", 17, computed=16)], 8, 0.0
    )

    assert names(decision) == {"r": 1}


def test_a_hit_counts_as_computed_and_its_idle_blocks_as_taken() -> None:
    """Found tokens are not granted again; blocks that counted as free and are now shared do not count any more."""
    decision = Scheduler(SIZE, 512, 8, 256).plan(
        [seq("warm", 100), seq("next", 40)], [], 10, 0.0, lookup=lambda s: Hit(64, 4) if s.num_tokens == 100 else Hit()
    )

    assert names(decision) == {"warm": 36}
    assert decision.admit == ((Key("warm", 0), Hit(64, 4)),)
    assert decision.grants[0].num_blocks == 3


def test_the_youngest_gives_its_blocks_to_the_oldest() -> None:
    """Without free blocks the youngest goes back to the queue, and only it."""
    running = [seq("old", 33, computed=32), seq("mid", 20, computed=19), seq("young", 40, computed=39)]

    decision = Scheduler(SIZE, 64, 8, 32).plan([seq("new", 1)], running, 0, 0.0)

    assert decision.preempt == (Key("young", 0),)
    assert names(decision) == {"old": 1, "mid": 1}
    assert not decision.admit


def test_what_a_preempted_sequence_was_granted_comes_back() -> None:
    """A younger decode row had its token and block already: the older prompt gets both, and the victim's own blocks."""
    running = [seq("old", 20, computed=19), seq("prompt", 200, computed=32), seq("young", 33, computed=32)]

    decision = Scheduler(SIZE, 49, 8, 48).plan([], running, 1, 0.0)

    assert decision.preempt == (Key("young", 0),)
    assert names(decision) == {"old": 1, "prompt": 48}


def test_a_sequence_that_cannot_go_on_alone_waits_without_harm() -> None:
    """If blocks are held by nobody who can be preempted, the oldest simply waits."""
    assert Scheduler(SIZE, 64, 8, 32).plan([], [seq("old", 33, computed=32)], 0, 0.0) == Decision()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 120), st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=10),
    st.integers(12, 30),
    st.integers(1, 6),
    st.integers(6, 40),
    st.integers(1, 40),
)
def test_every_sequence_ends_within_the_limits(
    shapes: list[tuple[int, int, int]], num_blocks: int, max_running: int, budget: int, chunk: int
) -> None:
    """Over whole lives: budget, running limit and blocks are kept, the oldest always progresses, all finish."""
    scheduler = Scheduler(SIZE, budget, max_running, chunk)
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    todo: dict[Key, int] = {}
    order: dict[Key, int] = {}
    arrivals = sorted(
        (at, number, length, outputs) for number, (length, outputs, at) in enumerate(shapes)
    )
    free, steps = num_blocks, 0
    while arrivals or waiting or running:
        while arrivals and (arrivals[0][0] <= steps or not (waiting or running)):
            _, number, length, outputs = arrivals.pop(0)
            new = seq(str(number), length)
            waiting.append(new)
            todo[new.key], order[new.key] = outputs, len(order)
        oldest = running[0] if running else None

        decision = scheduler.plan(waiting, running, free, 0.0)

        for key in decision.preempt:
            victim = running.pop()
            assert victim.key == key, "the youngest goes first"
            free += len(victim.blocks)
            victim.blocks, victim.num_computed, victim.phase = [], 0, Phase.WAITING
            waiting.append(victim)
        waiting.sort(key=lambda s: order[s.key])
        for key, hit in decision.admit:
            assert hit == Hit()
            running.append(next(s for s in waiting if s.key == key))
            waiting.remove(running[-1])
        running.sort(key=lambda s: order[s.key])
        assert len(running) <= max_running
        assert sum(g.num_tokens for g in decision.grants) <= budget
        assert len({g.seq.key for g in decision.grants}) == len(decision.grants)
        assert decision.grants, "somebody always progresses"
        if oldest is not None:
            assert oldest.key in {g.seq.key for g in decision.grants}, "the oldest always progresses"
        for granted, num_tokens, blocks in decision.grants:
            assert granted in running and 0 < num_tokens <= max(1, chunk)
            free -= blocks
            granted.blocks += [0] * blocks
            granted.num_computed += num_tokens
            assert granted.num_computed <= len(granted.blocks) * SIZE < granted.num_computed + SIZE
            if granted.num_uncomputed == 0:
                granted.outputs.append(1)
                todo[granted.key] -= 1
        assert free >= 0
        for done in [s for s in running if todo[s.key] <= 0]:
            running.remove(done)
            free += len(done.blocks)
        steps += 1
        assert steps < 20_000
    assert free == num_blocks
