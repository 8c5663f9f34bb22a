"""Tenants in the store of a whole instance, in virtual time: whose blocks are whose, and who goes for whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import SCRIPT, Fleet, answer, fleet

from actors.admission import AdmissionActor
from actors.kv_disk import DiskConfig
from engine.scripted_runner import ScriptedRunner
from kvstore.block import BLOCK_TOKENS
from kvstore.owners import Quotas
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import messages as m
from schemas.subjects import Ref
from schemas.tenants import owner_of

PROMPT = "the water that turns the wheel comes down the headrace " * 4
BLOCKS = len(PROMPT) // BLOCK_TOKENS
COUNT = 5


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, blocks: int = 0, disk_nbytes: int = 0) -> Any:
    """Run `scenario(fleet)` where each tenant may have so many blocks in host memory and bytes on disk."""
    config = DiskConfig(directory / "disk", 1 << 30, keep_all=True, quotas=Quotas(disk_nbytes))

    async def main(clock: VirtualClock) -> Any:
        quotas = Quotas(blocks * block_nbytes())
        async with fleet(clock, directory, disk=config, quotas=quotas, prefill=0, decode=1) as f:
            for node in f.nodes.values():
                for actor in node.actors:
                    if isinstance(actor, AdmissionActor):
                        actor.config = dataclasses.replace(actor.config, tenant_header="x-tenant")
            await f.system.clock.sleep(2.0)
            return await scenario(f)

    return run_virtual(main)


def block_nbytes() -> int:
    """Bytes of a block of the scripted engine."""
    return ScriptedRunner(SCRIPT).block_nbytes


async def ask(f: Fleet, tenant: str, prompt: str = PROMPT) -> int:
    """Ask as a tenant, check the text; returns the cached tokens."""
    stream = await f.ask(prompt, max_tokens=COUNT, headers={"X-Tenant": tenant})
    await f.end(stream)
    await f.rest()
    assert stream.error is None and stream.text == answer(prompt, COUNT)
    await f.system.clock.sleep(2.0)
    f.actor("kv-0")._tier.check_integrity()
    f.actor("kv-0")._disk._disk.check_integrity()
    assert stream.terminal is not None
    return int(stream.terminal["usage"]["cached_tokens"])


def held(f: Fleet, tier: str = "host") -> dict[bytes, int]:
    """Blocks, or bytes on disk, by owner."""
    rows, others = f.actor("kv-0").owners()[tier]
    assert others.count == 0
    return {row.owner: row.nbytes // block_nbytes() if tier == "host" else row.nbytes for row in rows}


def test_blocks_belong_to_who_asked_and_stay_so_on_disk(tmp_path: Path) -> None:
    """From the request to the file and back into host memory after a restart of everything."""

    async def first(f: Fleet) -> None:
        await ask(f, "a")
        await ask(f, "b", PROMPT[:64])
        assert held(f) == {owner_of("a"): BLOCKS, owner_of("b"): 4}
        await f.system.until(lambda: len(held(f, "disk")) == 2, limit_s=10.0)

    async def again(f: Fleet) -> None:
        assert held(f) == {} and held(f, "disk").keys() == {owner_of("a"), owner_of("b")}
        assert await ask(f, "a") > 0
        assert held(f) == {owner_of("a"): BLOCKS}

    simulate(first, tmp_path)
    simulate(again, tmp_path)


@pytest.mark.slow
def test_a_tenant_that_asks_for_much_pushes_out_its_own(tmp_path: Path) -> None:
    """The other one's prefix is there still, though it is the oldest; the page of metrics says whose is what."""

    async def scenario(f: Fleet) -> None:
        await ask(f, "quiet", PROMPT[:160])
        for i in range(6):
            await ask(f, "loud", f"number {i}: " + PROMPT)
        assert held(f) == {owner_of("quiet"): 10, owner_of("loud"): 20}
        await f.kill("decode-0")
        await f.system.clock.sleep(3.0)
        assert await ask(f, "quiet", PROMPT[:160]) == 9 * BLOCK_TOKENS
        page = f.nodes["kv-0"].render_metrics()
        assert f'kv_tenant_bytes{{tenant="{owner_of("loud").hex()}",tier="host"}} {20.0 * block_nbytes()}' in page
        assert "loud" not in page

    simulate(scenario, tmp_path, blocks=20)


@pytest.mark.slow
def test_the_disk_s_quota_holds_in_a_whole_instance(tmp_path: Path) -> None:
    """And what is not kept is computed."""
    limit = 40_000

    async def scenario(f: Fleet) -> None:
        for i in range(8):
            await ask(f, "loud", f"number {i}: " + PROMPT)
        await ask(f, "quiet")
        await f.system.clock.sleep(3.0)
        used = held(f, "disk")
        assert 0 < used[owner_of("loud")] <= limit and 0 < used[owner_of("quiet")] <= limit
        assert sum(used.values()) == sum(p.stat().st_blocks * 512 for p in tmp_path.glob("disk/*/segment-*"))

    simulate(scenario, tmp_path, disk_nbytes=limit)


async def status(f: Fleet, top: int = 10) -> m.KvStatus:
    """Ask the store what it holds."""
    me = Ref("tool", "kv", "0123456789abcdef")
    answers = await f.system.tap(me.subject)
    f.system.send(f.actor("kv-0").ref, m.KvStatusQuery(ticket="t", reply=me, top=top))
    await f.system.until(lambda: bool(answers))
    assert isinstance(answers[0], m.KvStatus) and answers[0].ticket == "t"
    return answers[0]


@pytest.mark.slow
def test_the_store_says_what_it_holds_and_what_was_found(tmp_path: Path) -> None:
    """Tiers, hit rates, prefixes and tenants, and no name or text among them."""

    async def scenario(f: Fleet) -> None:
        empty = await status(f)
        assert [(t.kind, t.blocks) for t in empty.tiers] == [("host", 0), ("disk", 0)] and not empty.prefixes
        await ask(f, "a")
        await ask(f, "b", "another thing " * 4)
        for _ in range(2):
            await f.kill("decode-0")
            await f.system.clock.sleep(3.0)
            assert await ask(f, "a", PROMPT[:100]) == 96

        found = await status(f)

        host, disk = found.tiers
        assert (host.kind, host.hits, host.blocks) == ("host", 12, BLOCKS + 3)
        assert host.nbytes == (BLOCKS + 3) * block_nbytes()
        assert host.max_nbytes == 64 * block_nbytes() and disk.blocks == BLOCKS + 3 and disk.nbytes > 0
        assert (found.lookups, found.found) == (2, 2)
        head = f.actor("kv-0")._tier.dump().hashes[0]
        assert [(p.head, p.owner, p.tokens, p.hits) for p in found.prefixes] == [(head, owner_of("a"), 96, 2)]
        assert {(t.tier, t.owner) for t in found.tenants} == {
            (tier, owner_of(name)) for tier in ("host", "disk") for name in "ab"
        }
        assert all(t.limit == 64 * block_nbytes() for t in found.tenants if t.tier == "host")
        assert [t.owner for t in (await status(f, top=1)).tenants if t.tier == "host"] == [owner_of("a"), b""]

    simulate(scenario, tmp_path, blocks=64)
