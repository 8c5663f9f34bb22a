"""Campaigns: the system refuses what a disk tier asks for, one call at a time or because a disk is really full."""

from __future__ import annotations

import errno
import shutil
import threading
from dataclasses import replace

from chaos.kv.faulty import Fault, FaultyFiles, fill, small_place
from chaos.kv.model import NBYTES, Ground, Tally, blocks, chain, heals, leftovers, open_tier, opened, read
from kvstore.disk.tier import Block, DiskTier
from kvstore.errors import DiskBusy

LENGTH = 4
WRITING = ("create", "write", "sync", "rename")
READING = ("open", "read")
CODES = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EMFILE, errno.EFBIG)


def refusals(ground: Ground, tally: Tally, rounds: int) -> None:
    """An errno from any call of a write, a read or an eviction."""
    rng = ground.rng
    for round_ in range(rounds):
        operation = rng.choice((*WRITING, *WRITING, *READING, "unlink"))
        code = rng.choice(CODES if operation in WRITING else (errno.EIO, errno.EACCES))
        files = FaultyFiles()
        place = ground.disk / "tier"
        # Room for four segments of a page, where one has to go.
        cap = 5 * 4096 if operation == "unlink" else 1 << 20
        with opened(place, files=files, sync=True, max_nbytes=cap) as tier:
            first, second = chain(2 * round_, LENGTH), chain(2 * round_ + 1, LENGTH)
            tier.write(blocks(first), 0.0)
            if operation == "unlink":
                for extra in range(3):
                    tier.write(blocks(chain(300_000 + 3 * round_ + extra, LENGTH)), 0.0)
            if operation == "write":
                files.plan(operation, *[None] * rng.randrange(LENGTH), *shortened(rng.randrange(2)))
            files.plan(operation, code)
            name = f"{errno.errorcode[code]} from {operation}"
            if operation in READING:
                tally.expect(read(tier, first, tally, now=10.0) == 0, f"{name}: blocks came all the same")
            else:
                tally.expect(tier.write(blocks(second), 10.0) == 0, f"{name}: the write says that it succeeded")
                tally.expect(operation == "unlink" or not tier.health.ok, f"{name}: the tier calls itself well")
                tally.expect(read(tier, second, tally, now=10.0) == 0, f"{name}: what was not written is read")
            tally.fault(name, effective=files.struck > 0)
            tally.expect(leftovers(tier) == [], f"{name}: an unfinished file is left")
            tally.balance(tier)
            files.clear()
            for of in (first, second):
                tally.expect(heals(tier, of, tally, now=10_000.0), f"{name}: the tier does not recover")
            tally.balance(tier)
        shutil.rmtree(place)


def shortened(times: int) -> list[Fault]:
    """Return so many writes that do half of what they were asked for."""
    half: Fault = lambda asked: asked // 2  # noqa: E731 (a value among others)
    return [half] * times


def full_disk(ground: Ground, tally: Tally, rounds: int) -> None:
    """Something else fills the file system, for good or while a write goes on; then it goes away."""
    place = ground.disk / "small"
    with small_place(place, 256 * 1024) as mounted:
        if not mounted:
            tally.skipped["full file system"] = "mounting is not allowed here"
            return
        with opened(place / "kv") as tier:
            now = 0.0
            for round_ in range(rounds):
                of = chain(round_, LENGTH)
                code = fill(place / "hog")
                wrote = tier.write(blocks(of), now)
                struck = code == errno.ENOSPC and tier.statistics()["errno"] == errno.ENOSPC
                tally.fault("full file system", effective=wrote == 0 and struck)
                tally.expect(leftovers(tier) == [], "full file system: an unfinished file is left")
                read(tier, chain(max(0, round_ - 1), LENGTH), tally, now=now)
                (place / "hog").unlink()
                now += 1000.0
                tally.expect(heals(tier, of, tally, now=now), "full file system: the tier does not recover")
                tally.balance(tier)
                now += 1000.0


def two_owners(ground: Ground, tally: Tally, rounds: int) -> None:
    """A second owner of a directory is told so, changes nothing, and takes over once the first is gone."""
    place, of = ground.disk / "tier", chain(1, LENGTH)
    for round_ in range(rounds):
        first = open_tier(place, "first")
        first.write(blocks(of), 0.0)
        second = DiskTier(place, layout="chaos-1", block_nbytes=NBYTES, epoch="second", max_nbytes=1 << 20)
        try:
            second.open(0.0)
            refused = False
        except DiskBusy:
            refused = True
        tally.fault("a second owner", effective=refused)
        tally.expect(refused, "a second owner: it was let in")
        tally.expect(second.write(blocks(chain(2 + round_, LENGTH)), 0.0) == 0, "a second owner: it has written")
        tally.expect(read(first, of, tally) == LENGTH, "a second owner: the first one has lost blocks")
        tally.balance(first)
        first.close()
        tally.expect(second.probe(1000.0), "a second owner: it cannot follow the first")
        tally.expect(read(second, of, tally) == LENGTH, "a second owner: it finds less than was stored")
        tally.balance(second)
        second.close()
        shutil.rmtree(place)


def two_writers(ground: Ground, tally: Tally, rounds: int) -> None:
    """Two threads store one chain at once; or one of them brings bytes that are not what their checksum says."""
    place = ground.disk / "tier"
    for round_ in range(rounds):
        of, foul = chain(round_, LENGTH), ground.rng.random() < 0.5
        good = blocks(of)
        at = ground.rng.randrange(LENGTH)
        bad = list(good)
        if foul:
            bad[at] = replace(good[at], data=memoryview(bytes(NBYTES)))
        with opened(place) as tier:
            counts = at_once(tier, bad, good)
            kind = "a writer with other bytes than it says" if foul else "two writers of one block"
            rejected = tier.statistics()["rejected_total"]
            tally.fault(kind, effective=rejected > 0 if foul else sorted(counts) == [0, LENGTH])
            tally.expect(sum(counts) == LENGTH, f"{kind}: {counts} blocks were inserted, {LENGTH} are there")
            tally.expect(read(tier, of, tally) == LENGTH, f"{kind}: a block is missing")
            tally.balance(tier)
        shutil.rmtree(place)


def at_once(tier: DiskTier, *parts: list[Block]) -> list[int]:
    """Write batches in threads of their own; returns how many blocks each inserted, in the order of their ends."""
    counts: list[int] = []

    def write(part: list[Block]) -> None:
        counts.append(tier.write(part, 0.0))

    threads = [threading.Thread(target=write, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts
