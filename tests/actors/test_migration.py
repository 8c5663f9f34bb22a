"""Live migration in virtual time: a running request changes its engine, and nobody can tell from its text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import PACE_S, Fleet, Stream, answer, fleet

from runtime.memory_bus import Faults
from runtime.virtual_clock import VirtualClock, run_virtual

PROMPT = "the water that turns the wheel comes down the headrace " * 4
LONG = PROMPT * 5
COUNT = 80


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0, **layout: int) -> None:
    """Run `scenario(fleet)` on a fresh instance with two decode engines."""

    async def main(clock: VirtualClock) -> None:
        async with fleet(clock, directory, whole_below=10_000, **{"prefill": 0, **layout}) as f:
            await scenario(f)

    run_virtual(main, seed=seed)


def check(stream: Stream, prompt: str, count: int) -> None:
    """The stream is the undisturbed one."""
    assert stream.error is None, stream.terminal
    assert stream.text == answer(prompt, count)
    assert stream.finish == {0: "length"}


def other(f: Fleet, name: str) -> str:
    """The other decode engine."""
    return "decode-1" if name == "decode-0" else "decode-0"


def move(f: Fleet, stream: Stream) -> tuple[str, str]:
    """Have the owner move a request to the other engine; returns the names of both."""
    source = f.serving("decode", stream)
    owner = f.actor(f.serving("admission", stream))
    to = f.actor(other(f, source)).ref
    owner._perform(owner._table.move(stream.request_id, to, "balance", f.system.clock.now()))
    return source, other(f, source)


def outcomes(f: Fleet) -> dict[str, int]:
    """How moves ended, as their owners say."""
    out: dict[str, int] = {}
    for name in ("admission-0", "admission-1"):
        for metric in f.actor(name)._moves.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    outcome = sample.labels["outcome"]
                    out[outcome] = out.get(outcome, 0) + int(sample.value)
    return out


async def longest_gap(f: Fleet, stream: Stream, upto: int) -> float:
    """The longest time between two items of a running stream until it has `upto`."""
    clock = f.system.clock
    last, have, longest = clock.now(), stream.num_items, 0.0
    while stream.num_items < upto:
        await clock.sleep(0.001)
        if stream.num_items > have:
            longest = max(longest, clock.now() - last)
            last, have = clock.now(), stream.num_items
        assert clock.now() - last < 30.0
    return longest


def test_a_moved_request_goes_on_after_at_most_two_steps(tmp_path: Path) -> None:
    """A thousand tokens of context: nothing is computed again, the pause is two steps at most, the text is the same."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(LONG, max_tokens=COUNT)
        await f.items(stream, 20)
        source, to = move(f, stream)
        computed = f.actor(to).stepped.core.statistics()["tokens_total"]
        gap = await longest_gap(f, stream, 60)
        assert f.serving("decode", stream) == to
        assert not f.actor(source).works
        await f.end(stream)
        check(stream, LONG, COUNT)
        assert gap <= 3 * PACE_S + 0.002  # one step is the usual distance of two items
        assert f.actor(to).stepped.core.statistics()["tokens_total"] - computed <= COUNT
        assert outcomes(f) == {"moved": 1}
        await f.rest()

    simulate(scenario, tmp_path)


def wasted(f: Fleet, name: str) -> dict[str, int]:
    """Tokens that an engine counts as computed in vain, by cause and phase."""
    out: dict[str, int] = {}
    for metric in f.actor(name).waste._tokens.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total") and sample.value:
                out[f"{sample.labels['cause']} {sample.labels['phase']}"] = int(sample.value)
    return out


def test_an_owners_word_that_a_request_runs_elsewhere_ends_its_move(tmp_path: Path) -> None:
    """Scenario: the destination's `Activated` is lost; the source would take its move back, and end what runs there."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(LONG, max_tokens=COUNT)
        await f.items(stream, 20)
        source, to = move(f, stream)
        f.actor(source).migration.on_activated = lambda message: message.part == -1
        await f.system.until(lambda: outcomes(f) == {"moved": 1}, limit_s=2.0)
        gap = await longest_gap(f, stream, 70)
        assert f.serving("decode", stream) == to and gap <= 3 * PACE_S + 0.002
        assert wasted(f, source) == {}
        await f.end(stream)
        check(stream, LONG, COUNT)
        assert wasted(f, to) == {}
        await f.rest()

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_what_a_prefill_engine_computed_is_not_wasted_by_a_failure_after_the_hand_off(tmp_path: Path) -> None:
    """It still has the prompt's blocks for the next try; the ids that were decoded are computed again."""

    async def main(clock: VirtualClock) -> None:
        async with fleet(clock, tmp_path) as f:
            stream = await f.ask(PROMPT, max_tokens=200)
            await f.items(stream, 20)
            frozen = f.serving("decode", stream)
            f.freeze(frozen)
            await clock.sleep(2.5)
            f.thaw(frozen)
            await f.system.until(lambda: not f.actor(frozen).works, limit_s=2.0)
            assert list(wasted(f, frozen)) == ["redispatched decode"]
            serving = f.serving("decode", stream)
            have = stream.num_items
            await f.items(stream, have + 10)
            f.cancel(stream)
            await f.rest()
            gone = wasted(f, serving)
            assert gone["cancelled prefill"] <= len(PROMPT) and 10 <= gone["cancelled decode"] <= 200 - have
            assert "redispatched prefill" not in wasted(f, "prefill-0")

    run_virtual(main)


def test_choices_move_together(tmp_path: Path) -> None:
    """Three choices of one prompt share its blocks, and the first ids under the new fence end the old engine's work."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(LONG, max_tokens=COUNT, n=3)
        await f.items(stream, 60)
        _, to = move(f, stream)
        await f.end(stream)
        assert stream.error is None
        for choice in range(3):
            assert "".join(stream.texts[choice]) == answer(LONG, COUNT, choice=choice)
        assert outcomes(f) == {"moved": 1}
        await f.rest()

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["source", "destination", "transfer", "detokenize", "admission"])
def test_a_death_in_the_middle_of_a_move_changes_no_text(victim: str, tmp_path: Path) -> None:
    """Every few milliseconds of a move each of those who take part dies once."""
    for tick in range(10):
        directory = tmp_path / str(tick)
        directory.mkdir()

        async def scenario(f: Fleet, tick: int = tick) -> None:
            stream = await f.ask(LONG, max_tokens=COUNT)
            await f.items(stream, 20)
            source, to = move(f, stream)
            await f.system.clock.sleep(0.004 * tick)
            names = {"source": source, "destination": to, "transfer": "transfer-0"}
            await f.kill(names.get(victim) or f.serving(victim, stream))
            await f.end(stream)
            check(stream, LONG, COUNT)
            await f.rest(limit_s=6.0)

        simulate(scenario, directory, seed=tick)


@pytest.mark.slow
def test_a_cancel_at_any_moment_of_a_move_leaves_nothing_anywhere(tmp_path: Path) -> None:
    """Blocks at both ends come back."""
    for tick in range(12):
        directory = tmp_path / str(tick)
        directory.mkdir()

        async def scenario(f: Fleet, tick: int = tick) -> None:
            stream = await f.ask(LONG, max_tokens=COUNT)
            await f.items(stream, 20)
            move(f, stream)
            await f.system.clock.sleep(0.003 * tick)
            f.cancel(stream)
            await f.rest(limit_s=6.0)

        simulate(scenario, directory, seed=tick)


@pytest.mark.slow
def test_moves_back_and_forth_with_lost_messages_change_no_text(tmp_path: Path) -> None:
    """5 % of all messages are lost, and the requests are moved again and again."""

    async def scenario(f: Fleet) -> None:
        streams = [await f.ask(LONG + str(i), max_tokens=200) for i in range(4)]
        for stream in streams:
            await f.items(stream, 5)
        f.system.broker.faults["outside"] = Faults()
        f.system.broker.default_faults = Faults(drop=0.05)
        for _ in range(8):
            for stream in streams:
                if stream.terminal is None:
                    move(f, stream)
            await f.system.clock.sleep(0.4)
        f.system.broker.default_faults = Faults()
        for i, stream in enumerate(streams):
            await f.end(stream)
            check(stream, LONG + str(i), 200)
        assert outcomes(f).get("moved", 0) >= 8
        await f.rest(limit_s=8.0)

    simulate(scenario, tmp_path)


def test_a_draining_engine_moves_its_requests_and_leaves(tmp_path: Path) -> None:
    """All that it runs goes on elsewhere without being computed again; what is in its prompt waits until it can."""

    async def scenario(f: Fleet) -> None:
        streams = [await f.ask(LONG + str(i), max_tokens=200) for i in range(4)]
        for stream in streams:
            await f.items(stream, 5)
        node = f.nodes["decode-0"]
        node.request_drain()
        began = f.system.clock.now()
        assert await node.wait() == 0
        assert f.system.clock.now() - began < 2.0
        await node.stop()
        f.system._slots["decode-0"].gone = True
        assert outcomes(f).get("moved", 0) >= 1
        for i, stream in enumerate(streams):
            await f.end(stream)
            check(stream, LONG + str(i), 200)
        await f.rest()

    simulate(scenario, tmp_path)


def test_the_only_engine_finishes_what_it_runs_before_it_leaves(tmp_path: Path) -> None:
    """Nobody can take it over, and there is time."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.items(stream, 5)
        f.nodes["decode-0"].request_drain()
        await f.end(stream)
        check(stream, PROMPT, COUNT)
        assert await f.nodes["decode-0"].wait() == 0

    simulate(scenario, tmp_path, decode=1)
