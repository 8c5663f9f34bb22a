"""The disk below a store's host tier. Engines copy from host memory only, so this side fills it and saves from it.

A lookup that ends where the disk goes on is answered later: the missing blocks are read into host memory in a thread,
verified there, and inserted; the engine is told to wait (`KvLoading`), and for how long. Blocks that were used twice
are written behind in batches, in another thread; so is all that host memory holds when the node is drained. A lookup
never waits for a write. Whatever goes wrong is a miss; `unhealthy` says what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvstore.disk.behind import WriteBehind
from kvstore.disk.policy import SecondTouch, affordable
from kvstore.disk.tier import Block, DiskTier
from kvstore.errors import DiskBusy
from kvstore.owners import Quotas, Share
from kvstore.tiers import Found, Header, HostTier
from runtime.actor import Context
from runtime.background import background_pool
from schemas import messages as m

LOAD_LIMIT_S = 1.0  # then a lookup is answered with what there is
MAX_LOADS = 8
FIRST_BYTES_PER_S = 200e6  # until a read has been timed
FULL_WEIGHT_NBYTES = 4 << 20
READ_LEASE_S = 3.0
STAGING_LEASE_S = 30.0
PIN_S = 60.0
FLUSH_LIMIT_S = 10.0
READERS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Where blocks are kept and how many bytes of them, in all and per owner; whether to wait for the disk; whether to
    keep all blocks; whether to verify what is read."""

    directory: Path
    max_nbytes: int
    sync: bool = False
    keep_all: bool = False
    quotas: Quotas | None = None
    verify: bool = True


@dataclass(slots=True)
class _Waiter:
    msg: m.KvLookup
    held: int
    until: float


@dataclass(slots=True)
class _Load:
    ticket: str
    hashes: list[bytes]
    parents: list[bytes]
    into: list[memoryview]
    waiters: dict[str, _Waiter] = field(default_factory=dict)


class DiskSide:
    """Loads and write-behind of one store.

    Args:
        context: of the `kv` actor.
        config: see `DiskConfig`.
        answer: sends the answer to a lookup.
        opened: told when the disk's blocks are known.
    """

    def __init__(
        self,
        context: Context,
        config: DiskConfig,
        *,
        answer: Callable[[m.KvLookup, Found], None],
        opened: Callable[[DiskTier], None],
    ) -> None:
        self._context, self._config = context, config
        self._answer, self._opened = answer, opened
        self._disk: DiskTier | None = None  # once it is known what is in it
        self._made: DiskTier | None = None
        self._host: HostTier | None = None
        self._known: Container[bytes] = ()
        self._held: set[bytes] = set()  # for when the disk is open
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-disk-read")
        self._writer = background_pool("kv-disk-write")
        self._behind = WriteBehind(None if config.keep_all else SecondTouch())
        self._loads: dict[bytes, _Load] = {}  # by the first hash that is read
        self._waiting: dict[str, _Load] = {}  # by a lookup's ticket
        self._writing = False
        self._flush_until: float | None = None
        self.frozen = False  # nothing new is written, whatever is asked for
        self._number = 0
        self._bytes_per_s = FIRST_BYTES_PER_S
        self._counts = dict.fromkeys("loads loaded load_failures late joined prefetches".split(), 0)

    # --- life -----------------------------------------------------------------------------------

    def open(self, host: HostTier) -> None:
        """Find, in a thread, what the disk holds for blocks of the host tier's layout."""
        self._host = host
        pool = host.pool
        disk = DiskTier(
            self._config.directory,
            layout=pool.layout,
            block_nbytes=pool.block_nbytes,
            epoch=self._context.ref.epoch,
            max_nbytes=self._config.max_nbytes,
            sync=self._config.sync,
            quotas=self._config.quotas,
            verify=self._config.verify,
        )
        self._made, self._writing = disk, True
        self._context.spawn(self._open(disk), name="open the disk tier")

    async def _open(self, disk: DiskTier) -> None:
        log = self._context.telemetry.log
        try:
            await self._in(self._writer, lambda: disk.open(self._context.clock.now()))
        except DiskBusy as exc:
            log.error("the disk tier is off", reason=str(exc))
        else:
            if disk.health.ok:
                log.info(
                    "the disk tier is open", **{k: disk.statistics()[k] for k in ("records", "segments", "nbytes")}
                )
            else:
                log.error("the disk tier is off", reason=disk.health.reason)
        finally:
            self._writing = False
        self._disk = self._known = disk
        disk.hold(self._held)
        self._opened(disk)

    def stop(self) -> None:
        """End the threads after what they are doing, and let the directory go."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)
        if self._made is not None:
            self._made.close()

    def drain(self, now: float) -> None:
        """Write all that host memory holds, for so long as it may take: the memory goes with the node."""
        self._flush_until = now + FLUSH_LIMIT_S
        if self._host is not None:
            self._behind.push(self._host.dump().hashes, now, self._known)

    def idle(self, now: float) -> bool:
        """Whether nothing is left to write, or no more time for it."""
        broken = self._disk is not None and not self._disk.health.ok
        empty = not self._writing and (self._disk is None or broken or self.frozen or not len(self._behind))
        return empty or (self._flush_until is not None and now >= self._flush_until)

    @property
    def unhealthy(self) -> str:
        """What is wrong with the disk, empty if nothing."""
        reason = self._disk.health.reason if self._disk is not None else ""
        if not self._config.verify:
            reason = "; ".join(filter(None, (reason, "what is read is NOT verified")))
        return f"disk tier: {reason}" if reason else ""

    # --- loading --------------------------------------------------------------------------------

    def begin(self, msg: m.KvLookup, found: Found) -> bool:
        """Whether a lookup goes on on the disk; it is answered later then, with its lease as it is until then."""
        held = len(found.refs)
        hashes, parents = msg.hashes[held:], msg.parents[held:]
        if self._disk is None or not hashes or len(hashes) != len(parents) or msg.ticket in self._waiting:
            return False
        load = self._loads.get(hashes[0])
        if load is None:
            load = self._start(msg.hashes, msg.parents, held)
        else:
            self._counts["joined"] += 1
        if load is None:
            return False
        load.waiters[msg.ticket] = _Waiter(msg, held, self._context.clock.now() + LOAD_LIMIT_S)
        self._waiting[msg.ticket] = load
        self._context.send(msg.reply, m.KvLoading(ticket=msg.ticket, wait_s=LOAD_LIMIT_S))
        return True

    def prefetch(self, msg: m.KvPrefetch) -> None:
        """Read what a lookup that is on its way will ask for; with half of the reads under way nothing is read early.

        Nobody waits for it and nothing is pinned: a lookup joins the read, or finds its blocks in host memory.
        """
        host, disk = self._host, self._disk
        if host is None or disk is None or len(msg.hashes) != len(msg.parents):
            return
        held = next((at for at, digest in enumerate(msg.hashes) if digest not in host), len(msg.hashes))
        rest = msg.hashes[held:]
        if rest and rest[0] not in self._loads and len(self._loads) < MAX_LOADS // 2:
            self._counts["prefetches"] += self._start(msg.hashes, msg.parents, held) is not None

    @property
    def bytes_per_s(self) -> float:
        """The disk's speed, as measured so far."""
        return self._bytes_per_s

    def _start(self, wanted: list[bytes], before: list[bytes], held: int) -> _Load | None:
        host, disk = self._host, self._disk
        assert host is not None and disk is not None
        size = host.pool.block_nbytes
        most = affordable(len(wanted) - held, size, self._bytes_per_s, LOAD_LIMIT_S / 2)
        count = disk.peek(wanted[held : held + most], before[held : held + most])
        if count == 0 or len(self._loads) >= MAX_LOADS:
            return None
        now = self._context.clock.now()
        ticket = self._ticket("load")
        # The head of the chain is named too, so that it is not evicted for its tail.
        hashes, parents = wanted[: held + count], before[: held + count]
        writer = str(self._context.ref)
        owners = disk.owners_of(hashes)
        staging = host.reserve(ticket, hashes, parents, now, now + STAGING_LEASE_S, writer=writer, owners=owners)
        if not staging.refs:
            return None
        view = host.pool.view()
        into = [view[ref.index * size : (ref.index + 1) * size] for ref in staging.refs]
        load = _Load(ticket, [hashes[i] for i in staging.positions], [parents[i] for i in staging.positions], into)
        self._loads[load.hashes[0]] = load
        self._counts["loads"] += 1
        self._context.spawn(self._run(load, disk, host), name=f"read {len(into)} blocks")
        return load

    async def _run(self, load: _Load, disk: DiskTier, host: HostTier) -> None:
        sums: list[int] = []
        try:
            sums, seconds = await self._in(self._readers, lambda: self._read(load, disk))
            self._time(len(sums) * host.pool.block_nbytes, seconds)
        finally:
            # No thread writes there any more: a lease that has lapsed meanwhile ends its quarantine here.
            count = host.commit(load.ticket, bool(sums), sums, head=True)
            del self._loads[load.hashes[0]]
            self._counts["loaded"] += count
            self._counts["load_failures"] += len(sums) < len(load.hashes)
            for waiter in list(load.waiters.values()):
                self._finish(waiter, host)

    def _read(self, load: _Load, disk: DiskTier) -> tuple[list[int], float]:
        """In a thread: read, and say how long it took without the way to the thread and back."""
        began = self._context.clock.now()
        sums = disk.read(load.hashes, load.parents, load.into, began)
        return sums, self._context.clock.now() - began

    def _time(self, nbytes: int, seconds: float) -> None:
        """Learn the disk's speed; a small read says little of it."""
        if nbytes and seconds > 0:
            weight = 0.3 * min(1.0, nbytes / FULL_WEIGHT_NBYTES)
            self._bytes_per_s += weight * (nbytes / seconds - self._bytes_per_s)

    def _finish(self, waiter: _Waiter, host: HostTier) -> None:
        msg, held = waiter.msg, waiter.held
        self.forget(msg.ticket)
        now = self._context.clock.now()
        rest = msg.hashes[held:], msg.parents[held:]
        self._answer(msg, host.extend_or_release(msg.ticket, held, *rest, now, READ_LEASE_S))

    def forget(self, ticket: str) -> None:
        """A lookup is over; what it waits for is read all the same."""
        load = self._waiting.pop(ticket, None)
        if load is not None:
            del load.waiters[ticket]

    def reads_into(self, ticket: str) -> bool:
        """Whether this write lease of the host tier is of a read that goes on."""
        return any(load.ticket == ticket for load in self._loads.values())

    # --- writing --------------------------------------------------------------------------------

    def touched(self, hashes: Iterable[bytes]) -> None:
        """These blocks were offered to host memory, or found there."""
        if not self.frozen:
            self._behind.touch(hashes, self._context.clock.now(), self._known)

    def _flush(self, now: float) -> None:
        host, disk = self._host, self._disk
        if self._writing or self.frozen or host is None or disk is None or not disk.health.ok:
            return
        hashes = self._behind.take(now, host, hurry=self._flush_until is not None)
        ticket = self._ticket("keep")
        headers = host.pin(ticket, hashes, now, PIN_S)
        if headers:
            self._writing = True
            self._context.spawn(self._write(ticket, headers, disk, host), name=f"write {len(headers)} blocks")

    async def _write(self, ticket: str, headers: list[Header], disk: DiskTier, host: HostTier) -> None:
        view, size = host.pool.view(), host.pool.block_nbytes
        blocks = [
            Block(h.hash, h.parent, h.num_tokens, h.checksum, view[h.block * size : (h.block + 1) * size], h.owner)
            for h in headers
        ]
        try:
            await self._in(self._writer, lambda: disk.write(blocks, self._context.clock.now()))
        finally:
            self._writing = False
            if not host.release(ticket):
                disk.forget(h.hash for h in headers)  # what was read meanwhile may have been something else
        self._flush(self._context.clock.now())

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Answer lookups that have waited long enough, write what is due, look at a broken disk again."""
        host, disk = self._host, self._disk
        if host is None or disk is None:
            return
        for waiter in [load.waiters[ticket] for ticket, load in self._waiting.items()]:
            if now >= waiter.until:
                self._counts["late"] += 1
                self._finish(waiter, host)
        disk.expire(now)
        if disk.health.due(now) and not self._writing:
            self._writing = True
            self._context.spawn(self._probe(disk), name="probe the disk tier")
        self._flush(now)

    async def _probe(self, disk: DiskTier) -> None:
        try:
            if await self._in(self._writer, lambda: disk.probe(self._context.clock.now())):
                self._context.telemetry.log.info("the disk tier is well again")
        finally:
            self._writing = False

    def hold(self, hashes: Sequence[bytes]) -> None:
        """Evict these blocks last."""
        self._held.update(hashes)
        if self._disk is not None:
            self._disk.hold(hashes)

    def let_go(self, hashes: Sequence[bytes]) -> None:
        """These blocks are like any other again."""
        self._held.difference_update(hashes)
        if self._disk is not None:
            self._disk.let_go(hashes)

    @property
    def tier(self) -> DiskTier | None:
        """The tier, once it is known what is in it."""
        return self._disk

    def shares(self) -> list[Share]:
        """What each owner has on the disk."""
        return self._disk.shares() if self._disk is not None else []

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        tier = self._disk.statistics() if self._disk is not None else {}
        own = {f"{name}_total": count for name, count in self._counts.items()}
        own |= {"queued": len(self._behind), "queue_dropped_total": self._behind.dropped, "waiting": len(self._waiting)}
        return {f"disk_{name}": value for name, value in {**tier, **own}.items()}

    def _ticket(self, what: str) -> str:
        self._number += 1
        return f"{self._context.ref.id}.{self._context.ref.epoch}.{what}.{self._number}"

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
