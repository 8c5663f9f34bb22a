"""Several stores on one host: each prompt has a home among them, is read from where it lies, and outlives any one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import MODEL, Fleet, Stream, answer, fleet

from actors.kv_disk import DiskConfig
from actors.work import salt_of
from kvstore.block import BLOCK_TOKENS, chain_hashes
from kvstore.homes import KEY_BLOCKS, home_key, ranked
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import messages as m
from schemas.record import Record, ReplyTo
from schemas.subjects import Ref

TEXT = "the water that turns the wheel comes down the headrace " * 3
PROMPTS = [f"{number}: {TEXT}" for number in range(6)]
BLOCKS = (len(PROMPTS[0]) - 1) // BLOCK_TOKENS
COUNT = 6
ME = Ref("tool", "stores", "0123456789abcdef")


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, disk: DiskConfig | None = None, seed: int = 0, **layout: int) -> Any:
    """Run `scenario(fleet)` on an engine and two stores."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, disk=disk, **{"prefill": 0, "decode": 1, "kv": 2, **layout}) as f:
            await f.system.until(lambda: known(f), limit_s=10.0)
            found = await scenario(f)
            check(f)
            return found

    return run_virtual(main, seed=seed)


def stores(f: Fleet) -> list[Any]:
    """The stores that live."""
    names = [name for name in f.nodes if name.startswith("kv-") and not f.system.is_gone(name)]
    return [f.actor(name) for name in names]


def known(f: Fleet) -> bool:
    """Whether engines and admission actors know all that the stores hold, and each store has its memory."""
    indices = [engine.prefix.index for engine in f.engines()]
    indices += [f.actor(name)._where.index for name in f.nodes if name.startswith("admission-")]
    for kv in stores(f):
        numbers = kv.load()["tiers"]
        if kv._tier is None or (kv._disk is not None and "disk_records" not in kv.statistics()):
            return False
        for index in indices:
            if any(index._index.number(f"{kv.ref.epoch}/{kind}") != number for kind, number in numbers.items()):
                return False
    return True


def check(f: Fleet) -> None:
    """The ledgers of all stores balance, and nobody holds anything."""
    for kv in stores(f):
        kv._tier.check_integrity()
        assert kv._tier.pool.in_use == kv.statistics()["stored"]


def held(f: Fleet) -> dict[str, int]:
    """Blocks of each store's memory by its id."""
    return {kv.ref.id: int(kv.statistics()["stored"]) for kv in stores(f)}


async def ask(f: Fleet, prompt: str) -> Stream:
    """Send a prompt, check its text, and wait until what is to be stored is."""
    stream = await f.ask(prompt, max_tokens=COUNT)
    await f.end(stream)
    assert stream.error is None and stream.text == answer(prompt, COUNT)
    await f.rest(limit_s=5.0)
    await f.system.clock.sleep(0.3)
    await f.system.until(lambda: known(f), limit_s=10.0)
    return stream


def cached(stream: Stream) -> int:
    """Blocks of the prompt that were not computed."""
    assert stream.terminal is not None
    return int(stream.terminal["usage"]["cached_tokens"]) // BLOCK_TOKENS


async def renew(f: Fleet) -> None:
    """Kill the engine: its successor has nothing in its own pool."""
    await f.kill("decode-0")
    await f.system.until(lambda: bool(f.engines()) and ready(f) and known(f), limit_s=10.0)


def ready(f: Fleet) -> bool:
    (engine,) = f.engines()
    return bool(engine.state == "ready") and len(engine.neighbours("kv")) == len(stores(f))


def lookups(f: Fleet) -> float:
    """Lookups that any store has answered."""
    return float(sum(kv._status._lookups for kv in stores(f)))


def metric(f: Fleet, name: str) -> float:
    """A counter of the engine."""
    (engine,) = f.engines()
    lines = engine.context.telemetry.render().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"headrace_{name}"))


def home(f: Fleet, prompt: str) -> str:
    """The id of the store that a prompt belongs in."""
    (engine,) = f.engines()
    chain = chain_hashes(list(prompt.encode()), root=engine.root(salt_of(record(prompt))))
    return ranked([kv.ref for kv in stores(f)], home_key(chain, len(prompt)))[0].id


def record(prompt: str) -> Record:
    """A request for that prompt."""
    reply = ReplyTo(subject="x", epoch="0" * 16)
    return Record(request_id="x", reply=reply, owner=ME, prompt_ids=[list(prompt.encode())])


@pytest.mark.slow
def test_each_prompt_lies_whole_in_its_home_and_is_found_there(tmp_path: Path) -> None:
    """Both stores have their share, one question is asked for each prompt, and nothing is stored twice."""

    async def scenario(f: Fleet) -> None:
        expected = {kv.ref.id: 0 for kv in stores(f)}
        for prompt in PROMPTS:
            assert cached(await ask(f, prompt)) == 0
            expected[home(f, prompt)] += len(prompt) // BLOCK_TOKENS
        assert held(f) == expected and min(expected.values()) > 0
        await renew(f)
        for number, prompt in enumerate(PROMPTS):
            assert cached(await ask(f, prompt)) == BLOCKS
            assert lookups(f) == number + 1
        assert held(f) == expected

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_the_death_of_one_costs_its_share_alone(how: str, tmp_path: Path) -> None:
    """All texts are right; the other store takes the share over, and is asked for it when the dead one is back."""

    async def scenario(f: Fleet) -> None:
        for prompt in PROMPTS:
            await ask(f, prompt)
        homes = {prompt: home(f, prompt) for prompt in PROMPTS}
        lost = f"kv-{homes[PROMPTS[0]]}"
        if how == "kill":
            await f.kill(lost, again_after_s=None)
        else:
            f.freeze(lost)
            await f.system.clock.sleep(2.0)
            await f.kill(lost, again_after_s=None)  # as its supervisor would
        await renew(f)
        for prompt in PROMPTS:
            assert cached(await ask(f, prompt)) == (0 if f"kv-{homes[prompt]}" == lost else BLOCKS)
        (left,) = held(f).values()
        assert left == sum(len(prompt) // BLOCK_TOKENS for prompt in PROMPTS)

        await f.system.start(f.make("kv", int(lost.removeprefix("kv-"))))
        await f.system.until(lambda: len(stores(f)) == 2 and known(f), limit_s=10.0)
        await renew(f)
        for prompt in PROMPTS:
            assert home(f, prompt) == homes[prompt]  # the share is its own again
            assert cached(await ask(f, prompt)) == BLOCKS  # and until it has it, the other one serves
        assert held(f)[lost.removeprefix("kv-")] == sum(
            len(prompt) // BLOCK_TOKENS for prompt in PROMPTS if f"kv-{homes[prompt]}" == lost
        )

    simulate(scenario, tmp_path)


def test_a_store_that_dies_in_the_middle_of_everything_changes_no_text(tmp_path: Path) -> None:
    """Killed while prompts are looked up, copied and stored, again and again."""

    async def scenario(f: Fleet) -> None:
        for turn in range(6):
            streams = [(p, await f.ask(p, max_tokens=COUNT)) for p in PROMPTS]
            await f.system.clock.sleep(0.013 * turn)
            await f.kill(f"kv-{turn % 2}")
            for prompt, stream in streams:
                await f.end(stream)
                assert stream.error is None and stream.text == answer(prompt, COUNT)
            await f.rest(limit_s=5.0)
        await f.system.until(lambda: known(f), limit_s=10.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_store_that_joins_gets_its_share_by_and_by(tmp_path: Path) -> None:
    """What lies elsewhere is served from there, whole, and goes home when it is used; the rest stays."""

    async def scenario(f: Fleet) -> None:
        for prompt in PROMPTS:
            await ask(f, prompt)
        before = held(f)
        assert list(before) == ["0"]
        await f.system.start(f.make("kv", 1))
        await f.system.until(lambda: known(f) and ready(f), limit_s=10.0)
        moving = [prompt for prompt in PROMPTS if home(f, prompt) == "1"]
        assert 0 < len(moving) < len(PROMPTS)
        await renew(f)
        for prompt in PROMPTS:
            assert cached(await ask(f, prompt)) == BLOCKS
        assert held(f) == {"0": before["0"], "1": len(moving) * (len(PROMPTS[0]) // BLOCK_TOKENS)}

    simulate(scenario, tmp_path, kv=1)


def test_a_conversation_that_grows_is_found_whole(tmp_path: Path) -> None:
    """From less than what decides the home to more: each turn finds the one before, after the engine is gone too."""

    async def scenario(f: Fleet) -> None:
        text = "who: "
        turns = 0
        while len(text) < 2 * KEY_BLOCKS * BLOCK_TOKENS:
            before, text = text, text + f"{turns} and so on and on, until it is done; "
            await renew(f)
            found = cached(await ask(f, text))
            most = len(before) // BLOCK_TOKENS
            assert found == (most if most >= 2 else 0)  # engines do not ask for less
            turns += 1

    simulate(scenario, tmp_path)


def test_one_store_is_asked_as_ever_and_nothing_is_offered_twice(tmp_path: Path) -> None:
    """A host with one store: blocks that came from a tier are not offered to it."""

    async def scenario(f: Fleet) -> None:
        (engine,) = f.engines()
        for _ in range(3):
            await ask(f, PROMPTS[0])
        assert not engine.stepped.core.offer_all
        assert metric(f, "kv_blocks_stored_total") == len(PROMPTS[0]) // BLOCK_TOKENS

    simulate(scenario, tmp_path, kv=1)


@pytest.mark.slow
def test_both_disks_are_read_again_after_a_restart(tmp_path: Path) -> None:
    """Each store finds its own directory by its id; a prompt is told to the store that has to read it."""
    disk = DiskConfig(tmp_path / "disk", 1 << 30, keep_all=True)

    async def fill(f: Fleet) -> dict[str, str]:
        for prompt in PROMPTS:
            await ask(f, prompt)
        blocks = sum(len(prompt) // BLOCK_TOKENS for prompt in PROMPTS)
        await f.system.until(
            lambda: sum(kv.statistics()["disk_records"] for kv in stores(f)) == blocks and known(f), limit_s=10.0
        )
        return {prompt: home(f, prompt) for prompt in PROMPTS}

    async def read(f: Fleet) -> dict[str, str]:
        for prompt in PROMPTS:
            assert cached(await ask(f, prompt)) == BLOCKS
        assert all(kv.statistics()["disk_loaded_total"] > 0 for kv in stores(f))
        return {prompt: home(f, prompt) for prompt in PROMPTS}

    assert simulate(fill, tmp_path, disk=disk) == simulate(read, tmp_path, disk=disk)
    assert sorted(path.name for path in disk.directory.iterdir()) == ["0", "1"]


def test_a_prompt_goes_to_the_engine_of_the_host_of_which_the_second_store_has_it(tmp_path: Path) -> None:
    """Placement looks at all stores of a host, and its hint names the one that has the blocks."""

    async def scenario(f: Fleet) -> None:
        prompt = next(p for p in PROMPTS if home(f, p) == "1")
        await ask(f, prompt)
        await renew(f)
        (engine,) = f.engines()
        admission = f.actor("admission-0")
        members = admission.context.membership.members("decode")
        stored = admission._where.find(record(prompt), members)[engine.ref]
        assert stored.store is not None and stored.store.id == "1"
        assert (stored.resident, stored.memory, stored.total) == (0, BLOCKS * BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS)
        far = replace(stored, memory=0)  # as if it lay on the disk
        hint = admission._where.on_disk(record(prompt), engine.ref, far)
        assert hint is not None and hint[0].id == "1" and len(hint[1].hashes) == BLOCKS

    simulate(scenario, tmp_path)


async def pin(f: Fleet, answers: list[m.Message], prompt: str, name: str) -> m.PromptPinned:
    """Pin a prompt through an admission actor."""
    number = len(answers)
    wish = m.PinPrompt(
        ticket=f"t{number}", api="completion", body={"model": MODEL, "prompt": prompt}, ttl_s=60.0, pin=name, reply=ME
    )
    f.system.send(f.actor("admission-0").ref, wish)
    await f.system.until(lambda: len(answers) > number, limit_s=10.0)
    found = answers[number]
    assert isinstance(found, m.PromptPinned) and found.error is None
    return found


def pins(f: Fleet) -> dict[str, list[str]]:
    """The ids that each store holds."""
    return {kv.ref.id: sorted(row.pin for row in kv._pins.rows(kv._tier)) for kv in stores(f)}


def test_a_pin_is_held_and_counted_by_the_home_alone(tmp_path: Path) -> None:
    """Pinned anew with another prompt it leaves the store that had it; a short one is held by both."""

    async def scenario(f: Fleet) -> None:
        answers = await f.system.tap(ME.subject)
        here = next(p for p in PROMPTS if home(f, p) == "0")
        there = next(p for p in PROMPTS if home(f, p) == "1")
        await ask(f, here)
        assert (await pin(f, answers, here, "mine")).stored == len(here) // BLOCK_TOKENS
        assert pins(f) == {"0": ["mine"], "1": []}
        await pin(f, answers, there, "mine")
        await f.system.clock.sleep(0.1)
        assert pins(f) == {"0": [], "1": ["mine"]}
        await pin(f, answers, here[: 2 * BLOCK_TOKENS], "short")
        assert pins(f) == {"0": ["short"], "1": ["mine", "short"]}

    simulate(scenario, tmp_path)
