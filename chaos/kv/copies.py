"""Campaigns: a copy between pools is cut before any of its pieces, its process killed, its pools gone."""

from __future__ import annotations

import os
import select
import signal

from chaos.kv.kills import child, die, outcome
from chaos.kv.memory import LEASE_S, LENGTH, Store, at_piece, get, put, settle, stored, take
from chaos.kv.model import HOST, LAYOUT, NBYTES, Ground, Tally, chain, content
from kvstore.errors import PoolGone
from kvstore.handoff import copy_blocks
from kvstore.pool import BlockPool
from kvstore.shm import attach, detach
from kvstore.tiers import Staging
from schemas.messages import BlockRef


def cuts(ground: Ground, tally: Tally, rounds: int) -> None:
    """A copy is told to stop before a piece, or its source changes there: nothing of it is used."""
    for round_ in range(rounds):
        of, piece, changes = chain(round_, LENGTH), ground.rng.randrange(LENGTH), round_ % 2 == 1
        kind = "a source that changes within a copy" if changes else "a copy cut before a piece"
        with stored(ground, of) as store:
            ticket = store.ticket()
            reached: list[int] = []
            found = store.tier.lookup(ticket, of.hashes, of.parents, 0.0, LEASE_S)
            victim = found.refs[ground.rng.randrange(piece, LENGTH)].index

            def strike(
                store: Store = store, changes: bool = changes, victim: int = victim, reached: list[int] = reached
            ) -> bool:
                reached.append(victim)
                if changes:
                    store.tier.pool.view()[victim * NBYTES] ^= 1
                return not changes

            came = take(store, of, found, tally, should_stop=at_piece(piece, strike))
            tally.fault(kind, effective=came == 0 and bool(reached))
            tally.expect(came == 0, f"{kind}: it is used")
            store.tier.release(ticket)
            settle(store, tally)
            put(store, of)
            tally.expect(get(store, of, tally) == LENGTH, f"{kind}: the chain cannot be had afterwards")
            settle(store, tally)


def kills(ground: Ground, tally: Tally, rounds: int) -> None:
    """The process that copies into staging is killed before a piece, or before it commits."""
    kind = "a copy whose process is killed"
    for round_ in range(rounds):
        of = chain(round_, LENGTH)
        with stored(ground) as store:
            tier, engine, ticket = store.tier, store.engine, store.ticket()
            staging = tier.reserve(ticket, of.hashes, of.parents, 0.0, LEASE_S, writer="dead")
            lent = engine.allocate(2 * LENGTH)
            for digest, block in zip(of.hashes, lent[::2], strict=True):
                engine.view()[block * NBYTES : (block + 1) * NBYTES] = content(digest)
            code, began = _killed(store, staging, engine.refs(lent[::2]), piece=round_ % (LENGTH + 1))
            tally.fault(kind, effective=began and code == -signal.SIGKILL)
            engine.free(lent)
            tally.expect(get(store, of, tally) == 0, f"{kind}: staging is seen")
            late = tier.expire(LEASE_S + 1.0)
            tally.expect(late == [ticket] and tier.pool.num_quarantined == LENGTH, f"{kind}: its blocks are lent again")
            tally.balance(tier)
            tally.expect(tier.writer_gone("dead") == LENGTH, f"{kind}: its blocks do not come back")
            settle(store, tally)
            put(store, of, 10.0)
            tally.expect(get(store, of, tally, 10.0) == LENGTH, f"{kind}: the chain cannot be stored afterwards")
            settle(store, tally)


def _killed(store: Store, staging: Staging, source: list[BlockRef], piece: int) -> tuple[int, bool]:
    """Copy in a process that dies before a piece; returns its exit code, and whether it came that far."""
    ready, tell = os.pipe()

    def dies() -> bool:
        os.write(tell, b"x")
        die()
        return True

    def work() -> None:
        from_, to = attach(store.engine.handle()), attach(store.tier.pool.handle())
        copy_blocks(from_, source, to, staging.refs, should_stop=at_piece(piece, dies))
        dies()

    pid = child(work)
    os.close(tell)
    began = bool(select.select([ready], [], [], 30.0)[0]) and os.read(ready, 1) == b"x"
    code = outcome(pid)
    os.close(ready)
    return code, began


def gone_pools(ground: Ground, tally: Tally, rounds: int) -> None:
    """The other side of a copy is not there any more, or its file is another incarnation's, or another size."""
    for round_ in range(rounds):
        pool = BlockPool.create(ground.memory, "chaos-gone", 8, NBYTES, LAYOUT, f"g{round_}", HOST)
        handle, after = pool.handle(), None
        tally.expect(attach(handle).num_blocks == 8, "a pool that is gone: it is not there at first")
        match round_ % 3:
            case 0:
                kind = "a pool that is gone"
                pool.close()
            case 1:
                kind = "a pool of another incarnation"
                pool.close()
                after = BlockPool.create(ground.memory, "chaos-gone", 8, NBYTES, LAYOUT, f"h{round_}", HOST)
                os.rename(after.handle().path, handle.path)
            case _:
                kind = "a pool of another size"
                detach()
                os.truncate(handle.path, os.stat(handle.path).st_size + 4096)
        try:
            attach(handle)
            refused = False
        except PoolGone:
            refused = True
        tally.fault(kind, effective=refused)
        tally.expect(refused, f"{kind}: it can be mapped")
        tally.balance(pool)
        pool.close()
        if after is not None:
            os.unlink(handle.path)
            after.close()
        detach()
