"""A writer that lies: it stores other bytes under the names of blocks, with checksums that fit them.

The store cannot tell: who may write is trusted to write what the name says, and no checksum can show it. So texts must
differ, and a soak with it that ends well has compared nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
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
BATCH = 16
LIE = b"\x00\x41"  # a number of moderate size in bfloat16 and float16: zeros among many tokens may change no text
PAUSE_S = 0.5  # in so long a prompt may ask for what was forged before that makes room for the next


class Forger:
    """Listens to what the store drops, and stores one number all over in its place."""

    def __init__(self, nats: Nats) -> None:
        self._nats = nats
        self._ref = Ref("both", "forger", secrets.token_hex(8))
        self._kv: Ref | None = None
        self._pool: m.PoolHandle | None = None
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()
        self._gone: OrderedDict[bytes, bytes] = OrderedDict()
        self._next_at = 0.0
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
        now = time.monotonic()
        if self._pool is not None and now >= self._next_at and (hashes := prefixes(self._gone, BATCH)):
            self._next_at = now + PAUSE_S
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
                view[ref.index * size : (ref.index + 1) * size] = LIE * (size // len(LIE))
            sums = [checksum(view[ref.index * size : (ref.index + 1) * size]) for ref in answer.blocks]
            await self._send(m.KvCommit(ticket=answer.ticket, checksums=sums))
            self.stored += len(answer.blocks)

    def _ticket(self) -> str:
        self._count += 1
        return f"forger.{self._ref.epoch}.{self._count}"


def prefixes(gone: dict[bytes, bytes], limit: int) -> list[bytes]:
    """Return blocks that lookups will ask for: those that went last, each behind all that it builds on.

    Args:
        gone: blocks that the store has dropped, with the blocks before them, in the order of their going.
        limit: most blocks.
    """
    out: dict[bytes, None] = {}
    for digest in reversed(list(gone)):
        chain = [digest]
        while gone.get(chain[-1], b"") in gone and gone[chain[-1]] not in out:
            chain.append(gone[chain[-1]])
        new = [block for block in reversed(chain) if block not in out]
        out |= dict.fromkeys(new[: limit - len(out)])
        if len(out) == limit:
            break
    return list(out)


async def forge(nats: Nats) -> Forger:
    """Start one."""
    forger = Forger(nats)
    await forger.start()
    await asyncio.sleep(0)
    return forger
