"""The store's disk: prompts that were seen before a restart are loaded, and whatever fails is a miss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, Stream, answer, fleet

from actors.kv_disk import FLUSH_LIMIT_S, LOAD_LIMIT_S, STAGING_LEASE_S, DiskConfig, DiskSide
from kvstore.block import BLOCK_TOKENS
from kvstore.record import HEADER_NBYTES
from runtime.virtual_clock import VirtualClock, run_virtual

PROMPT = "the water that turns the wheel comes down the headrace " * 5
BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
COUNT = 20


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0, keep_all: bool = True, max_nbytes: int = 1 << 30) -> Any:
    """Run `scenario(fleet)` on a fresh instance over a disk that stays."""
    disk = DiskConfig(directory / "disk", max_nbytes, keep_all=keep_all)

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, disk=disk) as f:
            # The engines have introduced themselves, the disk is read, and everybody knows what is on it.
            await f.system.until(lambda: settled(f), limit_s=10.0)
            return await scenario(f)

    return run_virtual(main, seed=seed)


def settled(f: Fleet) -> bool:
    """Whether what the store holds is known to those who ask it."""
    kv = f.actor("kv-0")
    names = [f"{kv.ref.epoch}/{kind}" for kind in ("host", "disk")]
    numbers = kv.load()["tiers"]
    opened = "disk_records" in kv.statistics()
    return opened and all(
        [e.prefix.index._index.number(name) for name in names] == [numbers["host"], numbers["disk"]]
        for e in f.engines()
    )


def count(f: Fleet, name: str) -> float:
    """A counter of the store."""
    return float(f.actor("kv-0").statistics()[name])


async def ask(f: Fleet, prompt: str = PROMPT) -> Stream:
    """Send a prompt and check its text, whatever the store does."""
    stream = await f.ask(prompt, max_tokens=COUNT)
    await f.end(stream)
    assert stream.error is None and stream.text == answer(prompt, COUNT)
    await f.rest()
    return stream


async def ask_and_keep(f: Fleet) -> None:
    """Send a prompt and wait until the disk has it."""
    await ask(f)
    await f.system.until(lambda: count(f, "disk_records") >= BLOCKS and settled(f), limit_s=10.0)


def cached(stream: Stream) -> int:
    """How many tokens of the prompt were not computed."""
    assert stream.terminal is not None
    return int(stream.terminal["usage"]["cached_tokens"])


def check(f: Fleet) -> None:
    """Ledgers balance, nothing waits."""
    kv = f.actor("kv-0")
    kv._tier.check_integrity()
    kv._disk._disk.check_integrity()
    assert count(f, "disk_waiting") == count(f, "disk_reads") == 0


def segments(directory: Path) -> list[Path]:
    """The files on disk."""
    return sorted((directory / "disk").glob("*/segment-*"))


def test_a_prompt_seen_before_a_restart_is_loaded_and_says_the_same(tmp_path: Path) -> None:
    """All processes are new, host memory is empty; the blocks come from disk, and are in host memory from then on."""
    simulate(ask_and_keep, tmp_path)
    assert segments(tmp_path)

    async def again(f: Fleet) -> None:
        assert count(f, "stored") == 0
        stream = await ask(f)
        assert cached(stream) == BLOCKS * BLOCK_TOKENS
        assert count(f, "disk_loaded_total") == BLOCKS == count(f, "stored")
        longer = await ask(f, PROMPT + "and turns it again")
        assert cached(longer) >= BLOCKS * BLOCK_TOKENS and count(f, "disk_loads_total") == 1
        await f.system.until(lambda: settled(f) and f.actor("kv-0").idle, limit_s=5.0)
        check(f)

    simulate(again, tmp_path)


def test_what_was_used_once_is_not_written_until_the_node_leaves(tmp_path: Path) -> None:
    """A second use admits a block; a planned stop saves all that memory holds; a crash does not."""

    async def once(f: Fleet) -> None:
        await ask(f)
        await f.system.until(lambda: count(f, "stored") == BLOCKS, limit_s=5.0)
        await f.system.clock.sleep(2.0)
        assert count(f, "disk_records") == 0

    simulate(once, tmp_path, keep_all=False)
    assert segments(tmp_path) == []

    async def leave(f: Fleet) -> None:
        await once(f)
        kv = f.actor("kv-0")
        assert kv.idle
        kv.drain()
        assert not kv.idle
        await f.system.until(lambda: kv.idle, limit_s=2.0)
        assert count(f, "disk_records") == BLOCKS

    simulate(leave, tmp_path, keep_all=False)

    async def twice(f: Fleet) -> None:
        assert cached(await ask(f)) == BLOCKS * BLOCK_TOKENS

    simulate(twice, tmp_path, keep_all=False)


def test_what_a_second_engine_asks_for_is_written(tmp_path: Path) -> None:
    """The prompt is found in host memory: that is its second use."""

    async def scenario(f: Fleet) -> None:
        await ask(f)
        await f.system.until(lambda: count(f, "stored") == BLOCKS and settled(f), limit_s=5.0)
        await f.kill("prefill-0")  # its own memory of the prompt goes with it
        await f.system.until(lambda: settled(f), limit_s=10.0)
        await ask(f)
        await f.system.until(lambda: count(f, "disk_records") == BLOCKS, limit_s=5.0)
        check(f)

    simulate(scenario, tmp_path, keep_all=False)


def damage(directory: Path, how: Callable[[bytearray], object]) -> None:
    """Change every segment."""
    for path in segments(directory):
        data = bytearray(path.read_bytes())
        how(data)
        path.write_bytes(data)


def flip_payload(data: bytearray) -> None:
    data[-3] ^= 1


def cut(data: bytearray) -> None:
    del data[len(data) // 2 :]


def noise(data: bytearray) -> None:
    data[:] = random.Random(3).randbytes(len(data))


@pytest.mark.parametrize("how", [flip_payload, cut, noise])
def test_damage_on_the_disk_is_a_miss(how: Callable[[bytearray], object], tmp_path: Path) -> None:
    """Scripted engines check every block they read: the text is right, and good copies are written again."""
    simulate(ask_and_keep, tmp_path)
    damage(tmp_path, how)

    async def again(f: Fleet) -> None:
        stream = await ask(f)
        assert cached(stream) < BLOCKS * BLOCK_TOKENS
        await f.system.until(lambda: count(f, "disk_records") >= BLOCKS, limit_s=10.0)
        check(f)

    simulate(again, tmp_path)

    async def third(f: Fleet) -> None:
        assert cached(await ask(f)) == BLOCKS * BLOCK_TOKENS

    simulate(third, tmp_path)


def test_damage_behind_the_tiers_back_is_a_miss(tmp_path: Path) -> None:
    """While it runs: the bad block is dropped, the head of the chain is used, the rest is computed."""
    simulate(ask_and_keep, tmp_path)

    async def scenario(f: Fleet) -> None:
        (path,) = segments(tmp_path)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // BLOCKS * 5 + HEADER_NBYTES + 1)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 128]))
        stream = await ask(f)
        assert cached(stream) == 5 * BLOCK_TOKENS
        assert count(f, "disk_corrupt_total") == 1 and count(f, "disk_load_failures_total") == 1
        check(f)

    simulate(scenario, tmp_path)


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """Let everything that a disk thread does take a while."""
    real = DiskSide._in

    async def slowly(self: DiskSide, pool: Any, work: Any) -> Any:
        await self._context.clock.sleep(seconds())
        return await real(self, pool, work)

    monkeypatch.setattr(DiskSide, "_in", slowly)


def test_an_engine_waits_for_a_disk_that_answers_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far longer than for host memory, since it was told that a read is under way."""
    simulate(ask_and_keep, tmp_path)
    slow_disk(monkeypatch, lambda: 0.6)

    async def scenario(f: Fleet) -> None:
        stream = await ask(f)
        assert cached(stream) == BLOCKS * BLOCK_TOKENS
        check(f)

    simulate(scenario, tmp_path)


def test_a_disk_that_was_found_slow_is_measured_without_a_prompt_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is computed at once; the store reads a little meanwhile."""
    simulate(ask_and_keep, tmp_path)
    slow_disk(monkeypatch, lambda: 0.6)

    async def scenario(f: Fleet) -> None:
        f.actor("kv-0")._disk._bytes_per_s = 5_000.0
        for admission in (a for n in f.nodes.values() for a in n.actors if a.ref.kind == "admission"):
            admission._where.on_disk = lambda *_: None  # it has the store read ahead as well
        await f.system.clock.sleep(0.5)
        began = f.system.clock.now()
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.items(stream, 1)
        assert f.system.clock.now() - began < 0.5
        await f.end(stream)
        assert stream.text == answer(PROMPT, COUNT) and cached(stream) == 0
        await f.system.until(lambda: count(f, "disk_reads") == 0, limit_s=5.0)
        assert count(f, "disk_prefetches_total") == 1 == count(f, "disk_loads_total")
        assert max(e.prefix._disk_at for e in f.engines()) >= began

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_disk_that_hangs_delays_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second the prompt is computed, and stored; what comes from the disk in the end is not needed any more."""
    simulate(ask_and_keep, tmp_path)
    pause = [0.0]
    slow_disk(monkeypatch, lambda: pause[0])

    async def scenario(f: Fleet) -> None:
        pause[0] = 20.0
        began = f.system.clock.now()
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.items(stream, 1)
        assert f.system.clock.now() - began < LOAD_LIMIT_S + 1.0
        await f.end(stream)
        assert stream.text == answer(PROMPT, COUNT) and cached(stream) == 0
        assert count(f, "disk_late_total") == 1 and count(f, "disk_waiting") == 0
        kv = f.actor("kv-0")
        await f.system.until(lambda: count(f, "stored") == BLOCKS and not kv._disk._loads, limit_s=30.0)
        await f.system.until(lambda: kv._pool.in_use == BLOCKS, limit_s=30.0)
        check(f)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_memory_that_a_hanging_read_may_write_is_not_lent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease lapses, the transfer actor is not asked, and the blocks come back when the thread is done."""
    simulate(ask_and_keep, tmp_path)
    pause = [0.0]
    slow_disk(monkeypatch, lambda: pause[0])

    async def scenario(f: Fleet) -> None:
        pause[0] = STAGING_LEASE_S + 10.0
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.end(stream)
        pool = f.actor("kv-0")._pool
        await f.system.clock.sleep(STAGING_LEASE_S + 3.0)
        assert pool.num_quarantined == BLOCKS
        f.actor("kv-0")._tier.check_integrity()
        pause[0] = 0.0
        await f.system.until(lambda: pool.num_quarantined == 0, limit_s=20.0)
        assert count(f, "disk_waiting") == 0
        check(f)

    simulate(scenario, tmp_path)


def test_requests_for_one_prompt_read_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come while it is being read wait for the same read; one that leaves takes nothing with it."""
    simulate(ask_and_keep, tmp_path)
    slow_disk(monkeypatch, lambda: 0.5)

    async def scenario(f: Fleet) -> None:
        streams = [await f.ask(PROMPT + str(i), max_tokens=COUNT) for i in range(4)]
        await f.system.until(lambda: count(f, "disk_waiting") == 4, limit_s=5.0)
        f.cancel(streams[3])
        await f.system.until(lambda: count(f, "disk_waiting") == 3, limit_s=0.4)
        for i, stream in enumerate(streams[:3]):
            await f.end(stream)
            assert stream.text == answer(PROMPT + str(i), COUNT) and cached(stream) >= BLOCKS * BLOCK_TOKENS
        await f.rest()
        # Admission's hint began the read before the first lookup came.
        assert count(f, "disk_loads_total") == count(f, "disk_prefetches_total") == 1
        assert count(f, "disk_joined_total") == 4
        await f.system.until(lambda: count(f, "reads") == 0, limit_s=5.0)
        check(f)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_store_killed_in_a_read_or_a_write_leaves_the_disk_whole(tmp_path: Path) -> None:
    """At whatever moment; the next incarnation goes on with it."""
    for after in (0.05, 0.2, 0.55, 0.6, 0.8, 1.2):

        async def scenario(f: Fleet, after: float = after) -> None:
            stream = await f.ask(PROMPT + str(after), max_tokens=COUNT)
            await f.system.clock.sleep(after)
            await f.kill("kv-0")
            await f.end(stream)
            assert stream.text == answer(PROMPT + str(after), COUNT)
            await ask(f)
            await f.system.until(lambda: settled(f), limit_s=10.0)
            check(f)

        simulate(scenario, tmp_path)


def test_a_disk_that_cannot_be_used_is_named_and_comes_back(tmp_path: Path) -> None:
    """Requests are served; the heartbeat says what is wrong; once it is well again blocks are written."""
    (tmp_path / "disk").write_text("in the way")

    async def scenario(f: Fleet) -> None:
        await ask(f)
        assert "disk tier: " in f.actor("kv-0").load()["unhealthy"]
        (tmp_path / "disk").unlink()
        await f.system.until(lambda: f.actor("kv-0").load()["unhealthy"] == "", limit_s=120.0)
        await ask(f, "another prompt, " + PROMPT)
        await f.system.until(lambda: count(f, "disk_records") > 0, limit_s=10.0)
        check(f)

    simulate(scenario, tmp_path)


def test_a_disk_that_hangs_does_not_hold_up_the_end_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving memory has its time."""
    slow = [0.0]
    slow_disk(monkeypatch, lambda: slow[0])

    async def scenario(f: Fleet) -> None:
        await ask(f)
        kv = f.actor("kv-0")
        await f.system.until(lambda: count(f, "stored") == BLOCKS, limit_s=5.0)
        slow[0] = 3600.0
        kv.drain()
        await f.system.clock.sleep(FLUSH_LIMIT_S - 1.0)
        assert not kv.idle
        await f.system.clock.sleep(1.5)
        assert kv.idle

    simulate(scenario, tmp_path, keep_all=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_mix_of_traffic_kills_and_damage_changes_a_text(seed: int, tmp_path: Path) -> None:
    """Tiers far smaller than what is asked for, blocks that come and go, a disk that loses bits, ends and files."""
    draw = random.Random(seed)
    names = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn")
    stems = [f"{name} tells of the wheel and the water, at length and in order, " * 3 for name in names]
    prompts = [stem + f"and in year {i} of the mill that stands below it, and more" for stem in stems for i in range(4)]
    seen: dict[str, float] = {}

    def strike() -> None:
        for path in segments(tmp_path):
            match draw.randrange(12):
                case 0:
                    path.unlink()
                case 1:
                    with path.open("r+b") as file:
                        file.truncate(draw.randrange(path.stat().st_size + 1))
                case 2:
                    data = bytearray(path.read_bytes())
                    if data:
                        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                    path.write_bytes(data)

    async def scenario(f: Fleet) -> None:
        for _ in range(40):
            batch = draw.sample(prompts, draw.randrange(1, 4))
            streams = [await f.ask(prompt, max_tokens=COUNT) for prompt in batch]
            await f.system.clock.sleep(draw.random() * 0.4)
            match draw.randrange(4):
                case 0:
                    await f.kill("prefill-0")  # what it knew has to come from the store
                case 1 if draw.random() < 0.5:
                    await f.kill("kv-0")
                case 2:
                    strike()
                case _:
                    pass
            for prompt, stream in zip(batch, streams, strict=True):
                await f.end(stream)
                assert stream.error is None and stream.text == answer(prompt, COUNT)
            for name, value in f.actor("kv-0").statistics().items():
                seen[name] = max(seen.get(name, 0.0), value)
        await f.rest(limit_s=10.0)  # blocks that were announced and never stored are waited for
        await f.kill("kv-0")  # the next one finds whole files and no others
        await f.system.until(lambda: settled(f) and f.actor("kv-0").idle, limit_s=60.0)
        check(f)

    simulate(scenario, tmp_path, seed=seed, max_nbytes=16 * 4096)
    assert seen["disk_loaded_total"] > 0 and seen["disk_evicted_total"] > 0 and seen["evicted_total"] > 0
