"""Where tenants share an engine: whose prompt comes first in a step, how long steps are, how far service may differ."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engines import Time, make_core, prompt, run, sequence

from engine.costs import LENGTHEN, StepCosts, run_work
from engine.fairness import OUTPUT_COST, SHARED_S, Fairness
from engine.scheduler import Scheduler, Shares
from engine.sequence import Key, Sequence
from kvstore.block import BLOCK_TOKENS
from schemas.record import Sampling


def seq(name: str, tokens: int, *, tenant: str = "a", computed: int = 0) -> Sequence:
    """A prompt of which some is computed, with the blocks for that."""
    blocks = list(range(-(-computed // BLOCK_TOKENS)))
    made = Sequence(Key(name, 0), [1] * tokens, Sampling(), tenant=tenant, num_computed=computed)
    made.blocks = blocks
    return made


def learnt(*, fixed_s: float = 0.008, token_s: float = 0.0008) -> StepCosts:
    """Costs that are a line."""
    costs = StepCosts()
    for _ in range(8):
        for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            costs.observe(run_work(0, count), fixed_s + token_s * count)
    return costs


def test_running_prompts_come_in_turn_and_one_that_waits_may_come_before_them() -> None:
    """Not by arrival; what is left of the step goes to the next ones."""
    running = [seq("a1", 100, computed=16), seq("a2", 100, computed=16)]
    waiting = [seq("b", 40, tenant="b")]
    turns = Shares((Key("b", 0), Key("a2", 0), Key("a1", 0)))

    decision = Scheduler(16, 96, 8, 96).plan(waiting, running, 100, shares=turns)

    assert [(g.seq.key.request_id, g.num_tokens) for g in decision.grants] == [("b", 40), ("a2", 56)]
    assert [key.request_id for key, _ in decision.admit] == ["b"]


def test_decodes_go_on_whoever_has_the_turn() -> None:
    """Turns are about prompts alone."""
    decoding = seq("d", 33, computed=32)
    decision = Scheduler(16, 64, 8, 64).plan(
        [seq("b", 200, tenant="b")], [decoding, seq("a", 100, computed=16)], 100, shares=Shares((Key("b", 0),))
    )

    granted = {g.seq.key.request_id: g.num_tokens for g in decision.grants}
    assert granted == {"d": 1, "b": 63}


def test_others_lengthen_a_leaders_step_by_little() -> None:
    """Its own tenant's prompts are not others."""
    shares = Shares((Key("b", 0), Key("a", 0)), beside=lambda tokens, limit: min(limit, tokens // 8))
    alike = [seq("b", 64, tenant="b"), seq("b2", 30, tenant="b")]

    others = Scheduler(16, 256, 8, 256).plan(
        [alike[0], seq("a2", 90)], [seq("a", 100, computed=16)], 100, shares=shares
    )
    own = Scheduler(16, 256, 8, 256).plan(alike, [], 100, shares=shares)

    assert [g.num_tokens for g in others.grants] == [64, 8]
    assert [g.num_tokens for g in own.grants] == [64, 30]


def test_what_is_admitted_first_keeps_its_blocks_from_those_behind_it() -> None:
    """The blocks that its prompt still needs are promised."""
    running = [seq("a", 96, computed=16)]
    waiting = [seq("b", 160, tenant="b"), seq("a2", 64)]

    decision = Scheduler(16, 32, 8, 32).plan(waiting, running, 16, shares=Shares((Key("b", 0), Key("a", 0))))

    assert [key.request_id for key, _ in decision.admit] == ["b"]


def test_what_may_stand_beside_a_prompt_is_measured_in_time() -> None:
    """Many tokens where they cost nothing, few where each counts; all before anything is known."""
    costs = learnt()
    count = costs.beside(64, 256)

    alone = 0.008 + 0.0008 * 64
    assert 0.008 + 0.0008 * (64 + count) == pytest.approx(LENGTHEN * alone, rel=0.05)
    assert learnt(token_s=1e-7).beside(64, 256) == 256
    assert StepCosts().beside(64, 256) == 256


def test_shared_steps_are_as_short_as_they_can_be_at_almost_the_best_rate() -> None:
    """Where tokens cost nothing that is the whole budget."""
    assert learnt().short_chunk(run_work(0, 0), 256) == 64
    assert learnt(token_s=1e-7).short_chunk(run_work(0, 0), 256) == 256
    assert StepCosts().short_chunk(run_work(0, 0), 256) == 256


def test_an_engine_is_shared_while_tenants_come_by_turns() -> None:
    """One alone never shares it, and after a while without another it has it to itself again."""
    fair = Fairness()
    for at in range(5):
        fair.arrived("a", float(at))
    assert not fair.shared(5.0)
    fair.arrived("b", 6.0)

    assert fair.shared(6.0 + SHARED_S - 1)
    assert not fair.shared(6.0 + SHARED_S + 1)


def test_who_comes_back_has_a_credit_that_is_bounded() -> None:
    """However long it was away."""
    fair = Fairness(credit=100.0)
    fair.arrived("a")
    fair.charge("a", 5000)
    fair.arrived("b")

    assert fair.counter("b") == 4900
    assert fair.bound >= 100


def test_a_single_tenants_steps_are_as_large_as_ever(tmp_path: Path) -> None:
    """Turns and short steps are for engines that are shared."""
    largest = {}
    for name, tenants in (("one", "aa"), ("two", "ab")):
        time = Time()
        core = make_core(tmp_path, name=name, num_blocks=128, time=time, scheduler=Scheduler(16, 256, 8, 256))
        core._planner.costs = core.costs = learnt()
        for number in range(8):
            tenant = tenants[number % 2]
            core.add(sequence(f"r{number}", prompt(200, number), max_tokens=1, tenant=tenant, arrival=time.at))
        sizes: list[int] = []
        run(core, each=lambda result, sizes=sizes: sizes.append(result.num_tokens))  # type: ignore[misc]
        largest[name] = max(sizes)

    assert largest == {"one": 256, "two": 64}


@pytest.mark.parametrize("seed", range(6))
def test_service_of_two_that_both_wait_differs_by_no_more_than_what_runs_and_the_credit(
    tmp_path: Path, seed: int
) -> None:
    """Whatever their prompts and answers are, and though one asks for ten times as much."""
    source = random.Random(seed)
    time = Time()
    scheduler = Scheduler(16, 64, 4, 64)
    core = make_core(tmp_path, num_blocks=64, time=time, scheduler=scheduler, tenant_weights={"b": 1.0 + seed % 2})
    longest, answer = 60, 8
    for number in range(88):
        tenant = "b" if number % 11 == 0 else "a"
        ids = prompt(source.randint(20, longest), number)
        core.add(sequence(f"{tenant}{number}", ids, max_tokens=answer, tenant=tenant, arrival=time.at))
    fair = core._roster.fair
    most = scheduler.max_running * (longest + OUTPUT_COST * answer) + 2 * scheduler.token_budget
    widest = 0.0

    def each(_: object) -> None:
        nonlocal widest
        time.at += 0.01
        widest = max(widest, fair.spread)

    run(core, each=each)

    assert 0 < widest <= most
    assert core.statistics()["fair_spread_widest"] <= fair.bound
