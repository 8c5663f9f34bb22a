"""Between prefill and decode: cancels, deaths, damage and doubled notes while a hand-off is under way.

Transfers are slowed so that each moment lasts. In virtual time: real actors, scripted engines that check each block.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, Stream, answer, fleet

from actors import transfer as transfer_module
from actors.transfer import TransferActor
from kvstore import handoff
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import messages as m

PROMPT = "the water that turns the wheel comes down the headrace " * 12  # five steps of prefill
COUNT = 20
SLOW_S = 0.3


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


@pytest.fixture(autouse=True)
def slow_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job takes its time before it moves a byte."""
    real = TransferActor._run

    async def slowly(self: TransferActor, running: Any) -> None:
        await self.clock.sleep(SLOW_S)
        await real(self, running)

    monkeypatch.setattr(TransferActor, "_run", slowly)


def simulate(scenario: Any, directory: Path, *, seed: int = 0) -> Any:
    """Run `scenario(fleet)` on an instance with one prefill and two decode engines, every hop used."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory) as f:
            return await scenario(f)

    return run_virtual(main, seed=seed)


def held(f: Fleet) -> int:
    """Prompts that are computed and wait for their hand-off."""
    return int(f.actor("prefill-0").stepped.core.load().get("held", 0))


def copying(f: Fleet) -> int:
    """Jobs that the transfer actor has in hand."""
    return int(f.actor("transfer-0").load()["running"])


async def placed(f: Fleet, stream: Stream) -> None:
    await f.system.until(lambda: bool(f.actor("prefill-0").works), limit_s=2.0)


async def computing(f: Fleet, stream: Stream) -> None:
    core = f.actor("prefill-0").stepped.core
    await f.system.until(lambda: core.load()["running"] > 0, limit_s=2.0)


async def computed(f: Fleet, stream: Stream) -> None:
    """Decode has not heard of it: what the prefill engine sends there is lost."""
    for number in range(2):
        f.system.broker.partition(f"decode-{number}-control", "prefill-0-control")
    await f.system.until(lambda: held(f) > 0, limit_s=2.0)


async def moving(f: Fleet, stream: Stream) -> None:
    await f.system.until(lambda: copying(f) > 0, limit_s=2.0)


async def started(f: Fleet, stream: Stream) -> None:
    await f.items(stream, 1)


MOMENTS = [placed, computing, computed, moving, started]


async def ordinary(f: Fleet, label: str) -> float:
    """Send some requests at once and check them; returns how long they took."""
    began = f.system.clock.now()
    prompts = [f"{label} {number} {PROMPT}" for number in range(4)]
    streams = [await f.ask(prompt, max_tokens=COUNT) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        await f.end(stream)
        assert stream.error is None and stream.text == answer(prompt, COUNT)
    took = f.system.clock.now() - began
    await f.rest()
    return took


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cancel_in_the_gap_gives_everything_back_within_a_second(
    moment: Callable[[Fleet, Stream], Awaitable[None]], tmp_path: Path
) -> None:
    """Two hundred times at one moment: blocks of both sides come back, and the next requests are as quick as before."""

    async def scenario(f: Fleet) -> None:
        before = await ordinary(f, "before")
        for number in range(200):
            stream = await f.ask(f"{number} {PROMPT}", max_tokens=400)
            await moment(f, stream)
            f.cancel(stream)
            f.system.broker.heal()
            await f.rest(limit_s=1.0)
        assert await ordinary(f, "after") <= before / 0.95

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cancel_that_is_lost_on_its_way_is_said_again(
    moment: Callable[[Fleet, Stream], Awaitable[None]], tmp_path: Path
) -> None:
    """Its owner reaches no engine for a second, then everything comes back within another one."""

    async def scenario(f: Fleet) -> None:
        for number in range(10):
            stream = await f.ask(f"{number} {PROMPT}", max_tokens=400)
            await moment(f, stream)
            for light in ("light-0", "light-1", *(f"{kind}-{n}" for kind in LIGHT for n in range(2))):
                for engine in ("prefill-0", "decode-0", "decode-1"):
                    f.system.broker.partition(f"{light}-control", f"{engine}-control")
                    f.system.broker.partition(f"{light}-stream", f"{engine}-stream")
            f.cancel(stream)
            await f.system.clock.sleep(1.0)
            f.system.broker.heal()
            await f.rest(limit_s=1.5)
            await f.system.clock.sleep(0.5)  # those that could not be heard are heard again
        await ordinary(f, "after")

    simulate(scenario, tmp_path)


LIGHT = ("admission", "tokenize", "detokenize")


@pytest.mark.slow
@pytest.mark.parametrize("moment", [placed, computing, moving, "copied"])
def test_a_transfer_that_will_not_come_is_computed_elsewhere(moment: Any, tmp_path: Path) -> None:
    """The prefill engine is killed: the receiver's blocks come back, the text is the same, nothing comes twice."""

    async def scenario(f: Fleet) -> None:
        for number in range(8):
            prompt = f"{number} {PROMPT}"
            if moment == "copied":
                # The last block is there; the note that says so is lost with its sender.
                for decode in range(2):
                    f.system.broker.partition(f"decode-{decode}-control", "transfer-0-control")
            stream = await f.ask(prompt, max_tokens=COUNT)
            if moment == "copied":
                await moving(f, stream)
                await f.system.until(lambda: copying(f) == 0, limit_s=2.0)
            else:
                await moment(f, stream)
            await f.kill("prefill-0", again_after_s=0.3)
            f.system.broker.heal()
            await f.end(stream)
            assert stream.error is None and stream.text == answer(prompt, COUNT)
            assert stream.num_items == COUNT and stream.later_terminals == 0
            await f.rest(limit_s=3.0)

    simulate(scenario, tmp_path)


def test_a_block_that_is_damaged_on_its_way_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit of the copy flips before it is verified: the hand-off is tried again, the text is the same."""
    real, flipped = handoff.checksum, 0

    def checksum(block: memoryview) -> int:
        nonlocal flipped
        if "-decode-" in str(owners.get(id(block.obj), "")) and not flipped:
            block[100] ^= 16
            flipped += 1
        return real(block)

    owners: dict[int, str] = {}

    def attach(handle: m.PoolHandle) -> Any:
        pool = attached(handle)
        owners[id(pool.view().obj)] = handle.path
        return pool

    attached = transfer_module.open_pool
    monkeypatch.setattr(transfer_module, "open_pool", attach)
    monkeypatch.setattr(handoff, "checksum", checksum)

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.end(stream)
        assert stream.error is None and stream.text == answer(PROMPT, COUNT)
        await f.rest()
        assert flipped == 1

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_notes_that_come_twice_or_late_change_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Transferred` and `TransferDone` are sent again at random moments, also when the request is long over."""
    draw, real = random.Random(seed), TransferActor._answer

    def again(self: TransferActor, job: str, to: list[Any]) -> None:
        real(self, job, to)

        async def later() -> None:
            await self.clock.sleep(draw.choice((0.0, 0.05, 0.3, 1.0)))
            if job in self._over:
                real(self, job, to)

        for _ in range(2):
            self.context.spawn(later(), name="say it again")

    monkeypatch.setattr(TransferActor, "_answer", again)

    async def scenario(f: Fleet) -> None:
        for number in range(12):
            prompt = f"{number} {PROMPT}"
            stream = await f.ask(prompt, max_tokens=COUNT)
            if draw.random() < 0.3:
                await f.system.clock.sleep(draw.random() * 0.6)
                f.cancel(stream)
                continue
            await f.end(stream)
            assert stream.error is None and stream.text == answer(prompt, COUNT)
            assert stream.num_items == COUNT and stream.later_terminals == 0
        await f.system.clock.sleep(2.0)
        await f.rest()
        await ordinary(f, "after")

    simulate(scenario, tmp_path, seed=seed)
