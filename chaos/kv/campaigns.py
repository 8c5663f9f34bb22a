"""All campaigns in this process: each on ground of its own, from a generator of its own, so that any runs by itself."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

from chaos.kv import copies, damage, kills, memory, notes, refusals
from chaos.kv.model import Ground, Tally

SHARED_MEMORY = Path("/dev/shm")
QUICK = 8  # a quick run does one round in so many


class Work(Protocol):
    """Does so many rounds of something, and notes what came of it."""

    def __call__(self, ground: Ground, tally: Tally, rounds: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Campaign:
    """Something to do to a store, and how often."""

    name: str
    work: Work
    rounds: int


# Those that fork come first: no thread is there yet.
CAMPAIGNS: dict[str, Campaign] = {
    c.name: c
    for c in (
        Campaign("killed-writers", kills.writers, 120),
        Campaign("killed-any-moment", kills.any_moment, 30),
        Campaign("killed-pool-owners", kills.pool_owners, 30),
        Campaign("killed-copies", copies.kills, 60),
        Campaign("disk-flips", damage.flips, 300),
        Campaign("disk-cuts", damage.cuts, 150),
        Campaign("disk-mix-ups", damage.mix_ups, 100),
        Campaign("short-reads", damage.short_reads, 100),
        Campaign("disk-eviction", damage.disk_flood, 80),
        Campaign("refusals", refusals.refusals, 260),
        Campaign("full-disk", refusals.full_disk, 30),
        Campaign("two-owners", refusals.two_owners, 20),
        Campaign("two-disk-writers", refusals.two_writers, 40),
        Campaign("memory-flips", memory.flips, 150),
        Campaign("host-writers", memory.writers, 100),
        Campaign("host-readers", memory.readers, 100),
        Campaign("stale-generations", memory.generations, 60),
        Campaign("full-memory", memory.full_memory, 20),
        Campaign("cut-copies", copies.cuts, 120),
        Campaign("gone-pools", copies.gone_pools, 45),
        Campaign("storms", notes.storms, 30),
    )
}


@contextmanager
def ground(name: str, seed: int) -> Iterator[Ground]:
    """Yield ground for a campaign; nothing is left of it afterwards."""
    shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    disk = Path(tempfile.mkdtemp(prefix="chaos-kv-"))
    try:
        place = Path(tempfile.mkdtemp(prefix="chaos-kv-", dir=shared))
        try:
            yield Ground(disk, place, random.Random(f"{seed} {name}"))
        finally:
            shutil.rmtree(place, ignore_errors=True)
    finally:
        shutil.rmtree(disk, ignore_errors=True)


def run(campaign: Campaign, seed: int, *, quick: bool = False) -> Tally:
    """Run one campaign."""
    tally = Tally()
    with ground(campaign.name, seed) as place:
        campaign.work(place, tally, rounds(campaign, quick))
    return tally


def rounds(campaign: Campaign, quick: bool) -> int:
    """Return how many rounds a campaign takes."""
    return max(2, campaign.rounds // QUICK) if quick else campaign.rounds


# --- proof that a campaign can find something ---------------------------------------------------------


def _always(*_: object) -> bool:
    return True


@contextmanager
def unverified() -> Iterator[None]:
    """For a while, let the tiers of this process serve what they read without looking at it."""
    with ExitStack() as stack:
        stack.enter_context(patch("kvstore.disk.reader._verified", _always))
        stack.enter_context(patch("chaos.kv.memory.whole", _always))
        yield


def _blind(ground: Ground, tally: Tally, rounds: int) -> None:
    notes.storms(ground, tally, rounds, blind=True)


# Without verification each of these must find wrong bytes, or it would find none if there were some.
BLIND: tuple[Campaign, ...] = (
    Campaign("disk-flips", damage.flips, 40),
    Campaign("disk-mix-ups", damage.mix_ups, 20),
    Campaign("memory-flips", memory.flips, 20),
    Campaign("host-readers", memory.readers, 20),
    Campaign("storms", _blind, 4),
)


def self_check(seed: int, say: Callable[[str], None]) -> dict[str, int]:
    """Return how many wrong blocks each campaign finds where nothing is verified; none may find nothing."""
    found = {}
    for campaign in BLIND:
        tally = Tally()
        with unverified(), ground(campaign.name, seed) as place:
            campaign.work(place, tally, campaign.rounds)
        found[campaign.name] = tally.num_wrong
        say(f"  without verification {campaign.name} finds {tally.num_wrong} wrong blocks")
    return found
