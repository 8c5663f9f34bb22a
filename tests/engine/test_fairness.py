"""Tenants share an engine by virtual token counters: nobody banks credit, nobody starves, classes come first."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Time, make_core, prompt, run, sequence

from engine.fairness import MAX_TENANTS, OUTPUT_COST, Fairness
from engine.scheduler import Scheduler
from engine.sequence import Key


def test_service_is_charged_by_tokens_and_weight() -> None:
    """Output tokens cost twice; a tenant of weight 4 pays a quarter."""
    fair = Fairness({"big": 4.0})
    for tenant in ("big", "small"):
        fair.arrived(tenant)
    for tenant in ("big", "small"):
        fair.charge(tenant, 100, 10)

    assert fair.counter("small") == 100 + OUTPUT_COST * 10
    assert fair.counter("big") == fair.counter("small") / 4


def test_a_tenant_that_comes_back_from_idle_has_banked_nothing() -> None:
    """It is lifted to the lowest of those that wait; with nobody there, to the last one that waited."""
    fair = Fairness()
    fair.arrived("a")
    fair.charge("a", 1000)
    fair.arrived("b")

    assert fair.counter("b") == fair.counter("a") == 1000
    fair.left("b")
    fair.charge("a", 500)
    fair.left("a")
    fair.arrived("b")
    assert fair.counter("b") == 1500


def test_a_debt_is_not_forgiven_by_going_away() -> None:
    """A counter that is above the others stays where it is."""
    fair = Fairness()
    fair.arrived("a")
    fair.charge("a", 1000)
    fair.left("a")
    fair.arrived("b")
    fair.counter("b")
    fair.charge("b", -fair.counter("b") + 10)

    fair.arrived("a")

    assert fair.counter("a") == 1000


def test_the_table_of_tenants_is_bounded() -> None:
    """Of those that do not wait, the one with the least service is forgotten."""
    fair = Fairness()
    for number in range(MAX_TENANTS + 50):
        fair.arrived(f"t{number}")
        fair.charge(f"t{number}", 10)
        fair.left(f"t{number}")

    assert fair.statistics()["fair_tenants"] == MAX_TENANTS


def test_a_weight_that_is_not_positive_is_refused() -> None:
    """It would stop the tenant for ever, or divide by nothing."""
    with pytest.raises(ValueError, match="positive"):
        Fairness({"a": 0.0})


def started(core: object, time: Time) -> list[str]:
    """Run a core to its end; returns the requests in the order of their first ids."""
    order: list[str] = []

    def each(result: object) -> None:
        time.at += 0.01
        for item in result.items:  # type: ignore[attr-defined]
            if item.index == 0:
                order.append(item.key.request_id)

    run(core, each=each)  # type: ignore[arg-type]
    return order


def test_one_tenants_flood_does_not_keep_another_waiting(tmp_path: Path) -> None:
    """Twenty prompts of one wait; two of another come later and take turns with them."""
    time = Time()
    core = make_core(tmp_path, time=time, scheduler=Scheduler(16, 48, 2, 48))
    for number in range(20):
        core.add(sequence(f"a{number}", prompt(40, number), max_tokens=4, tenant="a", arrival=time.at))
    for number in range(2):
        core.add(sequence(f"b{number}", prompt(40, 50 + number), max_tokens=4, tenant="b", arrival=time.at + 1))

    order = started(core, time)

    assert max(order.index("b0"), order.index("b1")) < 6, order
    assert [name for name in order if name.startswith("a")] == [f"a{number}" for number in range(20)]


def test_weights_share_service(tmp_path: Path) -> None:
    """While both wait, a tenant of weight 3 starts about three times as often."""
    time = Time()
    core = make_core(tmp_path, time=time, scheduler=Scheduler(16, 48, 2, 48), tenant_weights={"a": 3.0})
    for number in range(16):
        for at, tenant in enumerate("ab"):
            ids = prompt(40, number * 2 + at)
            core.add(sequence(f"{tenant}{number}", ids, max_tokens=4, tenant=tenant, arrival=time.at))

    order = started(core, time)

    first = [name[0] for name in order[:16]]
    assert 11 <= first.count("a") <= 13, order


def test_a_better_class_goes_first_whoevers_it_is(tmp_path: Path) -> None:
    """Among tenants the class decides, then the counter; what has waited long counts as a better class."""
    time = Time()
    core = make_core(tmp_path, time=time, scheduler=Scheduler(16, 48, 1, 48, aging_s=10.0))
    core.add(sequence("batch-b", prompt(40, 1), max_tokens=2, tenant="b", arrival=time.at, priority=2))
    core.add(sequence("old-c", prompt(40, 2), max_tokens=2, tenant="c", arrival=time.at - 25.0, priority=2))
    for number in range(3):
        ids = prompt(40, 10 + number)
        core.add(sequence(f"a{number}", ids, max_tokens=2, tenant="a", arrival=time.at))

    order = started(core, time)

    assert order.index("old-c") < 2, order
    assert order[-1] == "batch-b", order


def test_counters_of_those_who_wait_stay_within_the_bound(tmp_path: Path) -> None:
    """One offers ten times what the other does; both wait, and neither gets ahead by more than the bound."""
    time = Time()
    core = make_core(tmp_path, time=time, num_blocks=32, scheduler=Scheduler(16, 64, 4, 48))
    for number in range(60):
        core.add(sequence(f"a{number}", prompt(40, number), max_tokens=8, tenant="a", arrival=time.at))
    for number in range(6):
        core.add(sequence(f"b{number}", prompt(40, 70 + number), max_tokens=8, tenant="b", arrival=time.at))

    started(core, time)
    found = core.statistics()

    assert 0 < found["fair_spread_widest"] <= found["fair_spread_bound"]
    assert found["fair_spread_widest"] < 300, "far less than a queue of sixty prompts"


def test_a_hand_off_leaves_room_for_whose_turn_it_is(tmp_path: Path) -> None:
    """Not for whoever came first: a stream of hand-offs would keep the one whose turn it is waiting for ever."""
    time = Time()
    core = make_core(tmp_path, num_blocks=20, time=time)
    held = core.reserve(Key("running", 0), 160)  # ten blocks
    assert held is not None
    core.add(sequence("a", prompt(30, 1), max_tokens=2, tenant="a", arrival=time.at))
    core.add(sequence("b", prompt(120, 2), max_tokens=2, tenant="b", arrival=time.at + 1))
    core._roster.fair.charge("a", 5000)  # what it has had already

    assert core.reserve(Key("new", 0), 64) is None  # four, and eight for b
    assert core.reserve(Key("small", 0), 16) is not None
