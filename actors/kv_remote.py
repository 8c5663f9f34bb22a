"""The stores of other hosts, as a tier below this host's own: a lookup that misses here goes on there.

The host's `kv` actor does this and not the engines: one index of the other stores per host, one fetch for all who want
the same blocks, and what comes lies in host memory for the next one; on a host without others nothing is added to any
path. A fetch is: ask the other store for a read lease, reserve staging in host memory here, let this host's transfer
actor fetch into it, commit, give the lease back, answer. The engine is told to wait meanwhile (`KvLoading`), as for the
disk. Whatever goes wrong is a miss, and a host that fails is left alone for a while. Staging is never given back before
the transfer actor has said that it is done, or its exit is confirmed (R10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from actors.kv_copies import PART_S, Copies, Wanted
from actors.kv_index import KvIndex
from actors.remote_cost import Way, worth
from kvstore.tiers import Found, HostTier
from runtime.actor import Context
from schemas import messages as m
from schemas.record import Fence
from schemas.subjects import Ref
from schemas.tenants import owner_in

ASK_LIMIT_S = 0.25
LOAD_LIMIT_S = 1.0  # then a lookup is answered with what there is
FETCH_LIMIT_S = 2.5  # then the fetch is given up: the other store's lease is about to end
STAGING_LEASE_S = 30.0
READ_LEASE_S = 3.0
RESEND_S = 0.5
MAX_FETCHES = 8
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
NOBODY = Fence(0, "", 0)


@dataclass(slots=True)
class _Waiter:
    msg: m.KvLookup
    held: int
    until: float


@dataclass(slots=True)
class _Fetch:
    ticket: str
    held: int  # blocks of the chain that were here already
    hashes: list[bytes]  # of the whole chain, as far as the other store is asked for
    parents: list[bytes]
    store: Ref
    host: str
    began: float
    until: float  # for the store's answer; then for the copy
    owner: bytes  # whose the blocks will be here
    waiters: dict[str, _Waiter] = field(default_factory=dict)
    transfer: Ref | None = None
    message: m.TransferJob | m.TransferAbort | None = None  # repeated until the transfer actor is done
    next_send: float = 0.0
    expected: list[int] = field(default_factory=list)  # checksums of what is fetched
    wanted: Wanted | None = None  # it is a part of a copy ahead of demand
    nbytes: int = 0  # of that part

    @property
    def first(self) -> bytes:
        return self.hashes[self.held]


class RemoteSide:
    """Fetches of one host's store from those of others.

    Args:
        context: of the `kv` actor.
        answer: sends the answer to a lookup.
        copies_per_minute: most bytes that are copied ahead of demand.
    """

    def __init__(
        self, context: Context, *, answer: Callable[[m.KvLookup, Found], None], copies_per_minute: int = 0
    ) -> None:
        self._context, self._answer = context, answer
        self._copies = Copies(copies_per_minute)
        self.index = KvIndex(context, others=True)
        self._host: HostTier | None = None
        self._fetches: dict[str, _Fetch] = {}
        self._loading: dict[bytes, _Fetch] = {}  # by the first hash that is fetched
        self._waiting: dict[str, _Fetch] = {}  # by a lookup's ticket
        self._ways: dict[str, Way] = {}
        self._paused: dict[str, tuple[float, float]] = {}  # host: until when, and for how long the next time
        self._number = 0
        self._counts = dict.fromkeys("fetches fetched kept bytes failures late joined dearer".split(), 0)

    def open(self, host: HostTier) -> None:
        """There is host memory to fetch into."""
        self._host = host

    # --- questions ------------------------------------------------------------------------------

    @property
    def known(self) -> int:
        """How many blocks other hosts are known to have: where there are some, engines ask even if all is new here."""
        return len(self.index) if self._host is not None and self._serving() else 0

    def ways(self) -> dict[str, list[float]]:
        """Return for each host that blocks would be fetched from now the seconds of a fetch and bytes per second."""
        if self._host is None:
            return {}
        now, out = self._context.clock.now(), {}
        for name in self._serving():
            if now >= self._paused.get(name, (0.0, 0.0))[0]:
                way = self._ways.get(name, Way())
                out[name] = [way.setup_s, way.bytes_per_s]
        return out

    def _serving(self) -> set[str]:
        members, here = self._context.membership.members("transfer"), self._context.host
        return {member.host for member in members if member.host != here and member.load.get("listens")}

    def begin(self, msg: m.KvLookup, found: Found) -> bool:
        """Whether a lookup goes on on another host; it is answered later then, with its lease as it is until then."""
        held, host = len(found.refs), self._host
        hashes, parents = msg.hashes[held:], msg.parents[held:]
        if host is None or not hashes or len(hashes) != len(parents) or msg.ticket in self._waiting:
            return False
        now = self._context.clock.now()
        fetch = self._loading.get(hashes[0])
        if fetch is not None and not self._worth_joining(fetch, msg, now):
            self._counts["dearer"] += 1
            return False
        if fetch is not None:
            self._counts["joined"] += 1
        else:
            fetch = self._start(msg, held, host, now)
        if fetch is None:
            return False
        fetch.waiters[msg.ticket] = _Waiter(msg, held, now + LOAD_LIMIT_S)
        self._waiting[msg.ticket] = fetch
        self._context.send(msg.reply, m.KvLoading(ticket=msg.ticket, wait_s=LOAD_LIMIT_S))
        return True

    def _worth_joining(self, fetch: _Fetch, msg: m.KvLookup, now: float) -> bool:
        """Whether a copy ahead of demand is here before the asker has computed it; fetches were worth it at once."""
        if fetch.wanted is None or msg.block_s <= 0:
            return True
        left_s = fetch.began + self._ways.get(fetch.host, Way()).seconds(fetch.nbytes) - now
        return left_s < (len(fetch.hashes) - fetch.held) * msg.block_s

    def copy(self, msg: m.KvPrefetch) -> None:
        """Fetch a hot prefix when nothing else is fetched; nobody waits for it."""
        if self._host is not None:
            self._copies.add(msg, self._context.ref, self._context.clock.now())

    @property
    def copies(self) -> bool:
        """Whether anything is copied ahead of demand here."""
        return self._copies.per_minute > 0

    def _copy_on(self, host: HostTier, now: float) -> None:
        """Begin the next part of a copy."""
        while (wanted := self._copies.first(now)) is not None:
            msg, size = wanted.lookup, host.pool.block_nbytes
            held = next((at for at, digest in enumerate(msg.hashes) if digest not in host), len(msg.hashes))
            count = self._copies.part(wanted, held, size, now)
            if count == 0:
                continue
            stop = held + count
            part = msg.model_copy(update={"hashes": msg.hashes[:stop], "parents": msg.parents[:stop]})
            fetch = self._start(part, held, host, now, PART_S) if msg.hashes[held] not in self._loading else None
            if fetch is None:
                self._copies.drop(wanted)
                continue
            fetch.wanted, fetch.nbytes = wanted, (len(fetch.hashes) - held) * size
            self._copies.begin(wanted, fetch.nbytes, now)
            return

    def _start(
        self, msg: m.KvLookup, held: int, host: HostTier, now: float, part_s: float = 0.0
    ) -> _Fetch | None:
        best = self._best(msg, held, host.pool.block_nbytes, now, part_s)
        if best is None or len(self._fetches) >= MAX_FETCHES:
            return None
        store, name, count = best
        self._number += 1
        ref, stop = self._context.ref, held + count
        ticket = f"{ref.id}.{ref.epoch}.far.{self._number}"
        hashes, parents = msg.hashes[:stop], msg.parents[:stop]
        fetch = _Fetch(ticket, held, hashes, parents, store, name, now, now + ASK_LIMIT_S, owner_in(msg.owner))
        self._fetches[ticket] = self._loading[fetch.first] = fetch
        self._counts["fetches"] += 1
        self._context.send(store, m.KvLookup(ticket=ticket, hashes=hashes[held:], parents=parents[held:], reply=ref))
        return fetch

    def _best(
        self, msg: m.KvLookup, held: int, block_nbytes: int, now: float, part_s: float
    ) -> tuple[Ref, str, int] | None:
        """The store that is worth most, and how many blocks to ask it for."""
        best, seconds = None, 0.0
        membership, serving = self._context.membership, self._serving()
        for store in self.index.stores():
            member = membership.get(store)
            if member is None or not member.up or member.host not in serving:
                continue
            if now < self._paused.get(member.host, (0.0, 0.0))[0]:
                continue
            known = self.index.prefix(store, msg.hashes[held:])
            way = self._ways.get(member.host, Way())
            count = worth(known, block_nbytes, way, msg.block_s, way.setup_s + part_s if part_s else LOAD_LIMIT_S / 2)
            self._counts["dearer"] += known > 0 and count == 0
            took = way.seconds(count * block_nbytes) - count * (msg.block_s or 1.0)
            if count and (best is None or took < seconds):
                best, seconds = (store, member.host, count), took
        return best

    # --- a fetch --------------------------------------------------------------------------------

    def on_found(self, msg: m.KvFound, sender: Ref | None) -> None:
        """The other store lends blocks, or has none (any more): let them be fetched."""
        fetch, host, now = self._fetches.get(msg.ticket), self._host, self._context.clock.now()
        if fetch is None or host is None or fetch.store != sender:
            if msg.blocks and sender is not None:
                self._context.send(sender, m.KvRelease(ticket=msg.ticket))
            return
        if fetch.message is not None:
            return
        count = min(len(msg.blocks), len(fetch.hashes) - fetch.held)
        transfer = self._transfer()
        if count == 0 or msg.pool is None or len(msg.checksums) != len(msg.blocks) or transfer is None:
            self._end(fetch, failed=False)
            return
        stop = fetch.held + count
        writer = str(self._context.ref)
        staging = host.reserve(
            fetch.ticket, fetch.hashes[:stop], fetch.parents[:stop], now, now + STAGING_LEASE_S, writer=writer,
            owners=[fetch.owner] * stop,
        )  # fmt: skip
        places = [position - fetch.held for position in staging.positions]
        if not places or places[0] < 0:
            host.commit(fetch.ticket, ok=False)
            self._end(fetch, failed=False)
            return
        fetch.transfer, fetch.until, fetch.next_send = transfer, now + FETCH_LIMIT_S, now + RESEND_S
        fetch.expected = [msg.checksums[i] for i in places]
        fetch.message = m.TransferJob(
            request_id=fetch.ticket, fence=NOBODY, job=fetch.ticket, part=0, ticket=fetch.ticket,
            deadline=self._context.clock.wall() + FETCH_LIMIT_S, source=self._context.ref, dest=self._context.ref,
            source_pool=msg.pool, dest_pool=host.pool.handle(),
            source_blocks=[msg.blocks[i] for i in places], dest_blocks=staging.refs,
            expected=fetch.expected,
        )  # fmt: skip
        self._context.send(transfer, fetch.message)

    def on_loading(self, msg: m.KvLoading) -> None:
        """The other store reads from its disk first."""
        fetch = self._fetches.get(msg.ticket)
        if fetch is not None and fetch.message is None:
            fetch.until = min(fetch.began + LOAD_LIMIT_S, self._context.clock.now() + msg.wait_s + ASK_LIMIT_S)

    def on_done(self, msg: m.TransferDone) -> bool:
        """The transfer actor writes no more; false if the job is none of these."""
        fetch = self._fetches.get(msg.job)
        if fetch is None or fetch.message is None:
            return False
        if msg.error is None and self._host is not None:
            count = self._host.commit(fetch.ticket, True, msg.checksums)
            self._counts["fetched"] += count
            self._counts["bytes"] += msg.nbytes
            if fetch.wanted is not None:
                self._copies.came(count, msg.nbytes)
            way, total = self._ways.get(fetch.host, Way()), self._context.clock.now() - fetch.began
            self._ways[fetch.host] = way.learned(msg.nbytes, total, msg.elapsed_s)
            self._paused.pop(fetch.host, None)
        elif msg.error is not None:
            self._keep(fetch, msg)
            if msg.error.get("code") == "corrupt_block":
                self._context.send(fetch.store, m.KvDamaged(hashes=fetch.hashes[fetch.held :]))
        self._over(fetch, failed=msg.error is not None)
        return True

    def _keep(self, fetch: _Fetch, msg: m.TransferDone) -> None:
        """Insert what came before the fetch failed: the next one need not bring it again."""
        came = [found != 0 and found == told for found, told in zip(msg.checksums, fetch.expected, strict=False)]
        if self._host is not None and any(came):
            self._counts["kept"] += self._host.commit_some(fetch.ticket, msg.checksums, came)
            self._counts["bytes"] += msg.nbytes

    def _over(self, fetch: _Fetch, *, failed: bool) -> None:
        """Nobody writes into staging any more."""
        if self._host is not None and failed:
            self._host.commit(fetch.ticket, ok=False)
        self._end(fetch, failed=failed)

    def _end(self, fetch: _Fetch, *, failed: bool) -> None:
        del self._fetches[fetch.ticket]
        self._loading.pop(fetch.first, None)
        self._context.send(fetch.store, m.KvRelease(ticket=fetch.ticket))
        if fetch.wanted is not None:
            self._copies.end(fetch.wanted, fetch.nbytes, failed=failed)
        if failed:
            self._counts["failures"] += 1
            _, pause = self._paused.get(fetch.host, (0.0, PAUSE_S))
            self._paused[fetch.host] = (self._context.clock.now() + pause, min(2 * pause, MAX_PAUSE_S))
        for waiter in list(fetch.waiters.values()):
            self._finish(waiter)

    def _finish(self, waiter: _Waiter) -> None:
        msg, held, host = waiter.msg, waiter.held, self._host
        self.forget(msg.ticket)
        if host is None:
            return
        now = self._context.clock.now()
        rest = msg.hashes[held:], msg.parents[held:]
        self._answer(msg, host.extend_or_release(msg.ticket, held, *rest, now, READ_LEASE_S))

    def forget(self, ticket: str) -> None:
        """A lookup is over; what it waits for is fetched all the same."""
        fetch = self._waiting.pop(ticket, None)
        if fetch is not None:
            fetch.waiters.pop(ticket, None)

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Answer lookups that have waited long enough; repeat what is not answered; give up what takes too long."""
        self.index.tick(now)
        for waiter in [fetch.waiters[ticket] for ticket, fetch in self._waiting.items()]:
            if now >= waiter.until:
                self._counts["late"] += 1
                self._finish(waiter)
        for fetch in list(self._fetches.values()):
            if fetch.message is None:
                if now >= fetch.until:
                    self._end(fetch, failed=True)
                continue
            if now >= fetch.until and isinstance(fetch.message, m.TransferJob):
                fetch.message = m.TransferAbort(request_id=fetch.ticket, fence=NOBODY, job=fetch.ticket)
                fetch.next_send = now
                self._loading.pop(fetch.first, None)
            if now >= fetch.next_send and fetch.transfer is not None:
                fetch.next_send = now + RESEND_S
                self._context.send(fetch.transfer, fetch.message)
        if self._host is not None and not self._fetches:
            self._copy_on(self._host, now)

    def member_down(self, ref: Ref, reason: str) -> None:
        """A store that is gone answers nothing; a transfer actor's confirmed exit ends its writes."""
        self.index.member_down(ref)
        for fetch in list(self._fetches.values()):
            if fetch.message is None and fetch.store == ref:
                self._end(fetch, failed=True)
            elif fetch.transfer == ref and reason != "silent":
                self._over(fetch, failed=True)

    def _transfer(self) -> Ref | None:
        for member in self._context.membership.members("transfer"):
            if member.host == self._context.host and not member.silent:
                return member.ref
        return None

    def check_integrity(self) -> None:
        """Assert that who waits and who is waited for agree."""
        for ticket, fetch in self._waiting.items():
            assert ticket in fetch.waiters and self._fetches.get(fetch.ticket) is fetch, "a lookup waits for nothing"

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        own: dict[str, float] = {f"{name}_total": count for name, count in self._counts.items()}
        own |= self._copies.statistics()
        own |= {"waiting": len(self._waiting), "fetching": len(self._fetches), "known": self.known}
        rate = max((way.bytes_per_s for way in self._ways.values()), default=0.0)
        own |= {"bytes_per_s": rate} | {f"index_{name}": value for name, value in self.index.statistics().items()}
        return {f"remote_{name}": value for name, value in own.items()}
