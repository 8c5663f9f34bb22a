"""A writer that lies: it stores other bytes under the names of blocks, with checksums that fit them.

The store cannot tell: who may write is trusted to write what the name says, and no checksum can show it. So texts must
differ, and a soak with it that ends well has compared nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from kvstore import changes
from kvstore.handoff import checksum
from kvstore.index import Op
from kvstore.shm import attach
from schemas import messages as m
from schemas.codec import DecodeError, decode, encode
from schemas.subjects import Ref

MAX_KNOWN = 65_536
BATCH = 32


class Forger:
    """Listens to what the store drops, and stores zeros in its place."""

    def __init__(self, nats: Nats) -> None:
        self._nats = nats
        self._ref = Ref("both", "forger", secrets.token_hex(8))
        self._kv: Ref | None = None
        self._pool: m.PoolHandle | None = None
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()
        self._gone: OrderedDict[bytes, bytes] = OrderedDict()
        self._count = 0
        self.stored = 0

    async def start(self) -> None:
        """Listen, on all hosts of the bus."""
        await self._nats.subscribe(self._ref.subject, cb=self._on_answer)
        await self._nats.subscribe("kv.events.*", cb=self._on_events)

    async def _send(self, message: m.Message) -> None:
        assert self._kv is not None
        await self._nats.publish(self._kv.subject, encode(message, self._ref))

    async def _on_events(self, message: Msg) -> None:
        try:
            events, sender = decode(message.data)
        except DecodeError:
            return
        if not isinstance(events, m.KvEvents) or events.tier != "host" or sender is None:
            return
        self._kv = sender
        for op, digest, parent in changes.unpack(events.ops, events.hashes, events.parents):
            if op is Op.ADD and parent:
                self._parents[digest] = parent
                self._gone.pop(digest, None)
                if self._pool is None:
                    lookup = m.KvLookup(ticket=self._ticket(), hashes=[digest], parents=[parent], reply=self._ref)
                    await self._send(lookup)
            elif op is Op.DROP and digest in self._parents:
                self._gone[digest] = self._parents.pop(digest)
        for table in (self._parents, self._gone):
            while len(table) > MAX_KNOWN:
                table.popitem(last=False)
        if self._pool is not None and len(self._gone) >= BATCH:
            hashes = list(self._gone)[:BATCH]
            parents = [self._gone.pop(digest) for digest in hashes]
            await self._send(
                m.KvReserve(ticket=self._ticket(), hashes=hashes, parents=parents, pool=self._pool, reply=self._ref)
            )

    async def _on_answer(self, message: Msg) -> None:
        try:
            answer, _ = decode(message.data)
        except DecodeError:
            return
        if isinstance(answer, m.KvFound):
            self._pool = answer.pool or self._pool
            await self._send(m.KvRelease(ticket=answer.ticket))
        elif isinstance(answer, m.KvReserved) and answer.pool is not None and answer.blocks:
            view, size = attach(answer.pool).view(), answer.pool.block_nbytes
            for ref in answer.blocks:
                view[ref.index * size : (ref.index + 1) * size] = bytes(size)
            sums = [checksum(view[ref.index * size : (ref.index + 1) * size]) for ref in answer.blocks]
            await self._send(m.KvCommit(ticket=answer.ticket, checksums=sums))
            self.stored += len(answer.blocks)

    def _ticket(self) -> str:
        self._count += 1
        return f"forger.{self._ref.epoch}.{self._count}"


async def forge(nats: Nats) -> Forger:
    """Start one."""
    forger = Forger(nats)
    await forger.start()
    await asyncio.sleep(0)
    return forger
