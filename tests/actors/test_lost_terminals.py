"""A terminal that is lost is sent again, whatever else the client has acknowledged meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, Stream, answer, fleet

from runtime.bus import BusMessage
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import subjects
from schemas.subjects import Ref

PROMPT = "the water that turns the wheel "


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Engines and executors run on the loop by design; real time does not pass."""
    yield


class Lossy:
    """A client that does not get the first terminals, and goes on saying what it has."""

    def __init__(self, f: Fleet, lose: int) -> None:
        self.lost = 0
        self._fleet, self._lose, self._take = f, lose, f._take
        f._take = self.take  # type: ignore[method-assign]  # this client stands before the usual one

    def take(self, stream: Stream, message: BusMessage) -> None:
        frame = json.loads(message.payload) if message.payload else {}
        if "terminal" in frame and self.lost < self._lose:
            self.lost += 1
            for key in ("terminal", "finish"):
                frame.pop(key, None)
            self._fleet._ack(stream, done=False)  # on the subject of the frame before it
            return
        self._take(stream, message)


def simulate(scenario: Any, directory: Path) -> None:
    """Run `scenario(fleet)` on a fresh instance."""

    async def main(clock: VirtualClock) -> None:
        async with fleet(clock, directory) as f:
            await scenario(f)

    run_virtual(main)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 30])
def test_a_client_with_all_items_still_gets_its_terminal(count: int, tmp_path: Path) -> None:
    """Scenario: the last item arrives, the terminal after it does not, and the client acknowledges all items."""

    async def scenario(f: Fleet) -> None:
        lossy = Lossy(f, 2)
        stream = await f.ask(PROMPT, max_tokens=count)
        await f.end(stream, limit_s=10.0)
        assert lossy.lost == 2
        assert stream.text == answer(PROMPT, count)
        assert stream.finish == {0: "length"}
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_lost_word_of_the_deadline_is_repeated(tmp_path: Path) -> None:
    """Scenario: the stream ends at its deadline, all items were acknowledged, and the word of it is lost."""

    async def scenario(f: Fleet) -> None:
        lossy = Lossy(f, 1)
        stream = await f.ask(PROMPT, max_tokens=2000, deadline_s=1.0)
        await f.end(stream, limit_s=5.0)
        assert lossy.lost == 1
        assert stream.error == "deadline_exceeded"
        assert stream.ended_at - stream.asked_at <= 2.0
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_deadline_that_passes_while_the_bus_is_away_is_told_when_it_is_back(tmp_path: Path) -> None:
    """Scenario: the bus goes just before a stream's deadline, and comes back more than a second after it."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=2000, deadline_s=1.0)
        await f.system.clock.sleep(0.95)
        buses = [f.system.outside, *f.system.buses()]
        for bus in buses:
            bus.disconnect()
        await f.system.clock.sleep(2.0)
        for bus in buses:
            bus.reconnect()
        await f.end(stream, limit_s=1.0)
        assert stream.error == "deadline_exceeded"
        await f.rest(limit_s=8.0)

    simulate(scenario, tmp_path)


def test_the_terminal_has_a_subject_of_its_own() -> None:
    """Both are taken by the one wildcard, and tell whom they are about."""
    ref = Ref("detokenize", "0", "0123456789abcdef")

    assert subjects.acked(subjects.ack(ref, "5f0c")) == ("5f0c", False)
    assert subjects.acked(subjects.ack(ref, "5f0c", end=True)) == ("5f0c", True)
    assert subjects.acks_of(ref).removesuffix("*") == subjects.ack(ref, "5f0c", end=True).removesuffix("5f0c-end")
