"""What a request says about its prompt's cached tokens is true, whoever computes it and wherever the prefix came from.

Whole instances in virtual time; the engines are scripted and check every block that they read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, Stream, answer, fleet

from actors.admission import AdmissionActor
from actors.kv_disk import DiskConfig
from kvstore.block import BLOCK_TOKENS
from runtime.virtual_clock import VirtualClock, run_virtual

PROMPT = "the water that turns the wheel comes down the headrace " * 4
FULL = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
HALF = PROMPT[: len(PROMPT) // 2] + "and another half that nobody has asked for before, ever and ever"
COUNT = 7
SPLIT: dict[str, int] = {}
WHOLE = {"prefill": 0, "transfer": 1, "decode": 1}
LAYOUTS = pytest.mark.parametrize("layout", [SPLIT, WHOLE], ids=["split", "one engine"])


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0, disk: bool = False, **layout: int) -> Any:
    """Run `scenario(fleet)` on a fresh instance; with `disk` over one that stays."""
    config = DiskConfig(directory / "disk", 1 << 30, keep_all=True) if disk else None

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, disk=config, **layout) as f:
            await f.system.clock.sleep(2.0)  # everybody has introduced themselves
            return await scenario(f)

    return run_virtual(main, seed=seed)


async def usage(f: Fleet, prompt: str | list[str] = PROMPT, *, max_tokens: int = COUNT, **fields: Any) -> int:
    """Ask, check text and sums, and return the cached tokens; afterwards the store has had time to hear of it."""
    stream = await f.ask(prompt, max_tokens=max_tokens, **fields)
    await f.end(stream)
    await f.rest()
    return await accounted(f, stream, [prompt] if isinstance(prompt, str) else prompt, max_tokens)


async def accounted(f: Fleet, stream: Stream, prompts: list[str], max_tokens: int) -> int:
    assert stream.error is None and stream.terminal is not None
    n = len(stream.texts) // len(prompts)
    for choice, texts in enumerate(stream.texts):
        assert "".join(texts) == answer(prompts[choice // n], max_tokens, choice=choice)
    found = stream.terminal["usage"]
    assert found["prompt_tokens"] == sum(map(len, prompts))  # each prompt once, whatever n is
    assert found["completion_tokens"] == max_tokens * len(stream.texts)
    await f.system.clock.sleep(1.0)
    cached = int(found["cached_tokens"])
    assert cached % BLOCK_TOKENS == 0 and cached < found["prompt_tokens"]
    return cached


@pytest.mark.slow
@LAYOUTS
def test_a_cold_prompt_has_none_a_warm_one_all_full_blocks(layout: dict[str, int], tmp_path: Path) -> None:
    """Half of a prompt counts up to the last block that is equal; blocks that came by transfer never count."""

    async def scenario(f: Fleet) -> None:
        assert await usage(f) == 0
        assert await usage(f) == FULL
        assert await usage(f, HALF) == len(PROMPT) // 2 // BLOCK_TOKENS * BLOCK_TOKENS
        assert await usage(f, PROMPT, stream=True) == FULL
        assert await usage(f, "never asked " * 9, stream=True) == 0

    simulate(scenario, tmp_path, **layout)


@LAYOUTS
@pytest.mark.parametrize("length", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS])
def test_at_least_one_token_is_always_computed(length: int, layout: dict[str, int], tmp_path: Path) -> None:
    """A prompt that ends with a block computes that block again, and says so."""

    async def scenario(f: Fleet) -> None:
        assert await usage(f, PROMPT[:length]) == 0
        assert await usage(f, PROMPT[:length]) == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    simulate(scenario, tmp_path, **layout)


@LAYOUTS
def test_several_choices_count_their_prompt_once(layout: dict[str, int], tmp_path: Path) -> None:
    """The first choice of a cold prompt found nothing, though the second one used its blocks."""

    async def scenario(f: Fleet) -> None:
        assert await usage(f, n=2) == 0
        assert await usage(f, n=2) == FULL
        assert await usage(f) == FULL

    simulate(scenario, tmp_path, **layout)


@LAYOUTS
def test_prompts_of_one_request_are_summed(layout: dict[str, int], tmp_path: Path) -> None:
    """One warm, one cold, in either order; each with two choices."""

    async def scenario(f: Fleet) -> None:
        assert await usage(f) == 0
        assert await usage(f, ["something new that is cold, and long enough for blocks", PROMPT], n=2) == FULL
        assert await usage(f, [PROMPT, "another thing that is cold, and long enough for blocks"]) == FULL
        assert await usage(f, [PROMPT, HALF]) > FULL

    simulate(scenario, tmp_path, **layout)


@LAYOUTS
def test_blocks_loaded_from_host_memory_count(layout: dict[str, int], tmp_path: Path) -> None:
    """A new engine has nothing of its own; what it loads was not computed."""

    async def scenario(f: Fleet) -> None:
        assert await usage(f) == 0
        await f.kill("prefill-0" if "prefill-0" in f.nodes else "decode-0")
        await f.system.clock.sleep(3.0)
        assert await usage(f) == FULL

    simulate(scenario, tmp_path, **layout)


@LAYOUTS
def test_blocks_loaded_from_disk_after_a_restart_count(layout: dict[str, int], tmp_path: Path) -> None:
    """Everything is new but the disk."""

    async def cold(f: Fleet) -> None:
        assert await usage(f) == 0
        await f.system.until(lambda: f.actor("kv-0").statistics()["disk_records"] > 0, limit_s=10.0)

    async def warm(f: Fleet) -> None:
        assert await usage(f) == FULL

    simulate(cold, tmp_path, disk=True, **layout)
    simulate(warm, tmp_path, disk=True, **layout)


def test_a_survivor_s_own_hit_is_not_the_request_s(tmp_path: Path) -> None:
    """The prompt was cold when it was computed for this client; after a kill the blocks are found again."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=60)
        await f.items(stream, 20)
        await f.kill(f.serving("decode", stream))
        await f.end(stream)
        await f.rest()
        assert await accounted(f, stream, [PROMPT], 60) == 0

    simulate(scenario, tmp_path)


# --- who shares -----------------------------------------------------------------------------------


def as_tenants(f: Fleet, header: str) -> None:
    """Let requests name their tenant in a header."""
    for node in f.nodes.values():
        for actor in node.actors:
            if isinstance(actor, AdmissionActor):
                actor.config = dataclasses.replace(actor.config, tenant_header=header)


async def of(f: Fleet, tenant: str | None, salt: str | None) -> tuple[int, float]:
    """Ask as this tenant with this salt; returns the cached tokens and the time to the first token."""
    fields = {} if salt is None else {"cache_salt": salt}
    headers = {} if tenant is None else {"X-Tenant": tenant}
    stream = await f.ask(PROMPT, max_tokens=COUNT, headers=headers, **fields)
    await f.items(stream, 1)
    first_s = f.system.clock.now() - stream.asked_at
    await f.end(stream)
    await f.rest()
    return await accounted(f, stream, [PROMPT], COUNT), first_s


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("X", None), (None, "X")),
        (("c", "ab"), ("bc", "a")),
        (("ab", "c"), ("a", "bc")),
        (("1", ":x"), ("1:", "x")),
        ((None, None), (None, "default")),
        ((None, None), ("other", None)),
    ],
)  # fmt: skip
def test_tenants_and_salts_do_not_run_together(
    one: tuple[Any, Any], two: tuple[Any, Any], layout: dict[str, int], tmp_path: Path
) -> None:
    """Across a pair nothing is found, by count or by time; within each everything is."""

    async def scenario(f: Fleet) -> None:
        as_tenants(f, "x-tenant")
        first, first_s = await of(f, *one)
        other, other_s = await of(f, *two)
        warm, warm_s = await of(f, *one)
        again, again_s = await of(f, *two)

        assert (first, other, warm, again) == (0, 0, FULL, FULL)
        assert other_s > max(warm_s, again_s)
        assert abs(other_s - first_s) < 0.02  # a step's pace: how far it had got when the request came

    simulate(scenario, tmp_path, **layout)


def test_a_tenant_is_not_named_unless_a_header_is_set(tmp_path: Path) -> None:
    """Without the setting the header is anybody's claim, and means nothing."""

    async def scenario(f: Fleet) -> None:
        assert (await of(f, "one", None))[0] == 0
        assert (await of(f, "two", None))[0] == FULL

    simulate(scenario, tmp_path)


def test_an_empty_salt_and_a_bad_tenant_are_refused(tmp_path: Path) -> None:
    """Neither looks like a separation and is none."""

    async def scenario(f: Fleet) -> None:
        as_tenants(f, "x-tenant")
        for fields, headers in (({"cache_salt": ""}, {}), ({"cache_salt": 3}, {}), ({}, {"X-Tenant": "a b"})):
            stream = await f.ask(PROMPT, max_tokens=COUNT, headers=headers, **fields)
            await f.end(stream)
            assert stream.terminal is not None and stream.terminal["error"]["kind"] == "BadRequest"

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_the_time_to_the_first_token_tells_nothing_of_another_tenant(tmp_path: Path) -> None:
    """Over many runs a tenant's first request takes as long whether or not another one has asked the same."""

    def first_times(asked_before: bool) -> list[float]:
        times: list[float] = []
        for seed in range(25):

            async def scenario(f: Fleet) -> None:
                as_tenants(f, "x-tenant")
                await of(f, "a" if asked_before else None, None if asked_before else "unrelated")
                if not asked_before:
                    await usage(f, "something else of the same length as the other one has " * 4)
                found, seconds = await of(f, "b", None)
                assert found == 0
                times.append(seconds)

            simulate(scenario, tmp_path, seed=seed)
        return sorted(times)

    after, without = first_times(True), first_times(False)

    assert abs(sum(after) - sum(without)) / len(after) < 0.005
