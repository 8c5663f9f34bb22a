"""Warm failover: what a request has computed is in the store when its engine dies, and the survivor loads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, answer, fleet

from kvstore.block import answer_start, chain_hashes, sequence_hashes
from runtime.virtual_clock import VirtualClock, run_virtual

PROMPT = "the water that turns the wheel comes down the headrace " * 4
COUNT = 480


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines run on the loop by design; real time does not pass."""
    yield


def computed_by_survivor(directory: Path, **fields: Any) -> float:
    """Kill the engine of a long answer; returns how many tokens the survivor computed for the part that was there."""
    out = []

    async def main(clock: VirtualClock) -> None:
        async with fleet(clock, directory, prefill=0, whole_below=10_000) as f:
            await f.system.clock.sleep(1.0)
            stream = await f.ask(PROMPT, max_tokens=COUNT, **fields)
            await f.items(stream, 400)
            victim = f.serving("decode", stream)
            survivor = f.actor("decode-1" if victim == "decode-0" else "decode-0")
            before = survivor.stepped.core.statistics()["tokens_total"]
            await f.kill(victim, again_after_s=None)
            await f.end(stream)
            assert stream.error is None
            assert stream.text == answer(PROMPT, COUNT)
            out.append(survivor.stepped.core.statistics()["tokens_total"] - before - (COUNT - 400))
            await rest(f)

    run_virtual(main)
    return out[0]


async def rest(f: Fleet) -> None:
    """Nothing is held anywhere but blocks on their way to the store."""
    await f.rest(limit_s=5.0)


@pytest.mark.slow
def test_a_survivor_loads_what_a_warm_request_had_computed(tmp_path: Path) -> None:
    """620 tokens were there: the prompt's 220 are loaded in any case, and all but what was not stored yet."""
    for name in ("cold", "warm"):
        (tmp_path / name).mkdir()
    cold = computed_by_survivor(tmp_path / "cold")
    warm = computed_by_survivor(tmp_path / "warm", warm_failover=True)

    assert 380 <= cold <= 400 + 64
    assert warm <= 64


def test_an_answers_blocks_have_hashes_that_no_prompt_can_meet() -> None:
    """The same ids as a prompt, or as prompt and answer cut elsewhere, have others; the prompt's own are shared."""
    ids, root = list(range(100)), b"r" * 32
    plain = chain_hashes(ids, root=root)
    warm = sequence_hashes(ids, 40, root=root, warm=True)

    assert warm[:2] == plain[:2]
    assert not set(warm[2:]) & set(plain)
    assert not set(warm[2:]) & set(sequence_hashes(ids, 60, root=root, warm=True))
    assert warm[2:] == chain_hashes(ids[32:], root=root, start=answer_start(plain[1]))
    assert sequence_hashes(ids, 40, root=root, warm=False) == plain
    assert sequence_hashes(ids[:8], 8, root=root, warm=True) == []
