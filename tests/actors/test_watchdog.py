"""An engine with work and without steps is wedged, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from virtual_fleet import fleet

from actors.watchdog import Watchdog
from runtime.virtual_clock import VirtualClock, run_virtual


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines run on the loop by design; real time does not pass."""
    yield


def looks(dog: Watchdog, steps: int, busy: bool, start: float, seconds: float, every: float = 0.05) -> bool:
    """Look again and again; returns whether it was found wedged at the end."""
    found = False
    for i in range(round(seconds / every) + 1):
        found = dog.look(steps, busy, start + i * every)
    return found


def test_work_without_a_step_for_the_limit_is_a_wedged_engine() -> None:
    """Not before, and a step begins the time anew."""
    dog = Watchdog(2.0)
    assert not looks(dog, 7, True, 0.0, 1.9)
    assert not looks(dog, 8, True, 1.9, 1.9)
    assert looks(dog, 8, True, 3.8, 0.3)


def test_an_idle_engine_is_never_wedged() -> None:
    """However long it does nothing, and however long it did before work comes."""
    dog = Watchdog(2.0)
    assert not looks(dog, 7, False, 0.0, 60.0)
    assert not looks(dog, 7, True, 60.0, 1.9)


def test_a_pause_of_the_whole_process_is_not_held_against_the_engine() -> None:
    """A node that is stopped for a minute looks again before the engine can have done anything."""
    dog = Watchdog(2.0)
    looks(dog, 7, True, 0.0, 1.0)
    assert not dog.look(7, True, 61.0)


def test_a_long_step_is_no_wedge_and_a_short_ones_absence_is_found_sooner() -> None:
    """The limit follows the longest step that is expected, within a floor and what is configured."""
    dog = Watchdog(120.0)

    assert [dog.limit(longest_s) for longest_s in (0.0, 0.02, 8.0, 60.0)] == [120.0, dog.floor_s, 80.0, 120.0]
    assert Watchdog(5.0).limit(0.02) == 5.0
    looks(dog, 7, True, 0.0, 40.0)
    assert not dog.look(7, True, 40.05, longest_s=8.0)
    assert dog.look(7, True, 40.1, longest_s=0.02)


def test_a_wedged_engine_says_that_it_has_failed_and_its_requests_go_on_elsewhere(tmp_path: Path) -> None:
    """Heartbeats come from another thread, so silence would never tell: the state does, and why."""

    async def main(clock: VirtualClock) -> None:
        async with fleet(clock, tmp_path, prefill=0) as f:
            stream = await f.ask("a wheel " * 10, max_tokens=60)
            await f.items(stream, 5)
            victim = f.actor(f.serving("decode", stream))
            victim._watchdog.limit_s = 2.0
            victim.stepped.frozen = True
            await f.system.until(lambda: victim.state == "failed", limit_s=60.0)
            assert "no step" in victim.reason
            await f.end(stream)
            assert stream.error is None and stream.num_items == 60

    run_virtual(main)
