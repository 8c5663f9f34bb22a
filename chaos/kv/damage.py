"""Campaigns: bytes and files change under a disk tier, while it runs and while it does not."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos.kv.faulty import FaultyFiles
from chaos.kv.model import STRIDE, Chain, Ground, Tally, blocks, chain, heals, leftovers, open_tier, read, segments
from kvstore.disk.tier import DiskTier
from kvstore.record import HEADER_NBYTES

LENGTH = 4


@contextmanager
def stored(ground: Ground, of: Chain, **options: Any) -> Iterator[tuple[DiskTier, Path]]:
    """Yield a tier with one segment that holds a chain, and the segment; nothing is left of them afterwards."""
    place = ground.disk / "tier"
    tier = open_tier(place, **options)
    tier.write(blocks(of), 0.0)
    try:
        yield tier, segments(tier)[0]
    finally:
        tier.close()
        shutil.rmtree(place, ignore_errors=True)


def flip(path: Path, offset: int, bit: int) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def after(tier: DiskTier, of: Chain, tally: Tally, kind: str, *, restart: bool, most: int) -> None:
    """Read what was damaged, perhaps by another incarnation, twice; then store it again, and read it whole."""
    if restart:
        tier.close()
        tier = open_tier(tier.directory, "e2")
    came = read(tier, of, tally)
    tally.fault(kind, effective=came < len(of))
    tally.expect(came <= most, f"{kind}: {came} blocks came, {most} are whole")
    tally.expect(read(tier, of, tally) <= came, f"{kind}: what was bad is good at the second read")
    tally.balance(tier)
    tally.expect(heals(tier, of, tally, now=1000.0), f"{kind}: a good copy does not take the place of the bad one")
    tally.balance(tier)
    tally.expect(leftovers(tier) == [], f"{kind}: unfinished files are left")
    if restart:
        tier.close()


def flips(ground: Ground, tally: Tally, rounds: int) -> None:
    """One bit anywhere in a header or a payload."""
    rng = ground.rng
    for round_ in range(rounds):
        of, record, header = chain(round_, LENGTH), rng.randrange(LENGTH), round_ % 2 == 0
        within = rng.randrange(HEADER_NBYTES) if header else rng.randrange(HEADER_NBYTES, STRIDE)
        with stored(ground, of) as (tier, path):
            flip(path, record * STRIDE + within, rng.randrange(8))
            kind = "bit flip in a header" if header else "bit flip in a payload"
            after(tier, of, tally, kind, restart=rng.random() < 0.5, most=record)


def cuts(ground: Ground, tally: Tally, rounds: int) -> None:
    """A segment loses its end, at any place."""
    for round_ in range(rounds):
        of = chain(round_, LENGTH)
        nbytes = ground.rng.randrange(LENGTH * STRIDE)
        with stored(ground, of) as (tier, path):
            with path.open("r+b") as file:
                file.truncate(nbytes)
            after(tier, of, tally, "truncation", restart=ground.rng.random() < 0.5, most=nbytes // STRIDE)


def mix_ups(ground: Ground, tally: Tally, rounds: int) -> None:
    """Sound records and payloads lie where others belong; files are noise, another's, or gone."""
    for round_ in range(rounds):
        of = chain(round_, LENGTH)
        with stored(ground, of) as (tier, path):
            kind, most = mix_up(ground.rng, tier, path, round_)
            after(tier, of, tally, kind, restart=False, most=most)


def mix_up(rng: random.Random, tier: DiskTier, path: Path, number: int) -> tuple[str, int]:
    """Do one such thing; returns its name and how many blocks are where they belong."""
    data = bytearray(path.read_bytes())
    one, two = sorted(rng.sample(range(LENGTH), 2))
    match number % 5:
        case 0:
            first, second = slice(one * STRIDE, (one + 1) * STRIDE), slice(two * STRIDE, (two + 1) * STRIDE)
            data[first], data[second] = data[second], data[first]
            path.write_bytes(data)
            return "records swapped", one
        case 1:
            first = slice(one * STRIDE + HEADER_NBYTES, (one + 1) * STRIDE)
            second = slice(two * STRIDE + HEADER_NBYTES, (two + 1) * STRIDE)
            data[first], data[second] = data[second], data[first]
            path.write_bytes(data)
            return "payloads swapped", one
        case 2:
            path.write_bytes(rng.randbytes(len(data)))
            return "a segment of noise", 0
        case 3:
            tier.write(blocks(chain(100_000 + number, LENGTH)), 0.0)
            path.write_bytes(segments(tier)[-1].read_bytes())
            return "another's segment in its place", 0
        case _:
            path.unlink()
            return "a segment removed", 0


def short_reads(ground: Ground, tally: Tally, rounds: int) -> None:
    """The system reads less than it was asked for, and says so; the rest of the memory is what it was."""
    for round_ in range(rounds):
        of, files = chain(round_, LENGTH), FaultyFiles()
        nbytes = ground.rng.randrange(LENGTH * STRIDE)
        with stored(ground, of, files=files) as (tier, _):
            files.plan("read", lambda asked, nbytes=nbytes: nbytes)  # type: ignore[misc]
            after(tier, of, tally, "short read", restart=False, most=nbytes // STRIDE)


def disk_flood(ground: Ground, tally: Tally, rounds: int) -> None:
    """Writers need the room of a segment while it is being read; for some readers the lease ends meanwhile."""
    for round_ in range(rounds):
        of, files, lapses = chain(round_, LENGTH), FaultyFiles(), ground.rng.random() < 0.6
        cap = 5 * 4096
        with stored(ground, of, files=files, max_nbytes=cap) as (tier, path):
            extra = [chain(200_000 + 10 * round_ + i, LENGTH) for i in range(6)]

            def flood(asked: int, tier: DiskTier = tier, lapses: bool = lapses, extra: list[Chain] = extra) -> int:
                if lapses:
                    tier.expire(1000.0)
                for other in extra:
                    tier.write(blocks(other), 0.0)
                return asked

            files.plan("read", flood)
            came = read(tier, of, tally)
            evicted = tier.statistics()["evicted_total"] > 0
            kind = "eviction under a reader whose lease ends" if lapses else "eviction under a reader"
            tally.fault(kind, effective=evicted and (came == 0) == lapses)
            tally.expect(came == (0 if lapses else LENGTH), f"{kind}: {came} blocks came")
            tally.expect(path.exists() != lapses, f"{kind}: its file is {'there' if lapses else 'gone'}")
            for other in (of, *extra):
                read(tier, other, tally)
            tally.balance(tier)
