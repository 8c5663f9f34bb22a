"""Pinned prefixes of one store: what must stay in host memory, and goes last on disk, until a time.

The table lives in this actor's memory and dies with it: a pin is a wish about what is evicted, never a place in the
store.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.kv_disk import DiskSide
from kvstore.errors import PinRefused
from kvstore.pins import MAX_TTL_S, SHARE, Pins
from kvstore.tiers import HostTier
from runtime.actor import Context
from schemas import messages as m
from schemas.errors import BadRequest, HeadraceError, Overloaded, Unavailable
from schemas.tenants import OWNER_NBYTES


class PinDesk:
    """Takes pins against the bounds of the host tier, and ends them.

    Args:
        context: of the `kv` actor.
        num_blocks: what the host tier may hold.
    """

    def __init__(self, context: Context, num_blocks: int) -> None:
        self._context = context
        self._pins = Pins(int(num_blocks * SHARE))

    def pin(self, msg: m.KvPin, host: HostTier | None, disk: DiskSide | None) -> m.KvPinned:
        """Hold the blocks of a prefix, or say why not."""
        clock = self._context.clock
        try:
            if host is None:
                raise Unavailable("this store has no host memory (yet)", code="no_host_tier", retry_after_s=1.0)
            if not 0 < msg.ttl_s <= MAX_TTL_S or len(msg.owner) != OWNER_NBYTES or not msg.hashes:
                raise BadRequest(f"a pin holds at least one block, for up to {MAX_TTL_S:g} s", param="ttl_s")
            limit = host.owners.limit(msg.owner)
            theirs = None if limit is None else int(limit * SHARE) // host.pool.block_nbytes
            before = {digest for pin in self._pins.all() if pin.id == msg.pin for digest in pin.hashes}
            new = self._pins.pin(msg.pin, msg.owner, msg.hashes, clock.now() + msg.ttl_s, theirs)
        except PinRefused as exc:
            return m.KvPinned(ticket=msg.ticket, error=Overloaded(str(exc), code=exc.code).info())
        except HeadraceError as exc:
            return m.KvPinned(ticket=msg.ticket, error=exc.info())
        host.hold(new)
        if disk is not None:
            disk.hold(new)
        self._let_go([digest for digest in before if digest not in self._pins], host, disk)
        stored = sum(digest in host for digest in msg.hashes)
        return m.KvPinned(ticket=msg.ticket, stored=stored, until=clock.wall() + msg.ttl_s)

    def unpin(self, msg: m.KvUnpin, host: HostTier | None, disk: DiskSide | None) -> m.KvUnpinned:
        """End a pin."""
        gone = self._pins.unpin(msg.pin)
        self._let_go(gone or [], host, disk)
        return m.KvUnpinned(ticket=msg.ticket, known=gone is not None)

    def expire(self, host: HostTier | None, disk: DiskSide | None) -> None:
        """End pins whose time is over."""
        if len(self._pins):
            self._let_go(self._pins.expire(self._context.clock.now()), host, disk)

    def rows(self, host: HostTier | None) -> list[m.KvPinRow]:
        """All pins, as `KvStatus` lists them."""
        clock = self._context.clock
        offset = clock.wall() - clock.now()
        return [
            m.KvPinRow(
                pin=pin.id,
                owner=pin.owner,
                head=pin.hashes[0],
                blocks=len(pin.hashes),
                stored=0 if host is None else sum(digest in host for digest in pin.hashes),
                until=pin.until + offset,
            )
            for pin in self._pins.all()
        ]

    def _let_go(self, hashes: Iterable[bytes], host: HostTier | None, disk: DiskSide | None) -> None:
        gone = list(hashes)
        if gone and host is not None:
            host.let_go(gone)
        if gone and disk is not None:
            disk.let_go(gone)
