"""Rebalancing: somebody waits at a full engine while another one is idle, and only then does a request move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import answer, fleet

from actors.rebalance import EVERY_S, HOLD_S, REST_S, Rebalance, Rebalancer
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas.subjects import Ref

A, B = Ref("decode", "a", "1" * 16), Ref("decode", "b", "2" * 16)
PROMPT = "the water that turns the wheel comes down the headrace " * 2


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines run on the loop by design; real time does not pass."""
    yield


@dataclass(frozen=True)
class Member:
    ref: Ref
    load: dict[str, Any] = field(default_factory=dict)


def mine() -> list[tuple[str, Ref]]:
    """This owner's requests, oldest first."""
    return [("old", A), ("young", A), ("elsewhere", B)]


def engine(ref: Ref, **load: int) -> Member:
    """A member with room for four."""
    return Member(ref, {"max_running": 4, "free_blocks": 500, "total_blocks": 512, **load})


FULL = engine(A, running=4, waiting=2)


def test_the_youngest_request_of_a_full_engine_moves_to_an_idle_one() -> None:
    """Once that has lasted; then one move at a time, and none of the same request soon."""
    policy = Rebalancer()
    engines = [FULL, engine(B)]

    assert policy.decide(engines, mine, 10.0) is None
    assert policy.decide(engines, mine, 10.0 + HOLD_S / 2) is None
    assert policy.decide(engines, mine, 10.0 + HOLD_S) == Rebalance("young", B)
    assert policy.decide(engines, mine, 10.0 + HOLD_S + EVERY_S / 2) is None
    assert policy.decide(engines, mine, 10.0 + HOLD_S + EVERY_S) == Rebalance("old", B)
    assert policy.decide(engines, mine, 12.0 + HOLD_S) is None
    assert policy.decide(engines, mine, 10.0 + HOLD_S + REST_S) == Rebalance("young", B)


@pytest.mark.parametrize(
    "engines",
    [
        [engine(A, running=4), engine(B)],
        [engine(A, running=3, waiting=2), engine(B)],
        [FULL, engine(B, running=1)],
        [FULL, engine(B, expected=1)],
        [FULL, Member(B)],
        [FULL],
    ],
    ids=["nobody waits", "a prompt waits for its turn", "the other works", "one is on its way", "not heard", "alone"],
)
def test_nothing_moves_where_it_would_not_pay(engines: list[Member]) -> None:
    """However long it lasts."""
    policy = Rebalancer()
    assert all(policy.decide(engines, mine, 10.0 + 0.5 * i) is None for i in range(20))


def test_blocks_that_ran_out_count_like_slots() -> None:
    """A queue behind sequences that fill the pool."""
    policy = Rebalancer()
    engines = [engine(A, running=3, waiting=1, free_blocks=8), engine(B)]
    policy.decide(engines, mine, 0.0)
    assert policy.decide(engines, mine, HOLD_S) == Rebalance("young", B)


def test_a_moment_of_balance_begins_the_wait_anew() -> None:
    """Engines that come and go with each heartbeat are no reason to move."""
    policy = Rebalancer()
    for i in range(20):
        engines = [FULL, engine(B, running=i % 2)]
        assert policy.decide(engines, mine, 0.6 * i) is None


@pytest.mark.slow
def test_an_engine_that_joins_takes_running_requests_over(tmp_path: Path) -> None:
    """Sixteen run and four wait at the only engine when a second one comes; all texts are the undisturbed ones."""

    async def main(clock: VirtualClock) -> None:
        async with fleet(clock, tmp_path, prefill=0, decode=1, whole_below=10_000) as f:
            streams = [await f.ask(PROMPT + str(i), max_tokens=160) for i in range(20)]
            await f.items(streams[0], 10)
            await f.system.start(f.make("decode", 1))
            for i, stream in enumerate(streams):
                await f.end(stream)
                assert stream.error is None and stream.text == answer(PROMPT + str(i), 160)
            moved = 0.0
            for name in ("admission-0", "admission-1"):
                moved += f.actor(name)._moves.labels("balance", "moved")._value.get()
            assert moved >= 1
            await f.rest()

    run_virtual(main)
