"""The store's host tier as an actor: blocks in host memory, indexed by their chained hashes, lent under leases.

It hands out places and never touches bytes: the transfer actor copies, the reader verifies. Its pool is made when the
first engine shows the layout of its blocks; blocks of another layout are refused. Below it there may be a disk
(`actors.kv_disk`) and the stores of other hosts (`actors.kv_remote`), which fill the same memory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from actors.kv_disk import DiskConfig, DiskSide
from actors.kv_events import Announcer
from actors.kv_pins import PinDesk
from actors.kv_remote import RemoteSide
from actors.kv_status import Status
from kvstore.disk.tier import DiskTier
from kvstore.formats import stored_form
from kvstore.owners import Quotas, Share, top
from kvstore.pool import BlockPool
from kvstore.tiers import Found, HostTier
from runtime.actor import Actor, Context
from schemas import messages as m
from schemas.record import Fence
from schemas.subjects import Ref
from schemas.tenants import owner_in

READ_LEASE_S = 3.0
WRITE_LEASE_S = 10.0
LENT_LEASE_S = READ_LEASE_S - 0.25  # so long this host serves to others what it lends them
MAX_FIRST = 64
MAX_CHECKED = 64  # blocks of one report: some 10 ms; what is bad beyond them is reported when it is used again
NOBODY = Fence(0, "", 0)


class KvActor(Actor):
    """One host's stored blocks.

    Args:
        directory, prefix: where the pool's file lies and how its name begins.
        num_blocks: how many blocks the tier holds; 0 turns it off, and the disk with it.
        disk: what is kept on a disk, and where; nothing if absent.
        remote: whether to ask the stores of other hosts.
        copies_per_minute: most bytes that are copied from there before anybody has asked for them here.
        quotas: most bytes of each owner in host memory.
    """

    kind: ClassVar[str] = "kv"

    def __init__(
        self,
        context: Context,
        *,
        directory: Path,
        prefix: str,
        num_blocks: int,
        disk: DiskConfig | None = None,
        remote: bool = False,
        copies_per_minute: int = 0,
        quotas: Quotas | None = None,
    ) -> None:
        super().__init__(context)
        self._directory = directory
        self._pool_name = f"{prefix.removeprefix('headrace-')}kv-{context.ref.id}"
        self._num_blocks, self._quotas = num_blocks, quotas
        self._tier: HostTier | None = None
        self._pool: BlockPool | None = None
        self._making = False
        self._first: list[tuple[m.KvReserve, Ref | None]] = []  # writers that wait for the pool, one batch each
        self._unhealthy = ""
        self._disk: DiskSide | None = None
        if disk is not None and num_blocks > 0:
            self._disk = DiskSide(context, disk, answer=self._answer, opened=self._opened)
        self._remote: RemoteSide | None = None
        if remote and num_blocks > 0:
            self._remote = RemoteSide(context, answer=self._answer, copies_per_minute=copies_per_minute)
        self._lent: dict[str, Ref] = {}  # tickets of other hosts' stores, and who serves them here
        self._status = Status(context, num_blocks)
        self._pins = PinDesk(context, num_blocks)
        self._kinds = (("host",) if num_blocks > 0 else ()) + (("disk",) if self._disk is not None else ())
        self._frozen: list[str] = []  # tiers that take nothing new
        self._announcer = Announcer(context, *self._kinds)

    async def stop(self) -> None:
        """Remove the pool; what is on disk stays."""
        if self._disk is not None:
            self._disk.stop()
        if self._pool is not None:
            self._pool.close()

    def load(self) -> dict[str, Any]:
        """How full the tier is, and the number of its last change."""
        disk = self._disk.unhealthy if self._disk is not None else ""
        unhealthy = "; ".join(filter(None, (self._unhealthy, disk)))
        base = {"running": 0, "waiting": 0, "tiers": self._announcer.numbers(), "unhealthy": unhealthy}
        if "host" in self._frozen:
            base["frozen"] = True  # engines need not offer anything
        if self._remote is not None and self._remote.known:
            base["elsewhere"] = self._remote.known
            base["ways"] = self._remote.ways()
            base["copies"] = self._remote.copies
        if self._disk is not None:
            base["disk_bytes_per_s"] = self._disk.bytes_per_s
        if self._pool is None:
            return {**base, "free_blocks": 0, "total_blocks": 0, "blocks_in_use": 0}
        return {
            **base,
            "free_blocks": self._pool.num_free,
            "total_blocks": self._pool.num_blocks,
            "blocks_in_use": self._pool.in_use,
        }

    def statistics(self) -> dict[str, float]:
        """The tier's counters."""
        tier = self._tier.statistics() if self._tier is not None else {}
        disk = self._disk.statistics() if self._disk is not None else {}
        remote = self._remote.statistics() if self._remote is not None else {}
        self._show_owners()
        frozen = {f"{kind}_frozen": float(kind in self._frozen) for kind in self._kinds}
        return {**tier, **disk, **remote, **frozen, "lent_tickets": len(self._lent), **self._announcer.statistics()}

    def owners(self) -> dict[str, tuple[list[Share], Share]]:
        """What the largest owners hold in each tier, and what the others hold together."""
        tiers = {"host": self._tier.owners.top()} if self._tier is not None else {}
        return tiers if self._disk is None else {**tiers, "disk": top(self._disk.shares())}

    def _show_owners(self) -> None:
        gauge = self.context.telemetry.gauge("kv_tenant_bytes", "Bytes by tier and tenant", ("tier", "tenant"))
        gauge.clear()  # who left the largest leaves the page
        for tier, (rows, others) in self.owners().items():
            for row in rows:
                gauge.labels(tier, row.owner.hex()).set(row.nbytes)
            gauge.labels(tier, "others").set(others.nbytes)

    def drain(self) -> None:
        """Leave once the disk has what memory holds, or its time for that is over."""
        super().drain()
        if self._disk is not None:
            self._disk.drain(self.clock.now())

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be written."""
        return self._disk is None or self._disk.idle(self.clock.now())

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        """Look up and pin, release, reserve, commit; tell who joins what is stored."""
        match message:
            case m.KvLookup():
                self._lookup(message)
            case m.KvPrefetch():
                if message.far:
                    if self._remote is not None:
                        self._remote.copy(message)
                elif self._disk is not None:
                    self._disk.prefetch(message)
            case m.KvRelease():
                if self._disk is not None:
                    self._disk.forget(message.ticket)
                if self._remote is not None:
                    self._remote.forget(message.ticket)
                self._take_back(message.ticket)
                if self._tier is not None:
                    self._tier.release(message.ticket)
            case m.KvDamaged():
                if self._tier is not None and self._tier.report_corrupt(message.hashes[:MAX_CHECKED]):
                    self._announcer.announce()
            case m.KvReserve():
                self._reserve(message, sender)
            case m.KvCommit():
                if self._tier is not None:
                    self._tier.commit(message.ticket, message.ok, message.checksums)
                    self._announcer.announce()
                self._first = [(held, by) for held, by in self._first if held.ticket != message.ticket]
            case m.KvPin():
                self.context.send(message.reply, self._pins.pin(message, self._tier, self._disk))
            case m.KvUnpin():
                self.context.send(message.reply, self._pins.unpin(message, self._tier, self._disk))
            case m.KvFreeze():
                self._freeze(message)
            case m.KvStatusQuery():
                answer = self._status.answer(message, self._tier, self._disk, self._unhealthy, self._frozen)
                self.context.send(message.reply, answer.model_copy(update={"pins": self._pins.rows(self._tier)}))
            case m.KvDumpQuery():
                self._announcer.on_query(message)
            case m.KvDump() | m.KvFound() | m.KvLoading():
                self._from_elsewhere(message, sender)
            case m.TransferDone():
                if self._remote is not None and self._remote.on_done(message):
                    self._announcer.announce()
                elif self._tier is not None:
                    self._tier.absolve(message.job)
            case _:
                self.context.telemetry.log.warning("unexpected message", type=type(message).__name__)

    def _lookup(self, msg: m.KvLookup) -> None:
        if self._tier is None or self._pool is None:
            self._answer(msg, Found())
            return
        found = self._tier.lookup(msg.ticket, msg.hashes, msg.parents, self.clock.now(), READ_LEASE_S)
        if self._disk is not None:
            self._disk.touched(msg.hashes[: len(found.refs)])
            if self._disk.begin(msg, found):
                return
        # Another store's question ends here: it asks every host itself.
        if self._remote is not None and msg.reply.kind != "kv" and self._remote.begin(msg, found):
            return
        self._answer(msg, found)

    def _from_elsewhere(self, msg: m.Message, sender: Ref | None) -> None:
        if self._remote is None:
            return
        match msg:
            case m.KvDump():
                self._remote.index.on_dump(msg, sender)
            case m.KvFound():
                self._remote.on_found(msg, sender)
            case m.KvLoading():
                self._remote.on_loading(msg)

    def _opened(self, disk: DiskTier) -> None:
        self._announcer.attach("disk", disk)
        self._announcer.announce()  # engines do not ask for what they do not know of

    def _lend(self, msg: m.KvLookup, found: Found) -> bool:
        """Have this host's transfer actor serve what another host's store has found here; false if there is none."""
        for member in self.context.membership.members("transfer"):
            if member.host == self.context.host and member.load.get("listens") and self._pool is not None:
                self._lent[msg.ticket] = member.ref
                grant = m.TransferGrant(
                    ticket=msg.ticket, pool=self._pool.handle(), blocks=found.refs, lease_s=LENT_LEASE_S
                )
                self.context.send(member.ref, grant)
                return True
        return False

    def _take_back(self, ticket: str) -> None:
        transfer = self._lent.pop(ticket, None)
        if transfer is not None:
            self.context.send(transfer, m.TransferGrant(ticket=ticket))

    def _answer(self, msg: m.KvLookup, found: Found) -> None:
        if msg.reply.kind == "kv" and found.refs and not self._lend(msg, found) and self._tier is not None:
            self._tier.release(msg.ticket)
            found = Found()
        if msg.reply.kind != "kv":
            self._status.looked_up(self._tier, msg.hashes[: len(found.refs)], self.clock.wall())
        answer = m.KvFound(
            ticket=msg.ticket,
            pool=self._pool.handle() if found.refs and self._pool is not None else None,
            blocks=found.refs,
            checksums=found.checksums,
            lease_until=found.lease_until,
        )
        self.context.send(msg.reply, answer)

    def _freeze(self, msg: m.KvFreeze) -> None:
        self._frozen = [kind for kind in self._kinds if kind in msg.tiers]
        if self._disk is not None:
            self._disk.frozen = "disk" in self._frozen
        self.context.telemetry.log.info("tiers take nothing new", tiers=", ".join(self._frozen) or "none of them")
        self.context.send(msg.reply, m.KvFrozen(ticket=msg.ticket, tiers=self._frozen))

    def _reserve(self, msg: m.KvReserve, sender: Ref | None) -> None:
        refused = m.KvReserved(ticket=msg.ticket)
        if self._tier is None or self._pool is None:
            if not self._making and not self._unhealthy and self._num_blocks > 0:
                self._making = True
                self.context.spawn(self._make(msg.pool), name="make the host tier")
            if self._making and len(self._first) < MAX_FIRST:
                self._first.append((msg, sender))
            else:
                self.context.send(msg.reply, refused)
            return
        handle = self._pool.handle()
        form = stored_form(msg.pool.layout, msg.pool.block_nbytes)
        if "host" in self._frozen or (handle.layout, handle.block_nbytes) != form:
            self.context.send(msg.reply, refused)
            return
        if self._disk is not None:
            self._disk.touched(msg.hashes)
        now = self.clock.now()
        writer = str(sender) if sender is not None else ""
        owners = [owner_in(owner) for owner in msg.owners]
        staging = self._tier.reserve(
            msg.ticket, msg.hashes, msg.parents, now, now + WRITE_LEASE_S, writer=writer, owners=owners
        )
        answer = m.KvReserved(ticket=msg.ticket, pool=handle, positions=staging.positions, blocks=staging.refs)
        self.context.send(msg.reply, answer)

    async def _make(self, like: m.PoolHandle) -> None:
        """Allocate the tier's memory off the loop; without room for it the tier stays off, and says so."""
        layout, block_nbytes = stored_form(like.layout, like.block_nbytes)

        def create() -> BlockPool:
            return BlockPool.create(
                self._directory,
                self._pool_name,
                self._num_blocks,
                block_nbytes,
                layout,
                self.ref.epoch,
                self.context.host,
            )

        try:
            self._pool = await asyncio.get_running_loop().run_in_executor(None, create)
        except OSError as exc:
            self._unhealthy = f"no memory for {self._num_blocks} blocks: {exc.strerror}"
            self.context.telemetry.log.error("the host tier is off", reason=self._unhealthy)
        else:
            self._tier = HostTier(self._pool, quotas=self._quotas)
            self._announcer.attach("host", self._tier)
            if self._disk is not None:
                self._disk.open(self._tier)
            if self._remote is not None:
                self._remote.open(self._tier)
        finally:
            self._making = False
        first, self._first = self._first, []
        for msg, sender in first:
            self._reserve(msg, sender)

    def member_down(self, ref: Ref, reason: str) -> None:
        """Fetches may be over, of other stores or by the transfer actor."""
        if self._remote is not None:
            self._remote.member_down(ref, reason)

    def tick(self) -> None:
        """End leases; a writer whose lease is over must confirm that it is done before its blocks are lent again."""
        self._announcer.tick(self.clock.now())
        if self._tier is None:
            return
        if self._remote is not None:
            self._remote.tick(self.clock.now())
        self._tier.expire(self.clock.now())
        for ticket in [ticket for ticket in self._lent if not self._tier.reading(ticket)]:
            self._take_back(ticket)
        self._pins.expire(self._tier, self._disk)
        if self._disk is not None:
            self._disk.tick(self.clock.now())
        for ticket in self._tier.unconfirmed:
            if self._disk is not None and self._disk.reads_into(ticket):
                continue  # a thread of this process; it says itself when it is done
            for member in self.context.membership.members("transfer"):
                if member.host == self.context.host:
                    abort = m.TransferAbort(request_id=ticket, fence=NOBODY, job=ticket)
                    self.context.send(member.ref, abort)
