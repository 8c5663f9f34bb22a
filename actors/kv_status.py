"""What a store tells people of itself: tiers, hit rates, the prefixes that are found most, tenants against limits."""

from __future__ import annotations

from collections.abc import Sequence

from actors.kv_disk import DiskSide
from kvstore.block import BLOCK_TOKENS
from kvstore.owners import Share, top
from kvstore.popular import Popular
from kvstore.tiers import HostTier
from runtime.actor import Context
from schemas import messages as m

MOST = 64  # of each list of an answer, whatever was asked for


class Status:
    """Counts lookups and answers `KvStatusQuery`.

    Args:
        context: of the `kv` actor.
        num_blocks: what the host tier may hold.
    """

    def __init__(self, context: Context, num_blocks: int) -> None:
        self._context = context
        self._num_blocks = num_blocks
        self._popular = Popular()
        self._lookups = self._found = 0

    def looked_up(self, tier: HostTier | None, found: Sequence[bytes], wall: float) -> None:
        """A lookup is answered with these blocks."""
        self._lookups += 1
        if not found or tier is None:
            return
        self._found += 1
        last = tier.prefix(found[-1])
        if last is not None:
            self._popular.hit(last.head, last.owner, last.depth * BLOCK_TOKENS, wall)

    def answer(
        self,
        query: m.KvStatusQuery,
        host: HostTier | None,
        disk: DiskSide | None,
        unhealthy: str,
        frozen: Sequence[str] = (),
    ) -> m.KvStatus:
        """Return the state of the store; `frozen` are the tiers that take nothing new."""
        count = max(0, min(query.top, MOST))
        tiers, tenants = [], []
        if self._num_blocks > 0:
            tiers.append(self._host_row(host, unhealthy))
            if host is not None:
                tenants += _rows("host", host.owners.shares(), count)
        if disk is not None:
            tiers.append(_disk_row(disk))
            tenants += _rows("disk", disk.shares(), count)
        return m.KvStatus(
            ticket=query.ticket,
            host=self._context.host,
            lookups=self._lookups,
            found=self._found,
            tiers=[tier.model_copy(update={"frozen": tier.kind in frozen}) for tier in tiers],
            prefixes=[
                m.KvPrefix(head=p.head, owner=p.owner, tokens=p.tokens, hits=p.hits, last=p.last)
                for p in self._popular.top(count)
            ],
            tenants=tenants,
        )

    def _host_row(self, host: HostTier | None, unhealthy: str) -> m.KvTier:
        if host is None:
            return m.KvTier(kind="host", unhealthy=unhealthy)  # made when the first engine shows its layout
        counts, size = host.statistics(), host.pool.block_nbytes
        return m.KvTier(
            kind="host",
            nbytes=(host.pool.in_use + host.pool.num_quarantined) * size,
            max_nbytes=self._num_blocks * size,
            blocks=int(counts["stored"]),
            hits=int(counts["hits_total"]),
            misses=int(counts["misses_total"]),
            stored=int(counts["inserted_total"]),
            evicted=int(counts["evicted_total"] + counts["evicted_quota_total"]),
            corrupt=int(counts["corrupt_total"]),
            unhealthy=unhealthy,
        )


def _disk_row(disk: DiskSide) -> m.KvTier:
    tier = disk.tier
    if tier is None:
        return m.KvTier(kind="disk", unhealthy=disk.unhealthy)
    counts = tier.statistics()
    return m.KvTier(
        kind="disk",
        nbytes=int(counts["nbytes"] + counts["foreign_nbytes"]),
        max_nbytes=int(counts["max_nbytes"]),
        blocks=int(counts["records"]),
        hits=int(counts["hits_total"]),
        misses=int(counts["misses_total"]),
        stored=int(counts["inserted_total"]),
        evicted=int(counts["evicted_total"]),
        corrupt=int(counts["corrupt_total"]),
        unhealthy=disk.unhealthy,
    )


def _rows(tier: str, shares: list[Share], count: int) -> list[m.KvTenant]:
    rows, others = top(shares, count)
    out = [m.KvTenant(tier=tier, owner=r.owner, nbytes=r.nbytes, limit=r.limit or 0) for r in rows]
    return out + ([m.KvTenant(tier=tier, nbytes=others.nbytes)] if others.count else [])
