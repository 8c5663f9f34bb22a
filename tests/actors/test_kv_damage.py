"""What a reader finds out about stored blocks, and what becomes of loads and write-backs that are cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, Stream, answer, fleet

from engine.core import EngineCore
from kvstore.block import BLOCK_TOKENS
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import messages as m

PROMPT = "the water that turns the wheel comes down the headrace " * 5
BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
COUNT = 12


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0) -> Any:
    """Run `scenario(fleet)` on an instance with one engine that does everything."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, prefill=0, decode=0, both=1) as f:
            await f.system.until(lambda: indexed(f), limit_s=3.0)
            return await scenario(f)

    return run_virtual(main, seed=seed)


def indexed(f: Fleet) -> bool:
    """Whether the engine knows all that the store holds."""
    kv, engine = f.actor("kv-0"), f.actor("both-0")
    known = engine.prefix.index._index.number(f"{kv.ref.epoch}/host")
    return bool(engine.prefix.index.complete(kv.ref)) and known == kv.load()["tiers"]["host"]


def count(f: Fleet, name: str) -> float:
    """A counter or gauge of the store."""
    return float(f.actor("kv-0").statistics().get(name, 0.0))


def metric(f: Fleet, name: str) -> float:
    """A counter of the engine that lives."""
    lines = f.actor("both-0").context.telemetry.render().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"headrace_{name}"))


def cached(stream: Stream) -> int:
    """Blocks of the prompt that were not computed."""
    assert stream.terminal is not None
    return int(stream.terminal["usage"]["cached_tokens"]) // BLOCK_TOKENS


async def ask(f: Fleet) -> Stream:
    """Send the prompt, check its text, and wait until nothing is under way."""
    stream = await f.ask(PROMPT, max_tokens=COUNT)
    await f.end(stream)
    assert stream.error is None and stream.text == answer(PROMPT, COUNT)
    await f.rest()
    await f.system.until(lambda: count(f, "stored") == BLOCKS and count(f, "reads") == 0 and indexed(f), limit_s=5.0)
    return stream


async def renew(f: Fleet) -> None:
    """Kill the engine: what its successor does not compute has to come from the store."""
    await f.kill("both-0")
    await f.system.until(lambda: f.actor("both-0").state == "ready" and indexed(f), limit_s=5.0)


def flip(f: Fleet, number: int) -> None:
    """Change a bit of the prompt's block of that number in the store's memory."""
    tier = f.actor("kv-0")._tier
    header = list(tier._stored.values())[number]
    tier.pool.view()[header.block * tier.pool.block_nbytes + 40] ^= 4


@pytest.mark.parametrize(("bad", "used"), [((0,), 0), ((5,), 5), ((BLOCKS - 1,), BLOCKS - 1), ((9, 3, 4), 3)])
def test_a_damaged_block_is_computed_dropped_and_stored_anew(bad: tuple[int, ...], used: int, tmp_path: Path) -> None:
    """The reader sees it by its checksum, uses what comes before it, and tells the store, which looks and drops it."""

    async def scenario(f: Fleet) -> None:
        await ask(f)
        await renew(f)
        for number in bad:
            flip(f, number)
        assert cached(await ask(f)) == used
        assert count(f, "corrupt_total") == len(bad) == metric(f, "kv_blocks_damaged_total")
        assert metric(f, 'kv_lookups_failed_total{why="corrupt_block"}') == 1
        f.actor("kv-0")._tier.check_integrity()
        await renew(f)
        assert cached(await ask(f)) == BLOCKS
        assert count(f, "corrupt_total") == len(bad) and metric(f, "kv_blocks_damaged_total") == 0

    simulate(scenario, tmp_path)


def test_a_report_of_sound_or_unknown_blocks_drops_nothing(tmp_path: Path) -> None:
    """The store believes its own eyes: what a reader saw may be its own fault, or the block another one by now."""

    async def scenario(f: Fleet) -> None:
        await ask(f)
        kv = f.actor("kv-0")
        f.system.send(kv.ref, m.KvDamaged(hashes=[*kv._tier.dump().hashes, bytes(32), b"", b"x" * 5]))
        await f.system.clock.sleep(0.2)
        assert count(f, "stored") == BLOCKS and count(f, "corrupt_total") == 0

    simulate(scenario, tmp_path)


def test_an_answer_without_all_checksums_is_a_miss(tmp_path: Path) -> None:
    """A copy that cannot be verified is not made."""

    async def scenario(f: Fleet) -> None:
        await ask(f)
        await renew(f)
        kv = f.actor("kv-0")
        honest = kv._answer
        kv._answer = lambda msg, found: honest(msg, type(found)(found.refs, found.checksums[1:], found.lease_until))
        assert cached(await ask(f)) == 0
        assert metric(f, "kv_blocks_loaded_total") == 0

    simulate(scenario, tmp_path)


class Held:
    """Commands to an engine whose step takes its time: they run when it is over, in their order."""

    def __init__(self, f: Fleet) -> None:
        self._engine = f.actor("both-0").stepped
        self._call = self._engine.call
        self._commands: list[tuple[Callable[[EngineCore], Any], Future[Any]]] = []
        self._engine.call = self._keep

    def _keep(self, fn: Callable[[EngineCore], Any]) -> Future[Any]:
        self._commands.append((fn, Future()))
        return self._commands[-1][1]

    def __len__(self) -> int:
        return len(self._commands)

    def go_on(self) -> None:
        self._engine.call = self._call
        for fn, future in self._commands:
            done = self._call(fn)
            if done.exception() is None:
                future.set_result(done.result())
            else:
                future.set_exception(done.exception())


def test_a_try_that_is_closed_takes_no_blocks_of_the_next_one(tmp_path: Path) -> None:
    """Scenario: a step is long; while it runs a load is asked for, its request closed and dispatched anew.

    The first try's end must not free what the second one's copy is about to write: others would get those blocks.
    """

    async def scenario(f: Fleet) -> None:
        await ask(f)
        await renew(f)
        engine = f.actor("both-0")
        seen = await f.system.tap(engine.ref.subject)
        jobs = await f.system.tap(f.actor("transfer-0").ref.subject)
        held = Held(f)
        await f.ask(PROMPT, max_tokens=COUNT)
        await f.system.until(lambda: len(held) == 1, limit_s=1.0)
        (first,) = (msg for msg in seen if isinstance(msg, m.Dispatch))
        f.system.send(engine.ref, first.model_copy(update={"fence": first.fence.next()}), sender=first.reply)
        await f.system.until(lambda: sum(isinstance(msg, m.KvFound) for msg in seen) == 2, limit_s=1.0)
        f.freeze("transfer-0")
        held.go_on()
        await f.system.clock.sleep(0.03)
        copies = [msg for msg in jobs if isinstance(msg, m.TransferJob) and msg.dest == engine.ref]
        assert [job.fence for job in copies] == [first.fence.next()]
        assert engine.pool.check(copies[0].dest_blocks)
        f.thaw("transfer-0")
        await f.system.until(lambda: metric(f, "kv_blocks_loaded_total") == BLOCKS, limit_s=2.0)
        await f.system.until(lambda: not engine.works and not engine.pool.in_use, limit_s=30.0)
        engine.stepped.core.check_integrity()

    simulate(scenario, tmp_path)


def test_staging_that_a_frozen_transfer_actor_may_write_is_not_given_back(tmp_path: Path) -> None:
    """A write-back waits for an actor that is only silent: it may wake up and go on writing. Awake, it completes it."""

    async def scenario(f: Fleet) -> None:
        jobs = await f.system.tap(f.actor("transfer-0").ref.subject)
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        f.freeze("transfer-0")
        await f.end(stream)
        await f.system.until(lambda: any(isinstance(msg, m.TransferJob) for msg in jobs), limit_s=2.0)
        await f.system.clock.sleep(3.0)
        assert not f.actor("both-0").context.membership.is_up(f.actor("transfer-0").ref)
        assert count(f, "writes") == 1 and count(f, "aborted_total") == 0
        f.thaw("transfer-0")
        await f.system.until(lambda: count(f, "stored") == BLOCKS and count(f, "writes") == 0, limit_s=3.0)
        await f.rest()

    simulate(scenario, tmp_path)


def test_staging_of_a_dead_transfer_actor_is_given_back(tmp_path: Path) -> None:
    """A confirmed exit ends its writes: the write-back is over, and the next one works with its successor."""

    async def scenario(f: Fleet) -> None:
        jobs = await f.system.tap(f.actor("transfer-0").ref.subject)
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        f.freeze("transfer-0")
        await f.end(stream)
        await f.system.until(lambda: any(isinstance(msg, m.TransferJob) for msg in jobs), limit_s=2.0)
        await f.kill("transfer-0")
        await f.system.until(lambda: count(f, "writes") == 0, limit_s=1.0)
        assert count(f, "aborted_total") == 1 and count(f, "blocks_in_use") == 0
        await renew(f)
        await ask(f)

    simulate(scenario, tmp_path)
