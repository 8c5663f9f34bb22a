"""A frozen tier takes nothing new and serves what it has; thawed, it takes what comes from then on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, answer, fleet

from actors.kv_disk import DiskConfig
from kvstore.block import BLOCK_TOKENS
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import messages as m
from schemas.subjects import Ref

STORED = "the water that turns the wheel comes down the headrace " * 4
NEW = "another wheel is turned by another water, which comes from elsewhere " * 4
ME = Ref("tool", "kv", "0123456789abcdef")


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, disk: bool = False) -> None:
    """Run `scenario(fleet, answers)`: whatever is sent to `ME` is in `answers`."""
    where = DiskConfig(directory / "disk", 1 << 30, keep_all=True) if disk else None

    async def main(clock: VirtualClock) -> None:
        async with fleet(clock, directory, prefill=0, decode=1, disk=where) as f:
            answers = await f.system.tap(ME.subject)
            await f.system.clock.sleep(2.0)
            await scenario(f, answers)

    run_virtual(main)


async def ask(f: Fleet, prompt: str) -> int:
    """Ask, check the text, let what it leaves be stored; returns the cached tokens."""
    stream = await f.ask(prompt, max_tokens=3)
    await f.end(stream)
    await f.rest()
    assert stream.text == answer(prompt, 3) and stream.terminal is not None
    await f.system.clock.sleep(1.5)
    f.actor("kv-0")._tier.check_integrity()
    return int(stream.terminal["usage"]["cached_tokens"])


async def tell(f: Fleet, answers: list[m.Message], message: m.Message) -> Any:
    """Send something to the store and return its answer, once heartbeats have told of it."""
    number = len(answers)
    f.system.send(f.actor("kv-0").ref, message)
    await f.system.until(lambda: len(answers) > number)
    await f.system.clock.sleep(1.0)
    return answers[number]


async def freeze(f: Fleet, answers: list[m.Message], *tiers: str) -> list[str]:
    """Freeze these tiers and thaw the others; returns what the store says is frozen."""
    return list((await tell(f, answers, m.KvFreeze(ticket="f", tiers=list(tiers), reply=ME))).tiers)


async def forget(f: Fleet) -> None:
    """What the engine's own pool holds goes with it; another one takes its place."""
    await f.kill("decode-0")
    await f.system.clock.sleep(3.0)


def full(prompt: str) -> int:
    """Tokens of a prompt that can come from a tier; a token is a character."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_frozen_memory_serves_what_it_has_and_takes_nothing(tmp_path: Path) -> None:
    """Nothing is offered while it is frozen; what was computed meanwhile is not stored after the thaw either."""

    async def scenario(f: Fleet, answers: list[m.Message]) -> None:
        kv = f.actor("kv-0")
        await ask(f, STORED)
        before = kv.statistics()["stored"]
        assert before == len(STORED) // BLOCK_TOKENS

        assert await freeze(f, answers, "host") == ["host"]
        assert await ask(f, NEW) == 0
        assert kv.statistics()["stored"] == before and kv.statistics()["host_frozen"] == 1
        assert [engine.prefix._write for engine in f.engines()] == [None]
        (row,) = (await tell(f, answers, m.KvStatusQuery(ticket="s", reply=ME))).tiers
        assert row.frozen

        await forget(f)
        assert await ask(f, STORED) == full(STORED)

        assert await freeze(f, answers) == []
        await f.system.clock.sleep(2.0)
        assert kv.statistics()["stored"] == before
        await forget(f)
        assert await ask(f, NEW) == 0
        assert kv.statistics()["stored"] == before + len(NEW) // BLOCK_TOKENS and kv.statistics()["host_frozen"] == 0

    simulate(scenario, tmp_path)


def test_an_engine_that_offers_all_the_same_gets_no_place(tmp_path: Path) -> None:
    """Its heartbeat from the store was lost, or it has just joined: the store refuses, the engine goes on."""

    async def scenario(f: Fleet, answers: list[m.Message]) -> None:
        await ask(f, STORED)
        before = f.actor("kv-0").statistics()["stored"]
        await freeze(f, answers, "host")
        (engine,) = f.engines()
        engine.prefix._frozen = lambda kv: False
        await f.system.clock.sleep(0.5)

        await ask(f, NEW)

        assert f.actor("kv-0").statistics()["stored"] == before
        assert engine.prefix._write is None
        assert engine.prefix._offering

    simulate(scenario, tmp_path)


def test_a_frozen_disk_is_read_and_not_written(tmp_path: Path) -> None:
    """Memory above it takes what is new meanwhile; a drain leaves the disk alone too, and ends."""

    async def scenario(f: Fleet, answers: list[m.Message]) -> None:
        kv = f.actor("kv-0")
        await ask(f, STORED)
        await f.system.until(lambda: kv.statistics()["disk_records"] >= len(STORED) // BLOCK_TOKENS, limit_s=10.0)
        before = kv.statistics()["disk_records"]

        assert await freeze(f, answers, "disk", "tape") == ["disk"]
        await ask(f, NEW)
        await f.system.clock.sleep(10.0)
        assert kv.statistics()["disk_records"] == before and kv.statistics()["disk_queued"] == 0
        assert kv.statistics()["stored"] == len(STORED) // BLOCK_TOKENS + len(NEW) // BLOCK_TOKENS

        kv.drain()
        await f.system.until(lambda: kv.idle, limit_s=5.0)
        assert kv.statistics()["disk_records"] == before

    simulate(scenario, tmp_path, disk=True)
