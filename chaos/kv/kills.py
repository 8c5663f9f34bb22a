"""Campaigns: processes that own or write a tier are killed, at each step of a write and at any other moment."""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from chaos.kv.model import HOST, LAYOUT, NBYTES, Ground, Tally, blocks, chain, heals, leftovers, open_tier, opened, read
from kvstore.errors import PoolGone
from kvstore.pool import BlockPool
from kvstore.shm import AttachedPool, reap

LENGTH = 4
# Name of a step of a write, which occurrence of it, and how many blocks of that write are there afterwards.
STEPS = (
    ("created", 1, 0), *(("record", n + 1, 0) for n in range(LENGTH)), ("written", 1, 0), ("renamed", 1, LENGTH),
    ("inserted", 1, LENGTH),
)  # fmt: skip
NOT_KILLED = 70
CHURN = 40  # chains that a writer goes through in turn


def child(work: Callable[[], None]) -> int:
    """Run something in a process of its own, which is to be killed; returns its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(NOT_KILLED)
    return pid


def outcome(pid: int) -> int:
    """Wait for a process; returns its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die() -> None:
    """Be killed here and now."""
    os.kill(os.getpid(), signal.SIGKILL)


def writers(ground: Ground, tally: Tally, rounds: int) -> None:
    """A writer is killed at a step of its second write: all of that write is there, or nothing."""
    place = ground.disk / "tier"
    for round_ in range(rounds):
        name, occurrence, kept = STEPS[round_ % len(STEPS)]
        first, second = chain(2 * round_, LENGTH), chain(2 * round_ + 1, LENGTH)

        def work(name: str = name, occurrence: int = occurrence, first: int = 2 * round_) -> None:
            _die_at(place, name, occurrence, first)

        code = outcome(child(work))
        kind = f"writer killed at {name}"
        tally.fault(kind, effective=code == -signal.SIGKILL)
        with opened(place, "next") as tier:
            tally.expect(read(tier, first, tally) == LENGTH, f"{kind}: what was stored before is lost")
            tally.expect(read(tier, second, tally) == kept, f"{kind}: it left neither all of its write nor nothing")
            tally.expect(leftovers(tier) == [], f"{kind}: an unfinished file is left")
            tally.balance(tier)
            tally.expect(heals(tier, second, tally, now=100.0), f"{kind}: the next owner cannot write")
            tally.balance(tier)
        shutil.rmtree(place)


def _die_at(place: Path, name: str, occurrence: int, first: int) -> None:
    left, armed = occurrence, False

    def step(reached: str) -> None:
        nonlocal left
        if armed and reached == name:
            left -= 1
            if left == 0:
                die()

    tier = open_tier(place, "dead", step=step)
    tier.write(blocks(chain(first, LENGTH)), 0.0)
    armed = True
    tier.write(blocks(chain(first + 1, LENGTH)), 0.0)


def any_moment(ground: Ground, tally: Tally, rounds: int) -> None:
    """A writer that stores, evicts and starts over is killed at any moment; the next owner goes on with its files."""
    place = ground.disk / "tier"
    for round_ in range(rounds):
        ready, tell = os.pipe()

        def work(tell: int = tell, epoch: str = f"w{round_}") -> None:
            _churn(place, epoch, tell)

        pid = child(work)
        os.close(tell)
        began = bool(select.select([ready], [], [], 30.0)[0]) and os.read(ready, 1) == b"x"
        time.sleep(ground.rng.random() * 0.012)
        os.kill(pid, signal.SIGKILL)
        code = outcome(pid)
        os.close(ready)
        tally.fault("writer killed at any moment", effective=began and code == -signal.SIGKILL)
        with opened(place, f"n{round_}", max_nbytes=32 * 4096) as tier:
            for name in range(CHURN):
                came = read(tier, chain(name, LENGTH), tally)
                tally.expect(came in (0, LENGTH), "writer killed at any moment: a part of its write is there")
            tally.expect(leftovers(tier) == [], "writer killed at any moment: an unfinished file is left")
            tally.balance(tier)
    shutil.rmtree(place)


def _churn(place: Path, epoch: str, tell: int) -> None:
    tier = open_tier(place, epoch, max_nbytes=32 * 4096)
    os.write(tell, b"x")
    while True:
        for name in range(CHURN):
            tier.write(blocks(chain(name, LENGTH)), 0.0)


def pool_owners(ground: Ground, tally: Tally, rounds: int) -> None:
    """The owner of a pool in shared memory is killed: its file is known to be nobody's, and is removed once."""
    for round_ in range(rounds):
        ready, tell = os.pipe()
        epoch = f"p{round_}"

        def work(tell: int = tell, epoch: str = epoch) -> None:
            pool = BlockPool.create(ground.memory, "chaos-pool", 8, NBYTES, LAYOUT, epoch, HOST)
            os.write(tell, b"x")
            signal.pause()
            pool.close()

        pid = child(work)
        os.close(tell)
        began = bool(select.select([ready], [], [], 30.0)[0]) and os.read(ready, 1) == b"x"
        os.close(ready)
        kept = reap(ground.memory, "headrace-chaos-pool", set())
        tally.expect(kept == [], "pool owner killed: its file was removed while it lived")
        probe = BlockPool.create(ground.memory, "chaos-probe", 8, NBYTES, LAYOUT, epoch, HOST)
        path = str(ground.memory / f"headrace-chaos-pool-{epoch}")
        handle = probe.handle().model_copy(update={"path": path})
        attached = AttachedPool(handle)
        tally.expect(attached.present(), "pool owner killed: its file is not there while it lives")
        os.kill(pid, signal.SIGKILL)
        tally.fault("pool owner killed", effective=began and outcome(pid) == -signal.SIGKILL)
        gone = reap(ground.memory, "headrace-chaos-pool", set())
        tally.expect(len(gone) == 1 and not attached.present(), "pool owner killed: its file is left")
        try:
            AttachedPool(handle)
            tally.expect(False, "pool owner killed: it can be mapped again")
        except PoolGone:
            pass
        tally.balance(probe)
        probe.close()
