"""Stored blocks that are read while others write them, that could not be stored, or that another model has stored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import SCRIPT, Fleet, Stream, answer, fleet

import kvstore.record
from actors import transfer as transfer_module
from actors.kv_disk import DiskConfig
from actors.transfer import TransferActor
from engine.plan import Runner
from engine.scripted_runner import ScriptedRunner
from kvstore.block import BLOCK_TOKENS
from kvstore.record import HEADER_NBYTES
from runtime.virtual_clock import VirtualClock, run_virtual

PROMPT = "the water that turns the wheel comes down the headrace " * 5
BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
COUNT = 12


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(
    scenario: Any,
    directory: Path,
    *,
    seed: int = 0,
    disk: bool = False,
    make_runner: Callable[[], Runner] = lambda: ScriptedRunner(SCRIPT),
) -> Any:
    """Run `scenario(fleet)` on an instance with two engines that do everything."""
    config = DiskConfig(directory / "disk", 1 << 30, keep_all=True) if disk else None

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, disk=config, make_runner=make_runner, prefill=0, decode=0, both=2) as f:
            await f.system.until(lambda: all(map(indexed, f.engines())), limit_s=5.0)
            return await scenario(f)

    return run_virtual(main, seed=seed)


def indexed(engine: Any) -> bool:
    """Whether an engine knows what the store of its host holds."""
    kv = engine.neighbour("kv")
    return kv is not None and bool(engine.prefix.index.complete(kv))


def count(f: Fleet, name: str) -> float:
    """A counter or gauge of the store."""
    return float(f.actor("kv-0").statistics().get(name, 0.0))


def cached(stream: Stream) -> int:
    """Tokens of the prompt that were not computed."""
    assert stream.terminal is not None
    return int(stream.terminal["usage"]["cached_tokens"])


async def ended(f: Fleet, stream: Stream, prompt: str = PROMPT) -> Stream:
    """Wait for the end of a request and check its text."""
    await f.end(stream)
    assert stream.error is None and stream.text == answer(prompt, COUNT)
    return stream


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_that_comes_while_it_is_being_stored_gets_the_same_text(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies take long, and the prompt comes again at random moments of them, to both engines: one entry is left."""
    draw, real = random.Random(seed), TransferActor._run

    async def slowly(self: TransferActor, running: Any) -> None:
        await self.clock.sleep(draw.random() * 0.4)
        await real(self, running)

    monkeypatch.setattr(TransferActor, "_run", slowly)

    async def scenario(f: Fleet) -> None:
        for turn in range(6):
            prompt = f"{turn} {PROMPT}"
            streams = [await f.ask(prompt, max_tokens=COUNT)]
            for _ in range(5):
                await f.system.clock.sleep(draw.random() * 0.3)
                streams.append(await f.ask(prompt, max_tokens=COUNT))
                if draw.random() < 0.3:
                    await f.kill(draw.choice(("both-0", "both-1")), again_after_s=0.1)
            for stream in streams:
                await ended(f, stream, prompt)
            await f.rest(limit_s=3.0)
        kv = f.actor("kv-0")
        await f.system.until(lambda: count(f, "writes") == count(f, "reads") == 0, limit_s=15.0)
        kv._tier.check_integrity()
        stored = kv._tier.dump().hashes
        assert len(set(stored)) == len(stored) and all(kv._tier.verify(digest) for digest in stored)

    simulate(scenario, tmp_path, seed=seed)


def test_a_copy_into_the_store_that_fails_is_not_found_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write-back fails: nothing is stored, the same prompt is computed again, nothing is left behind."""
    real, failing = transfer_module.copy_exported, [True]

    def copy(source: Any, from_: Any, dest: Any, to: Any, **options: Any) -> list[int]:
        if failing[0] and "-kv-" in dest.handle.path:
            real(source, from_[:1], dest, to[:1], **options)  # some of it is there
            raise OSError(28, "No space left on device")
        return real(source, from_, dest, to, **options)

    monkeypatch.setattr(transfer_module, "copy_exported", copy)

    async def scenario(f: Fleet) -> None:
        for name in ("both-0", "both-1", "both-0"):
            await ended(f, await f.ask(PROMPT, max_tokens=COUNT))
            await f.system.clock.sleep(0.5)
            assert count(f, "stored") == count(f, "blocks_in_use") == 0
            await f.kill(name)  # what its pool has is no hit of the store's
            await f.system.until(lambda: all(map(indexed, f.engines())), limit_s=5.0)
        assert count(f, "aborted_total") >= 1
        failing[0] = False
        await ended(f, await f.ask("now " + PROMPT, max_tokens=COUNT), "now " + PROMPT)
        await f.system.until(lambda: count(f, "stored") > 0, limit_s=3.0)
        f.actor("kv-0")._tier.check_integrity()

    simulate(scenario, tmp_path)


class Other(ScriptedRunner):
    """The same sizes, other weights."""

    fingerprint = "scripted-2"


class Rows(ScriptedRunner):
    """Another layout of blocks."""

    layout = "scripted-rows"


@pytest.mark.parametrize(
    ("make_runner", "found"),
    [
        (lambda: ScriptedRunner(SCRIPT), BLOCKS * BLOCK_TOKENS),
        (lambda: Other(SCRIPT), 0),
        (lambda: Rows(SCRIPT), 0),
        (lambda: ScriptedRunner(SCRIPT, block_nbytes=512), 0),
    ],
    ids=["the same", "other weights", "another layout", "another size"],
)
def test_a_restart_finds_what_the_same_model_stored_and_nothing_else(
    make_runner: Callable[[], Runner], found: int, tmp_path: Path
) -> None:
    """What is said to be cached is what was there; under other parameters nothing is, and the text is right."""

    async def first(f: Fleet) -> None:
        await ended(f, await f.ask(PROMPT, max_tokens=COUNT))
        await f.system.until(lambda: count(f, "disk_records") >= BLOCKS, limit_s=10.0)

    simulate(first, tmp_path, disk=True)

    async def second(f: Fleet) -> None:
        await f.system.until(lambda: "disk_records" in f.actor("kv-0").statistics(), limit_s=5.0)
        await f.system.clock.sleep(0.5)  # the engines follow what is on the disk
        assert cached(await ended(f, await f.ask(PROMPT, max_tokens=COUNT))) == found

    simulate(second, tmp_path, disk=True, make_runner=make_runner)


def test_what_another_version_of_the_format_stored_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before nor after this version has stored it too; then each finds its own."""

    async def first(f: Fleet) -> None:
        await ended(f, await f.ask(PROMPT, max_tokens=COUNT))
        await f.system.until(lambda: count(f, "disk_records") >= BLOCKS, limit_s=10.0)

    with monkeypatch.context() as patched:
        patched.setattr(kvstore.record, "VERSION", kvstore.record.VERSION + 1)
        simulate(first, tmp_path, disk=True)

    def again(expected: int) -> Any:
        async def second(f: Fleet) -> None:
            await f.system.until(lambda: "disk_records" in f.actor("kv-0").statistics(), limit_s=5.0)
            await f.system.clock.sleep(0.5)  # the engines follow what is on the disk
            assert count(f, "disk_recovered_total") * BLOCK_TOKENS == expected
            assert cached(await ended(f, await f.ask(PROMPT, max_tokens=COUNT))) == min(expected, BLOCKS * BLOCK_TOKENS)
            await f.system.until(lambda: count(f, "disk_records") >= BLOCKS, limit_s=10.0)

        return second

    stored = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    simulate(again(0), tmp_path, disk=True)
    simulate(again(stored), tmp_path, disk=True)


@pytest.mark.parametrize("lost", [0, 3, BLOCKS - 1])
def test_what_a_restart_says_it_has_is_what_the_next_request_has_cached(lost: int, tmp_path: Path) -> None:
    """Also where a block's record is bad: the chain ends before it, and both say so."""

    async def first(f: Fleet) -> None:
        await ended(f, await f.ask(PROMPT, max_tokens=COUNT))
        await f.system.until(lambda: count(f, "disk_records") >= BLOCKS, limit_s=10.0)

    simulate(first, tmp_path, disk=True)
    (segment,) = (tmp_path / "disk").glob("*/segment-*")
    data = bytearray(segment.read_bytes())
    stride = HEADER_NBYTES + int(segment.parent.name.partition("-")[2])
    data[lost * stride + 60] ^= 1
    segment.write_bytes(data)

    async def second(f: Fleet) -> None:
        await f.system.until(lambda: "disk_records" in f.actor("kv-0").statistics(), limit_s=5.0)
        await f.system.clock.sleep(0.5)
        assert count(f, "disk_recovered_total") == len(data) // stride - 1
        stream = await ended(f, await f.ask(PROMPT, max_tokens=COUNT))
        found = lost if lost >= 2 else 0  # engines do not ask for less
        assert cached(stream) == found * BLOCK_TOKENS
        await f.system.until(lambda: count(f, "disk_records") == len(data) // stride, limit_s=10.0)

    simulate(second, tmp_path, disk=True)
