"""A campaign on a whole store: the actors of store and transfer, an engine's side with its index, and a bad wire.

Reservations, commits, look-ups, releases, jobs, events and dumps are lost, doubled and overtaken; leases end between
two steps; the store, the transfer actor and the index die and come back; bits change in shared memory. An engine uses a
block if the transfer actor says that it is what was stored, and does what `actors.prefix` does where no answer comes.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from actors.kv import KvActor
from actors.kv_index import KvIndex
from actors.transfer import TransferActor
from chaos.kv.model import HOST, LAYOUT, NBYTES, Chain, Ground, Tally, chain, content
from chaos.kv.wire import Wire
from kvstore.pool import BlockPool
from kvstore.shm import detach
from kvstore.tiers import HostTier
from runtime.actor import Actor, Context
from schemas import messages as m
from schemas.record import Fence
from schemas.subjects import Ref

LENGTH = 4
NUM_CHAINS = 12
NUM_BLOCKS = 24  # half of all chains
STEPS = 40
STEP_S = 0.6
TROUBLE = 0.05
TRIES, MANY = 3, 200
NOBODY = Fence(0, "", 0)

M = TypeVar("M", bound=m.Message)


class Engine(Actor):
    """The engine's side of a store: a pool, the index that it follows, and the answers that came."""

    kind: ClassVar[str] = "both"

    def __init__(self, context: Context, pool: BlockPool) -> None:
        super().__init__(context)
        self.pool = pool
        self.index = KvIndex(context)
        self.answers: dict[tuple[str, str], m.Message] = {}

    async def start(self) -> None:
        """Follow the store."""
        await self.index.start()
        self.state = "ready"

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        """Keep an answer, or give it to the index."""
        if isinstance(message, m.KvDump):
            self.index.on_dump(message, sender)
        else:
            name = str(getattr(message, "ticket", "") or getattr(message, "job", ""))
            self.answers[type(message).__name__, name] = message

    def tick(self) -> None:
        """Ask for what is missing."""
        self.index.tick(self.clock.now())

    def member_down(self, ref: Ref, reason: str) -> None:
        """Forget a store that is gone."""
        self.index.member_down(ref)

    def answer(self, kind: type[M], ticket: str) -> M | None:
        """Return an answer that has come, once."""
        found = self.answers.pop((kind.__name__, ticket), None)
        return found if isinstance(found, kind) else None


@dataclass(slots=True)
class World:
    """One store with everybody around it."""

    ground: Ground
    tally: Tally
    wire: Wire
    number: int
    engine: Engine
    kv: KvActor
    transfer: TransferActor
    blind: bool = False  # do without what the transfer actor compares
    busy: bool = False  # nothing happens between two steps now
    corrupt: int = 0  # copies that were not what was stored
    counter: Any = field(default_factory=itertools.count)

    def ticket(self) -> str:
        """Return a name that was not used before."""
        return f"w{self.number}.{next(self.counter)}"

    @property
    def tier(self) -> HostTier | None:
        """The store's host tier, once it is made."""
        return self.kv._tier

    # --- what an engine does --------------------------------------------------------------------

    async def introduce(self) -> None:
        """Show the store the layout of the blocks."""
        hello = m.KvReserve(
            ticket=self.ticket(), hashes=[], parents=[], pool=self.engine.pool.handle(), reply=self.engine.ref
        )
        self.engine.context.send(self.kv.ref, hello)
        await self.wire.settle()

    async def store(self, of: Chain) -> bool:
        """Write a chain to the store; returns whether a commit was sent for it."""
        engine, ticket = self.engine, self.ticket()
        lent = engine.pool.allocate(len(of))
        for digest, block in zip(of.hashes, lent, strict=True):
            engine.pool.view()[block * NBYTES : (block + 1) * NBYTES] = content(digest)
        reserve = m.KvReserve(
            ticket=ticket, hashes=of.hashes, parents=of.parents, pool=engine.pool.handle(), reply=engine.ref
        )
        engine.context.send(self.kv.ref, reserve)
        await self.wire.settle()
        await self.between()
        got = engine.answer(m.KvReserved, ticket)
        done = None
        if got is not None and got.blocks and got.pool is not None:
            refs = engine.pool.refs([lent[i] for i in got.positions])
            # Until it is known that the copy is over, staging may still be written: it is not given back before.
            mine = engine.pool.handle()
            done = await self.copy(ticket, mine, refs, got.pool, got.blocks, self.kv.ref, [], tries=MANY)
            await self.between()
        ok = done is not None and done.error is None
        sums = done.checksums if done is not None and ok else []
        engine.context.send(self.kv.ref, m.KvCommit(ticket=ticket, ok=ok, checksums=sums))
        if ok:
            engine.index.expect(self.kv.ref, of.hashes)
        await self.wire.settle()
        engine.pool.free(lent)
        return ok

    async def fetch(self, of: Chain, *, ask_index: bool) -> int:
        """Load a chain's stored prefix and compare it; returns how many blocks came."""
        engine, ticket, kv = self.engine, self.ticket(), self.kv.ref
        if ask_index and engine.index.complete(kv) and not engine.index.prefix(kv, of.hashes):
            return 0
        engine.context.send(kv, m.KvLookup(ticket=ticket, hashes=of.hashes, parents=of.parents, reply=engine.ref))
        await self.wire.settle()
        await self.between()
        got = engine.answer(m.KvFound, ticket)
        came = 0
        if got is not None and got.blocks and got.pool is not None:
            came = await self._use(of, ticket, got)
        engine.context.send(kv, m.KvRelease(ticket=ticket))
        await self.wire.settle()
        return came

    async def _use(self, of: Chain, ticket: str, got: m.KvFound) -> int:
        engine = self.engine
        assert got.pool is not None
        lent = engine.pool.allocate(len(got.blocks))
        expected = [] if self.blind else got.checksums
        refs = engine.pool.refs(lent)
        done = await self.copy(ticket, got.pool, got.blocks, engine.pool.handle(), refs, engine.ref, expected)
        if done is None:
            # Nobody says that the copy is over: these blocks are lent to nobody until somebody does.
            engine.pool.quarantine(lent, ticket)
            await self._abort(ticket)
            return 0
        if done.error is None:
            for digest, block in zip(of.hashes, lent, strict=False):
                self.tally.compare(digest, engine.pool.view()[block * NBYTES : (block + 1) * NBYTES], "wire")
        elif done.error.get("code") == "corrupt_block":
            self.corrupt += 1
        engine.pool.free(lent)
        return len(lent) if done.error is None else 0

    async def copy(
        self, ticket: str, source: m.PoolHandle, source_blocks: list[m.BlockRef], dest: m.PoolHandle,
        dest_blocks: list[m.BlockRef], to: Ref, expected: list[int], *, tries: int = TRIES,
    ) -> m.TransferDone | None:  # fmt: skip
        """Have blocks copied, asking again where no answer comes; nothing if none has come in the end."""
        job = m.TransferJob(
            request_id=ticket, fence=NOBODY, job=ticket, part=0, source=self.engine.ref, dest=to, source_pool=source,
            dest_pool=dest, source_blocks=source_blocks, dest_blocks=dest_blocks, expected=expected,
        )  # fmt: skip
        for _ in range(tries):
            self.engine.context.send(self.transfer.ref, job)
            await self.wire.settle()
            done = self.engine.answer(m.TransferDone, ticket)
            if done is not None:
                return done
        return None

    async def _abort(self, ticket: str) -> None:
        abort = m.TransferAbort(request_id=ticket, fence=NOBODY, job=ticket)
        for attempt in itertools.count():
            self.engine.context.send(self.transfer.ref, abort)
            await self.wire.settle()
            if self.engine.answer(m.TransferDone, ticket) is not None:
                break
            if not self.tally.expect(attempt < 100, "a transfer actor does not confirm an abort"):
                break
        self.engine.pool.absolve(ticket)

    # --- what happens to it ---------------------------------------------------------------------

    async def between(self) -> None:
        """Perhaps something happens between two steps of a read or a write."""
        rng = self.ground.rng
        draw = 1.0 if self.busy else rng.random()
        if draw < 0.06:
            self.tally.fault("a lease that ends between two steps", effective=self._held() > 0)
            self.pass_(11.0)
            await self.wire.settle()
            self.busy = True
            for _ in range(2):
                await self.store(chain(100 * self.number + 50 + rng.randrange(NUM_CHAINS), LENGTH))
            self.busy = False
        elif draw < 0.09:
            await self.kill_transfer()
        elif draw < 0.11:
            await self.kill_store()

    def _held(self) -> float:
        statistics = self.kv.statistics()
        return statistics.get("reads", 0.0) + statistics.get("writes", 0.0)

    def pass_(self, seconds: float) -> None:
        """Let time pass, with heartbeats and ticks at its end."""
        self.wire.clock.pass_(seconds)
        self.wire.beat()
        self.wire.tick()

    async def kill_transfer(self) -> None:
        """The transfer actor dies, and another one comes."""
        self.tally.fault("transfer actor killed", effective=True)
        await self.wire.kill(self.transfer)
        self.transfer = TransferActor(self.wire.context("transfer", self.epoch()))
        await self.wire.seat(self.transfer)
        self.wire.beat()

    async def kill_store(self) -> None:
        """The store dies with all that it holds, and an empty one comes."""
        self.tally.fault("store killed", effective=bool(self.kv.statistics().get("stored")))
        await self.wire.kill(self.kv)
        self.kv = make_store(self.ground, self.wire, self.epoch())
        await self.wire.seat(self.kv)
        self.wire.beat()
        await self.introduce()

    async def kill_index(self) -> None:
        """The engine dies with its index; the next one learns what is stored by a dump."""
        self.tally.fault("index killed", effective=self.engine.index.statistics()["hashes"] > 0)
        await self.wire.kill(self.engine)
        self.engine = Engine(self.wire.context("both", self.epoch()), self.engine.pool)
        await self.wire.seat(self.engine)
        self.wire.beat()
        self.wire.tick()
        await self.wire.settle()

    def epoch(self) -> str:
        """Return the epoch of a new incarnation."""
        return self.wire.clock.random_hex(8)

    def flip(self) -> set[bytes]:
        """Change a bit of a stored block in shared memory; returns which."""
        tier = self.tier
        if tier is None or not tier.dump().hashes:
            return set()
        ticket, digest = self.ticket(), self.ground.rng.choice(tier.dump().hashes)
        now = self.wire.clock.now()
        for header in tier.pin(ticket, [digest], now, 1.0):
            at = header.block * NBYTES + self.ground.rng.randrange(NBYTES)
            tier.pool.view()[at] ^= 1 << self.ground.rng.randrange(8)
        tier.release(ticket)
        return {digest}


def make_store(ground: Ground, wire: Wire, epoch: str) -> KvActor:
    """Return the next incarnation of the store."""
    return KvActor(wire.context("kv", epoch), directory=ground.memory, prefix="headrace-chaos-", num_blocks=NUM_BLOCKS)


async def make(ground: Ground, tally: Tally, number: int, *, trouble: float, blind: bool = False) -> World:
    """Start a world whose wire is good until everybody knows everybody."""
    wire = Wire(ground.rng, tally, 0.0)
    pool = BlockPool.create(ground.memory, "chaos-wire", 4 * LENGTH, NBYTES, LAYOUT, f"w{number}", HOST)
    engine = Engine(wire.context("both", wire.clock.random_hex(8)), pool)
    kv = make_store(ground, wire, wire.clock.random_hex(8))
    transfer = TransferActor(wire.context("transfer", wire.clock.random_hex(8)))
    world = World(ground, tally, wire, number, engine, kv, transfer, blind)
    for actor in (engine, kv, transfer):
        await wire.seat(actor)
    wire.beat()
    await world.introduce()
    wire.trouble = trouble
    return world


async def storm(world: World) -> None:
    """Write, read and hurt."""
    rng, tally = world.ground.rng, world.tally
    chains = [chain(100 * world.number + name, LENGTH) for name in range(NUM_CHAINS)]
    for _ in range(STEPS):
        of = rng.choice(chains)
        draw = rng.random()
        if draw < 0.45:
            await world.store(of)
        elif draw < 0.85:
            await world.fetch(of, ask_index=rng.random() < 0.5)
        elif draw < 0.95:
            flipped = world.flip()
            hit = [each for each in chains if flipped & set(each.hashes)]
            before = world.corrupt
            if hit:
                await world.fetch(hit[0], ask_index=False)
            tally.fault("bit flip in the memory of a store", effective=world.corrupt > before)
        else:
            await world.kill_index()
        world.pass_(STEP_S)
        await world.wire.settle()


async def quiet(world: World) -> None:
    """With a good wire everything comes back: leases, blocks, and an index that knows what is stored."""
    world.wire.trouble, world.busy = 0.0, True
    await world.introduce()
    for _ in range(5):
        world.pass_(6.0)
        await world.wire.settle()
    tally, tier, engine, kv = world.tally, world.tier, world.engine, world.kv
    if not tally.expect(tier is not None, "the store has no memory in the end") or tier is None:
        return
    figures = tier.statistics()
    for name in ("reads", "writes", "unconfirmed", "blocks_quarantined"):
        tally.expect(figures[name] == 0, f"in the quiet the store has {figures[name]} {name}")
    tally.expect(figures["blocks_in_use"] == figures["stored"], "in the quiet a block in use is not stored")
    tally.balance(tier, tier.pool, engine.pool)
    tally.expect(engine.pool.in_use == engine.pool.num_quarantined == 0, "in the quiet an engine holds blocks")
    tally.expect(engine.index.complete(kv.ref), "in the quiet the index is not complete")
    for at in range(NUM_CHAINS):
        of = chain(100 * world.number + at, LENGTH)
        stored = next((i for i, digest in enumerate(of.hashes) if digest not in tier), LENGTH)
        known = engine.index.prefix(kv.ref, of.hashes)
        tally.expect(known == stored, f"in the quiet the index knows {known} blocks of a chain, {stored} are stored")
        await world.fetch(of, ask_index=True)
    fresh = chain(100 * world.number + NUM_CHAINS, LENGTH)
    tally.expect(await world.store(fresh), "in the quiet a chain cannot be stored")
    tally.expect(await world.fetch(fresh, ask_index=True) == LENGTH, "in the quiet a chain cannot be had")
    tally.balance(tier, engine.pool)


async def _run(ground: Ground, tally: Tally, rounds: int, *, trouble: float, blind: bool) -> None:
    for number in range(rounds):
        world = await make(ground, tally, number, trouble=trouble, blind=blind)
        try:
            await storm(world)
            await quiet(world)
        finally:
            await world.wire.close()
            world.engine.pool.close()
            detach()


def storms(ground: Ground, tally: Tally, rounds: int, *, trouble: float = TROUBLE, blind: bool = False) -> None:
    """Storms over stores of their own."""
    asyncio.run(_run(ground, tally, rounds, trouble=trouble, blind=blind))
