"""The transfer actor towards other hosts: it serves what owners here have granted, and fetches what others grant.

It listens when it is told to, or (`auto`) once somebody of another host is on the bus, on the address by which this
host reaches the bus. The key that both sides of a connection must prove to know is made anew with each incarnation and
told on the bus alone, to the transfer actors that ask for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

from kvstore.errors import KvError, PeerFailed
from kvstore.formats import stored_form
from kvstore.handoff import PrivateMemory, copy_blocks
from kvstore.shm import attach
from kvstore.transport.base import Peer, PeerAddress, Wanted
from kvstore.transport.grants import Grants
from kvstore.transport.nixl import NixlAgent, NixlTransport
from kvstore.transport.protocol import NONCE_NBYTES
from kvstore.transport.tcp_client import TcpTransport
from kvstore.transport.tcp_server import TcpServer
from runtime.actor import Context
from schemas import messages as m
from schemas.settings import split_address
from schemas.subjects import Ref

KEY_NBYTES = 32
MAX_FETCHES = 8  # at once; more are refused, which is a miss
ANSWER_S = 0.5
FETCH_LIMIT_S = 10.0
MAX_PEERS = 64
LISTEN_AGAIN_S = 5.0
PACKED_AT_ONCE = 64  # blocks


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """How a host takes part in exchanging blocks.

    Args:
        listen: `off`, `auto` (as soon as another host is there), or `on`.
        bind: host or HOST:PORT to listen on.
        advertise: host that others connect to, if it is not the one in `bind`.
        connections: most of one fetch.
        nixl: whether to serve by NIXL too, and to fetch by it from those that do.
    """

    listen: Literal["off", "auto", "on"] = "auto"
    bind: str = "127.0.0.1"
    advertise: str = ""
    connections: int = 4
    nixl: bool = False


@dataclass(slots=True)
class _Known:
    peer: Peer | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class Peers:
    """Other hosts, as the transfer actor of this one sees them."""

    def __init__(self, context: Context, config: PeerConfig) -> None:
        self._context, self._config = context, config
        clock = context.clock
        self._key = bytes.fromhex(clock.random_hex(KEY_NBYTES))
        self._grants = Grants(clock.now)
        self._agent = NixlAgent(f"{context.host}-{context.ref.id}-{context.ref.epoch}") if config.nixl else None
        self._server: TcpServer | None = None
        self._address = ""
        self._listen_at = 0.0
        self._warm = self._agent is None
        self._threads: ThreadPoolExecutor | None = None
        self._transport: TcpTransport | NixlTransport | None = None
        self._known: OrderedDict[Ref, _Known] = OrderedDict()
        self._fetching = 0
        self._counts = dict.fromkeys("fetches fetched_bytes failed refused".split(), 0)

    def _nonce(self) -> bytes:
        return bytes.fromhex(self._context.clock.random_hex(NONCE_NBYTES))

    def stop(self) -> None:
        """Close everything; running fetches have been told to stop."""
        if self._server is not None:
            self._server.stop()
        for known in self._known.values():
            if known.peer is not None:
                known.peer.close()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        if self._transport is not None:
            self._transport.close()

    @property
    def address(self) -> str:
        """Where this host serves, for its heartbeats; empty if it does not."""
        return self._address

    # --- serving --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Listen if it is time to; forget grants that are over."""
        self._grants.expire()
        if self._server is not None or now < self._listen_at or self._config.listen == "off":
            return
        if self._config.listen == "on" or self._others():
            self._listen_at = now + LISTEN_AGAIN_S
            if self._warm:
                self._listen()
            else:
                self._context.spawn(self._warm_up(), name="start NIXL")

    async def _warm_up(self) -> None:
        """Start NIXL off the loop, then listen; where it does not start, TCP alone serves and fetches."""
        agent = self._agent
        assert agent is not None
        self._listen_at = float("inf")
        try:
            await asyncio.get_running_loop().run_in_executor(None, agent.warm_up)
        except Exception as exc:  # whatever a foreign library may raise: blocks still move without it
            self._context.telemetry.log.error("NIXL does not start: TCP takes its place", reason=repr(exc))
            self._agent = None
        self._warm, self._listen_at = True, 0.0

    def _others(self) -> bool:
        members = self._context.membership.members(states=("starting", "ready", "draining"))
        return any(member.host != self._context.host and member.ref.kind in ("kv", "transfer") for member in members)

    def _listen(self) -> None:
        bind, log = self._config.bind, self._context.telemetry.log
        try:
            host, port = _place(bind)
            place = None if self._agent is None else self._agent.place
            server = TcpServer(self._grants, self._key, nonce=self._nonce, host=host, port=port, place=place)
            port = server.start()
        except (OSError, ValueError) as exc:
            log.error("other hosts cannot fetch from here", bind=bind, reason=str(exc))
            return
        self._server, shown = server, self._config.advertise or host
        self._address = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
        log.info("other hosts may fetch blocks from here", address=self._address)

    def on_grant(self, msg: m.TransferGrant) -> None:
        """Serve these blocks, or no longer."""
        if not msg.blocks or msg.pool is None or msg.lease_s <= 0:
            self._grants.revoke(msg.ticket)
        elif self._server is not None:
            self._grants.give(msg.ticket, msg.pool, msg.blocks, self._context.clock.now() + msg.lease_s)

    def on_query(self, msg: m.PeerQuery) -> None:
        """Another host's transfer actor wants to fetch."""
        if self._server is not None:
            self._context.send(msg.reply, m.PeerKey(address=self._address, key=self._key))

    # --- fetching -------------------------------------------------------------------------------

    def on_key(self, msg: m.PeerKey, sender: Ref | None) -> None:
        """A peer has told where it listens, and its key."""
        known = self._known.get(sender) if sender is not None else None
        if known is None or known.peer is not None:
            return
        known.peer = self._open(PeerAddress(msg.address, msg.key))
        for future in known.waiting:
            if not future.done():
                future.set_result(None)
        known.waiting = []

    def _open(self, address: PeerAddress) -> Peer:
        if self._transport is None:
            tcp = TcpTransport(now=self._context.clock.now, nonce=self._nonce, connections=self._config.connections)
            self._transport = tcp if self._agent is None else NixlTransport(tcp, self._agent)
        return self._transport.open(address)

    def member_down(self, ref: Ref, reason: str) -> None:
        """A peer is gone, or the owner of a pool that is served here."""
        self._grants.drop_pool(ref.epoch)
        if reason == "silent":
            return
        known = self._known.pop(ref, None)
        if known is not None and known.peer is not None:
            known.peer.close()

    async def fetch(self, job: m.TransferJob, should_stop: Callable[[], bool]) -> list[int]:
        """Do a job whose source is on another host; returns the checksums of what lies verified in the destination.

        Raises:
            KvError: if it cannot be done; nothing is written any more then. Some blocks may have come, see `arrived`.
            ValueError: if the job makes no sense.
        """
        if self._fetching >= MAX_FETCHES:
            self._counts["refused"] += 1
            raise PeerFailed(job.source_pool.host, "busy", f"{MAX_FETCHES} fetches under way")
        self._fetching += 1
        self._counts["fetches"] += 1
        try:
            peer = await self._peer(job.source_pool.host)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="kv-fetch-job")
            clock = self._context.clock
            limit = min(FETCH_LIMIT_S, job.deadline - clock.wall()) if job.deadline else FETCH_LIMIT_S
            deadline = clock.now() + limit
            loop = asyncio.get_running_loop()
            sums = await loop.run_in_executor(self._threads, lambda: _fetch(peer, job, should_stop, deadline))
        except BaseException as exc:
            self._counts["failed"] += 1
            if isinstance(exc, KvError):
                self._counts["fetched_bytes"] += num_arrived(exc.arrived) * job.source_pool.block_nbytes
            raise
        finally:
            self._fetching -= 1
        self._counts["fetched_bytes"] += len(sums) * job.source_pool.block_nbytes
        return sums

    async def _peer(self, host: str) -> Peer:
        ref = next(
            (
                member.ref
                for member in self._context.membership.members("transfer", states=("ready", "draining"))
                if member.host == host and not member.silent and member.load.get("listens")
            ),
            None,
        )
        if ref is None or self._config.listen == "off":
            raise PeerFailed(host, "unreachable", "nobody serves blocks there")
        known = self._known.setdefault(ref, _Known())
        self._known.move_to_end(ref)
        while len(self._known) > MAX_PEERS:
            _, old = self._known.popitem(last=False)
            if old.peer is not None:
                old.peer.close()
        if known.peer is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            known.waiting.append(future)
            self._context.send(ref, m.PeerQuery(reply=self._context.ref))
            try:
                async with asyncio.timeout(ANSWER_S):
                    await future
            except TimeoutError:
                known.waiting = [each for each in known.waiting if each is not future]
                raise PeerFailed(host, "silent", "its transfer actor does not answer") from None
        assert known.peer is not None
        return known.peer

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        serving = self._server.statistics() if self._server is not None else {}
        own = {f"peer_{name}_total": float(count) for name, count in self._counts.items()}
        return {"peers": len(self._known), "peer_fetching": self._fetching, **own} | {
            f"serve_{name}": value for name, value in serving.items()
        }


def num_arrived(checksums: Sequence[int]) -> int:
    """Return how many blocks have come, of those for which a checksum or 0 is told."""
    return sum(each != 0 for each in checksums)


def _place(bind: str) -> tuple[str, int]:
    """Return host and port of `HOST`, `HOST:PORT`, `[IPv6]`, `[IPv6]:PORT`, or an IPv6 address alone."""
    if bind.count(":") > 1 and not bind.startswith("["):
        return bind, 0
    return split_address(bind) if ":" in bind.rpartition("]")[2] else (bind.strip("[]"), 0)


def _fetch(peer: Peer, job: m.TransferJob, should_stop: Callable[[], bool], deadline: float) -> list[int]:
    pool, into = job.source_pool, attach(job.dest_pool)
    form = pool.layout, pool.block_nbytes
    wanted = Wanted(job.ticket or job.job, pool.epoch, *form, job.source_blocks, job.expected)
    if form == (into.layout, into.block_nbytes) or form != stored_form(into.layout, into.block_nbytes):
        return peer.fetch(wanted, into, job.dest_blocks, should_stop=should_stop, deadline=deadline)
    # They travel packed, and are unpacked here, a few at a time so that the memory for it stays small.
    sums: list[int] = []
    own = PrivateMemory(*form, min(PACKED_AT_ONCE, len(job.source_blocks)))
    for at in range(0, len(job.source_blocks), PACKED_AT_ONCE):
        part = slice(at, at + PACKED_AT_ONCE)
        some = replace(wanted, blocks=wanted.blocks[part], expected=wanted.expected[part])
        refs, to = own.refs(len(some.blocks)), job.dest_blocks[part]
        try:
            sums += peer.fetch(some, own, refs, should_stop=should_stop, deadline=deadline)
        except KvError as exc:
            exc.arrived = ()  # here, and not where they are to go
            raise
        copy_blocks(own, refs, into, to, should_stop=should_stop)
    return sums
