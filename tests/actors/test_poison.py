"""Requests that kill the engines that run them: what counts against whom, and what others see of it (R12)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_adoption import check
from virtual_fleet import SCRIPT, Fleet, Stream, fleet

from actors.poison import FOR_GOOD, TRIAL_TOKENS, Strikes, alone_until, joined, verdict
from chaos.virtual.engine import Died
from engine.scripted_runner import ScriptedRunner
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas.record import Sampling, Strike

POISON = "a prompt that no engine survives "
DIES_AT = 5

# --- the rule ---------------------------------------------------------------------------------------


def strike(epoch: str, *, alone: bool = False) -> Strike:
    return Strike(epoch=epoch, alone=alone)


@pytest.mark.parametrize(
    ("strikes", "refused"),
    [
        ([], False),
        ([strike("a")], False),
        ([strike("a", alone=True)], False),  # any machine may break down once
        ([strike("a"), strike("b")], False),  # beside somebody else, both times
        ([strike("a", alone=True), strike("b")], False),
        ([strike("a"), strike("b", alone=True)], True),
        ([strike("a"), strike("b"), strike("c", alone=True)], True),
    ],
)
def test_only_a_second_death_in_a_step_of_its_own_refuses_a_request(strikes: list[Strike], refused: bool) -> None:
    """R12. Scenario: an innocent request was beside two that kill; it must never be taken for one of them."""
    found = verdict(strikes)

    assert (found is not None) == refused
    assert found is None or (found.code, found.status) == ("request_poisoned", 422)


def test_a_suspect_is_apart_until_it_is_past_the_place_and_after_another_strike_for_good() -> None:
    """R12. Scenario: sixteen streams of one dead engine, served one by one for their whole length."""
    assert alone_until([], 100) == 0
    assert alone_until([strike("a")], 100) == 100 + TRIAL_TOKENS
    assert alone_until([strike("a"), strike("b")], 100) == FOR_GOOD


def test_a_death_that_is_heard_of_twice_is_one_strike() -> None:
    """R12. Scenario: the supervisor repeats its notice, and the record of a dead owner tells of the same death."""
    strikes = Strikes()

    assert strikes.crashed("a", ["r", "s", "r"]) == ["r", "s"]
    assert strikes.crashed("a", ["r", "s"]) == []
    assert strikes.crashed("b", ["r"]) == ["r"]

    assert strikes.of("r") == [strike("a"), strike("b", alone=True)]
    assert joined([strike("a")], strikes.of("r")) == strikes.of("r")
    assert strikes.of("unheard of") == []


def test_what_is_remembered_of_crashes_has_a_cap() -> None:
    """R12. Scenario: a day of crashes, with other requests each."""
    strikes = Strikes()
    for number in range(200):
        strikes.crashed(str(number), [f"{number}-{i}" for i in range(64)])

    assert len(strikes) == 4096
    assert strikes.of("199-63") and not strikes.of("0-0")


# --- whole instances in virtual time ----------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, dies: Any = None, **layout: int) -> Any:
    """Run `scenario(fleet)`; `dies(fleet, prompt, index)` says whether the engine goes down with this id."""
    made: list[Fleet] = []

    def script(prompt: list[int], choice: int, index: int, sampling: Sampling) -> int:
        if bytes(prompt).startswith(POISON.encode()) and (dies(made[0], index) if dies else index >= DIES_AT):
            raise Died
        return SCRIPT(prompt, choice, index, sampling)

    async def main(clock: VirtualClock) -> Any:
        async with fleet(
            clock, directory, whole_below=10_000, make_runner=lambda: ScriptedRunner(script), **layout
        ) as f:
            made.append(f)
            return await scenario(f)

    return run_virtual(main)


def counter(f: Fleet, name: str) -> int:
    """A counter's sum over all nodes that live."""
    lines = [
        line for n, node in f.nodes.items() if not f.system.is_gone(n) for line in node.telemetry.render().splitlines()
    ]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"headrace_{name}")))


def prompts(count: int) -> list[str]:
    return [f"stream {n} of those that did nothing wrong, " * 3 for n in range(count)]


def test_a_request_that_kills_is_refused_after_two_engines_and_the_others_go_on(tmp_path: Path) -> None:
    """R12. Scenario: a request kills the engine that it is sent to after each failover, until its deadline."""

    async def scenario(f: Fleet) -> None:
        said = prompts(8)
        streams = [await f.ask(prompt, max_tokens=120) for prompt in said]
        for stream in streams:
            await f.items(stream, 10)
        poison = await f.ask(POISON, max_tokens=50)
        await f.end(poison)
        for stream, prompt in zip(streams, said, strict=True):
            await f.end(stream)
            check(stream, prompt, 120)

        assert (poison.error, poison.num_items) == ("request_poisoned", DIES_AT)
        (_, first), (_, second) = f.crashes
        assert poison.request_id in first and len(first) > 1
        assert second == (poison.request_id,)
        assert counter(f, "requests_poisoned_total") == 1
        assert counter(f, "request_strikes_total") == len(first) + 1
        await f.rest()

    simulate(scenario, tmp_path)


def test_suspects_do_not_wait_for_each_other_to_the_end(tmp_path: Path) -> None:
    """R12. Scenario: after a crash its streams run one by one, the last of them after all the others."""

    async def run(f: Fleet, poisoned: bool) -> float:
        began = f.system.clock.now()
        streams = [await f.ask(prompt, max_tokens=200) for prompt in prompts(16)]
        for stream in streams:
            await f.items(stream, 10)
        if poisoned:
            await f.end(await f.ask(POISON, max_tokens=50))
        for stream in streams:
            await f.end(stream)
        return f.system.clock.now() - began

    calm = simulate(lambda f: run(f, False), tmp_path)
    took = simulate(lambda f: run(f, True), tmp_path)

    assert took < 3 * calm  # one by one would be eight times as long and more


def test_a_kill_from_outside_is_held_against_nobody(tmp_path: Path) -> None:
    """R12. Scenario: engines are killed, frozen and drained by operators; no request may be suspected for that."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(prompts(1)[0], max_tokens=100)
        for count in (10, 30, 50):
            await f.items(stream, count)
            await f.kill(f.serving("decode", stream))
        await f.end(stream)
        check(stream, prompts(1)[0], 100)
        assert counter(f, "request_strikes_total") == 0

    simulate(scenario, tmp_path)


@pytest.mark.parametrize("before", [True, False])
def test_the_strike_of_an_engine_that_dies_with_the_owner_counts(before: bool, tmp_path: Path) -> None:
    """R12, R2. Scenario: owner and engine die together; whoever adopts the request gives it a clean record."""

    async def scenario(f: Fleet) -> None:
        poison = await f.ask(POISON, max_tokens=50)
        await f.items(poison, DIES_AT - 1 if before else DIES_AT)
        if not before:
            await f.system.until(lambda: bool(f.crashes))
        await f.kill(f.serving("admission", poison))
        await f.end(poison)
        assert poison.error == "request_poisoned"
        assert len(f.crashes) == 2
        await f.rest()

    simulate(scenario, tmp_path)


def test_strikes_travel_with_the_record(tmp_path: Path) -> None:
    """R12, R2. Scenario: the adopter has started after the first death, and knows of it by the record alone."""

    def dies(f: Fleet, index: int) -> bool:
        return index >= 150 or (index >= DIES_AT and not f.crashes)

    async def scenario(f: Fleet) -> None:
        poison = await f.ask(POISON, max_tokens=190)
        await f.items(poison, DIES_AT + 10)
        owner = f.serving("admission", poison)
        other = "admission-1" if owner == "admission-0" else "admission-0"
        await f.kill(other)
        await f.system.until(lambda: f.actor(other).statistics()["records_held"] == 1)
        assert poison.terminal is None and len(f.crashes) == 1
        await f.kill(owner)
        await f.end(poison)
        assert poison.error == "request_poisoned"
        assert [computing for _, computing in f.crashes] == [(poison.request_id,)] * 2

    simulate(scenario, tmp_path, dies)


def test_a_request_that_kills_now_and_then_takes_three_engines_at_most(tmp_path: Path) -> None:
    """R12. Scenario: it survives the steps of its own each time, and kills later on, among others."""

    def dies(f: Fleet, index: int) -> bool:
        return index >= 20 * (len(f.crashes) + 1)

    async def scenario(f: Fleet) -> None:
        said = prompts(4)
        streams = [await f.ask(prompt, max_tokens=200) for prompt in said]
        poison: Stream = await f.ask(POISON, max_tokens=190)
        await f.end(poison)
        for stream, prompt in zip(streams, said, strict=True):
            await f.end(stream)
            check(stream, prompt, 200)
        assert poison.error == "request_poisoned"
        assert len(f.crashes) <= 3
        assert f.crashes[-1][1] == (poison.request_id,)

    simulate(scenario, tmp_path, dies, decode=1)
