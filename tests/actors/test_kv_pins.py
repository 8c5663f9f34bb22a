"""A prompt is pinned by anybody on the bus: its blocks stay, until the time is over, and no text is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import MODEL, Fleet, answer, fleet

from kvstore.block import BLOCK_TOKENS
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import messages as m
from schemas.subjects import Ref

PROMPT = "the water that turns the wheel comes down the headrace " * 4
BLOCKS = len(PROMPT) // BLOCK_TOKENS
ME = Ref("tool", "pins", "0123456789abcdef")


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path) -> Any:
    """Run `scenario(fleet, answers)`: whatever is sent to `ME` is in `answers`."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, prefill=0, decode=1) as f:
            answers = await f.system.tap(ME.subject)
            await f.system.clock.sleep(2.0)
            return await scenario(f, answers)

    return run_virtual(main)


async def pin(f: Fleet, answers: list[m.Message], prompt: Any = PROMPT, **fields: Any) -> m.PromptPinned:
    """Pin a prompt through an admission actor."""
    light = f.actor("admission-0" if "admission-0" in f.nodes else "light-0")
    body = {"model": MODEL, "prompt": prompt} | fields.pop("body", {})
    number = len(answers)
    wish = {"ticket": f"t{number}", "api": "completion", "ttl_s": 60.0, "reply": ME} | fields
    f.system.send(light.ref, m.PinPrompt(body=body, **wish))
    await f.system.until(lambda: len(answers) > number, limit_s=10.0)
    found = answers[number]
    assert isinstance(found, m.PromptPinned) and found.ticket == wish["ticket"]
    return found


async def tell(f: Fleet, answers: list[m.Message], message: m.Message) -> Any:
    """Send something to the store and return its answer."""
    number = len(answers)
    f.system.send(f.actor("kv-0").ref, message)
    await f.system.until(lambda: len(answers) > number)
    return answers[number]


async def rows(f: Fleet, answers: list[m.Message]) -> list[m.KvPinRow]:
    """The store's pins."""
    return list((await tell(f, answers, m.KvStatusQuery(ticket="s", reply=ME))).pins)


async def ask(f: Fleet, prompt: str) -> int:
    """Ask, check the text, return the cached tokens."""
    stream = await f.ask(prompt, max_tokens=3)
    await f.end(stream)
    await f.rest()
    assert stream.text == answer(prompt, 3) and stream.terminal is not None
    await f.system.clock.sleep(0.6)
    f.actor("kv-0")._tier.check_integrity()
    return int(stream.terminal["usage"]["cached_tokens"])


async def flood(f: Fleet, first: int, count: int = 12) -> None:
    """Ask for so many other things that host memory holds nothing else."""
    for i in range(first, first + count):
        await ask(f, f"{i} is another thing, and " + PROMPT)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_pinned_prompt_outlives_a_flood_and_not_its_time(before: bool, tmp_path: Path) -> None:
    """Whether it was stored when it was pinned or came later."""

    async def scenario(f: Fleet, answers: list[m.Message]) -> None:
        if before:
            await ask(f, PROMPT)
        found = await pin(f, answers, ttl_s=30.0)
        assert (found.error, found.tokens, found.blocks) == (None, len(PROMPT), BLOCKS)
        assert found.stored == (BLOCKS if before else 0)
        assert abs(found.until - f.system.clock.wall() - 30.0) < 1.0
        if not before:
            await ask(f, PROMPT)
        await flood(f, 0)
        (row,) = await rows(f, answers)
        assert (row.pin, row.blocks, row.stored, row.until) == (found.pin, BLOCKS, BLOCKS, pytest.approx(found.until))
        await f.kill("decode-0")
        await f.system.clock.sleep(3.0)
        assert await ask(f, PROMPT) == (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

        await f.system.until(lambda: f.system.clock.wall() > found.until + 0.2, limit_s=60.0)
        assert await rows(f, answers) == []
        await flood(f, 100, 20)
        assert f.actor("kv-0").statistics()["held"] == 0
        hashes = f.actor("kv-0")._tier.dump().hashes
        assert row.head not in hashes

    simulate(scenario, tmp_path)


def test_unpinning_ends_it_at_once(tmp_path: Path) -> None:
    """Once; a pin under a known id is moved, not doubled."""

    async def scenario(f: Fleet, answers: list[m.Message]) -> None:
        one = await pin(f, answers, pin="mine", ttl_s=10.0)
        two = await pin(f, answers, prompt=PROMPT[:64], pin="mine", ttl_s=50.0)
        assert (one.pin, two.pin, two.blocks) == ("mine", "mine", 4)
        assert [(row.pin, row.blocks) for row in await rows(f, answers)] == [("mine", 4)]
        assert f.actor("kv-0").statistics()["held"] == 4

        gone = await tell(f, answers, m.KvUnpin(ticket="u", pin="mine", reply=ME))
        again = await tell(f, answers, m.KvUnpin(ticket="v", pin="mine", reply=ME))

        assert (gone.known, again.known) == (True, False)
        assert f.actor("kv-0").statistics()["held"] == 0

    simulate(scenario, tmp_path)


def test_what_cannot_be_pinned_is_refused_by_name(tmp_path: Path) -> None:
    """More than half of the tier, bad times, several prompts, another model, less than a block."""

    async def scenario(f: Fleet, answers: list[m.Message]) -> None:
        long = await pin(f, answers, prompt="x" * (33 * BLOCK_TOKENS))
        assert long.error is not None and long.error["code"] == "tier_share"
        for fields, kind in (
            ({"ttl_s": 0.0}, "BadRequest"),
            ({"ttl_s": 1e9}, "BadRequest"),
            ({"prompt": ["a" * 40, "b" * 40]}, "BadRequest"),
            ({"prompt": "short"}, "BadRequest"),
            ({"body": {"model": "other"}}, "ModelNotFound"),
            ({"tenant": ""}, "BadRequest"),
        ):
            found = await pin(f, answers, **fields)
            assert found.error is not None and found.error["kind"] == kind, fields
        assert await rows(f, answers) == [] and f.actor("kv-0").statistics()["held"] == 0

    simulate(scenario, tmp_path)


def test_a_tenant_s_pin_is_of_its_own_blocks(tmp_path: Path) -> None:
    """The same prompt of another tenant, or with a salt, has other blocks."""

    async def scenario(f: Fleet, answers: list[m.Message]) -> None:
        for fields in ({}, {"tenant": "b"}, {"body": {"cache_salt": "s"}}):
            await pin(f, answers, prompt=PROMPT[:64], **fields)
        found = await rows(f, answers)
        assert len({row.head for row in found}) == 3 and len({row.owner for row in found}) == 2

    simulate(scenario, tmp_path)


def test_a_store_that_dies_ends_its_pins_and_a_missing_engine_is_said(tmp_path: Path) -> None:
    """Pins are wishes: nobody promises them beyond the store's life."""

    async def scenario(f: Fleet, answers: list[m.Message]) -> None:
        await pin(f, answers)
        await f.kill("kv-0")
        await f.system.clock.sleep(3.0)
        assert await rows(f, answers) == []
        await f.kill("decode-0", again_after_s=None)
        await f.system.clock.sleep(3.0)
        found = await pin(f, answers)
        assert found.error is not None and found.error["kind"] == "Unavailable"

    simulate(scenario, tmp_path)
