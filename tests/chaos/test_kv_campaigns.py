"""The campaigns against a store: nothing is wrong, every one of them strikes, and without verification they see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.kv.blind import spoil
from chaos.kv.campaigns import BLIND, CAMPAIGNS, SHARED_MEMORY, Campaign, ground, run, unverified
from chaos.kv.model import Tally, blocks, chain, opened, read
from chaos.kv.wire import Wire
from runtime.actor import Actor
from schemas import messages as m
from schemas.subjects import Ref

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here actors are driven step by step on a loop that nobody else waits for."""
    yield


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_strikes_and_finds_nothing_wrong(name: str) -> None:
    """A few rounds of each."""
    tally = run(replace(CAMPAIGNS[name], rounds=5 if name != "storms" else 1), seed=7)

    assert tally.ok, tally.violations
    assert tally.skipped or sum(tally.effective.values()) > 0
    assert tally.skipped or tally.ledgers > 0


@pytest.mark.slow
@pytest.mark.parametrize("campaign", BLIND, ids=lambda campaign: str(campaign.name))
def test_without_verification_wrong_bytes_are_found(campaign: Campaign) -> None:
    """So a campaign that finds nothing means something."""
    tally = Tally()
    with unverified(), ground(campaign.name, 1) as place:
        campaign.work(place, tally, campaign.rounds)

    assert tally.num_wrong > 0


def test_verification_is_back_afterwards(tmp_path: Path) -> None:
    """The private build lasts as long as it is asked for."""
    with unverified():
        pass
    of, tally = chain(1, 2), Tally()
    with opened(tmp_path / "tier") as tier:
        tier.write(blocks(of), 0.0)
        (path,) = tier.folder.glob("segment-*")
        data = bytearray(path.read_bytes())
        data[300] ^= 1
        path.write_bytes(data)

        assert read(tier, of, tally) == 0 and tally.ok


def test_the_same_seed_does_the_same() -> None:
    """Faults and what they did are equal, one by one."""
    campaign = replace(CAMPAIGNS["memory-flips"], rounds=3)
    one, two, other = run(campaign, 3), run(campaign, 3), run(campaign, 4)

    assert (one.performed, one.effective, one.blocks_compared) == (two.performed, two.effective, two.blocks_compared)
    assert one.ok and two.ok and other.ok


def test_nothing_is_left_of_a_campaign() -> None:
    """Neither files nor shared memory."""
    before = set(SHARED_MEMORY.glob("chaos-kv-*"))
    with ground("x", 1) as place:
        assert place.disk.is_dir() and place.memory.is_dir()

    assert not place.disk.exists() and not place.memory.exists()
    assert set(SHARED_MEMORY.glob("chaos-kv-*")) <= before


class Listener(Actor):
    """Keeps what comes."""

    kind = "kv"

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        """Note a ticket."""
        assert isinstance(message, m.KvRelease)
        self.tickets = [*getattr(self, "tickets", []), int(message.ticket)]


async def sent(trouble: float, count: int) -> tuple[list[int], Tally]:
    """Send numbered messages over a wire; returns what came, and the book."""
    with ground("wire", 5) as place:
        tally = Tally()
        wire = Wire(place.rng, tally, trouble)
        listener = Listener(wire.context("kv", "a"))
        await wire.seat(listener)
        for number in range(count):
            wire.context("both", "b").send(listener.ref, m.KvRelease(ticket=str(number)))
        await wire.settle()
        wire.trouble = 0.0
        await wire.settle()  # who let others pass comes too
        await wire.close()
    return list(listener.tickets), tally


async def test_a_good_wire_delivers_in_order() -> None:
    """Nothing is noted then."""
    came, tally = await sent(0.0, 50)

    assert came == list(range(50)) and not tally.performed


async def test_a_bad_wire_loses_doubles_and_overtakes_as_much_as_it_says() -> None:
    """What it notes is what happened."""
    came, tally = await sent(0.1, 500)

    lost = 500 - len(set(came))
    assert lost == tally.effective["KvRelease lost"] > 0
    assert len(came) - len(set(came)) == tally.effective["KvRelease doubled"] > 0
    assert came != sorted(came) and tally.effective["KvRelease overtaken"] > 0


async def test_a_message_to_a_dead_incarnation_reaches_nobody() -> None:
    """Its successor has another address."""
    with ground("wire", 5) as place:
        tally = Tally()
        wire = Wire(place.rng, tally, 0.0)
        first = Listener(wire.context("kv", "a"))
        await wire.seat(first)
        await wire.kill(first)
        second = Listener(wire.context("kv", "c"))
        await wire.seat(second)
        wire.context("both", "b").send(first.ref, m.KvRelease(ticket="1"))
        await wire.settle()

        assert not hasattr(first, "tickets") and not hasattr(second, "tickets") and tally.ok


def test_an_instance_without_verification_serves_what_is_spoilt(tmp_path: Path) -> None:
    """Every block of a spoilt segment is wrong; a tier that verifies serves none of them."""
    of = chain(1, 4)
    for verify, count in ((False, 4), (True, 0)):
        tally = Tally()
        with opened(tmp_path / str(verify), verify=verify) as tier:
            tier.write(blocks(of), 0.0)
            (path,) = tier.folder.glob("segment-*")
            assert spoil(path) >= 4

            read(tier, of, tally)

        assert tally.num_wrong == count


def test_what_is_gone_is_not_spoilt(tmp_path: Path) -> None:
    """A segment may be evicted at any moment."""
    assert spoil(tmp_path / "segment-1") == 0
