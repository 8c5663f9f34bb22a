"""Who holds how much of a tier, against a limit of their own, and what of theirs goes first. Pure.

An owner is the digest of a tenant (`schemas.tenants.owner_of`); the tier cannot tell the name. Blocks that name no
owner belong to `SHARED`, which is an owner like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstore.eviction import EvictionPolicy, LruPolicy

SHOWN = 32  # owners in `top`; the others are one row together


@dataclass(frozen=True, slots=True)
class Quotas:
    """Most bytes of each owner in one tier; 0 means no limit."""

    default_nbytes: int = 0
    own: Mapping[bytes, int] = field(default_factory=dict)

    @property
    def limited(self) -> bool:
        """Whether anybody has a limit."""
        return self.default_nbytes > 0 or any(self.own.values())

    def limit(self, owner: bytes) -> int | None:
        """Return an owner's limit in bytes, None if there is none."""
        return self.own.get(owner, self.default_nbytes) or None


@dataclass(frozen=True, slots=True)
class Share:
    """What an owner holds: bytes, things (blocks or segments), and its limit, None if it has none."""

    owner: bytes
    nbytes: int
    count: int
    limit: int | None


@dataclass(slots=True)
class _Line:
    nbytes: int = 0
    count: int = 0
    order: EvictionPolicy | None = None


def top(rows: list[Share], most: int = SHOWN) -> tuple[list[Share], Share]:
    """Return the first `most` owners, and the others together as one without a name or a limit."""
    rest = rows[most:]
    return rows[:most], Share(b"", sum(row.nbytes for row in rest), sum(row.count for row in rest), None)


class Owners:
    """A ledger of bytes per owner, and for those with a limit the order in which their own things go.

    Bounded by what is charged: an owner without anything is forgotten. Every call takes constant time, `victim` besides
    that a look at each thing in its way that cannot go.
    """

    def __init__(self, quotas: Quotas | None = None, order: Callable[[], EvictionPolicy] = LruPolicy) -> None:
        """Start empty; `order` makes what ranks one owner's things."""
        self._quotas = quotas if quotas is not None else Quotas()
        self._make_order = order
        self._ranked = self._quotas.limited
        self._lines: dict[bytes, _Line] = {}

    @property
    def ranked(self) -> bool:
        """Whether anybody may have a limit, so that orders are kept at all."""
        return self._ranked

    # --- what they hold ----------------------------------------------------------------------------

    def charge(self, owner: bytes, nbytes: int) -> None:
        """One more thing of this owner's lies in the tier, whatever becomes of it."""
        line = self._lines.get(owner)
        if line is None:
            order = None if self._quotas.limit(owner) is None else self._make_order()
            line = self._lines[owner] = _Line(order=order)
        line.nbytes += nbytes
        line.count += 1

    def discharge(self, owner: bytes, nbytes: int) -> None:
        """One less."""
        line = self._lines[owner]
        line.nbytes -= nbytes
        line.count -= 1
        if line.count == 0:
            del self._lines[owner]

    def used(self, owner: bytes) -> int:
        """Bytes of this owner."""
        line = self._lines.get(owner)
        return 0 if line is None else line.nbytes

    def room(self, owner: bytes) -> int | None:
        """Bytes that this owner may still take, negative if it has too much; None if it has no limit."""
        limit = self._quotas.limit(owner)
        return None if limit is None else limit - self.used(owner)

    def limit(self, owner: bytes) -> int | None:
        """Return an owner's limit in bytes, None if it has none."""
        return self._quotas.limit(owner)

    # --- in which order they go --------------------------------------------------------------------

    def insert(self, owner: bytes, key: bytes) -> None:
        """A thing of this owner's may go from now on; its bytes are charged already."""
        if (order := self._order(owner)) is not None:
            order.insert(key)

    def touch(self, owner: bytes, key: bytes) -> None:
        """A thing of this owner's was used."""
        if (order := self._order(owner)) is not None:
            order.touch(key)

    def remove(self, owner: bytes, key: bytes) -> None:
        """A thing of this owner's is gone, or must not go."""
        if (order := self._order(owner)) is not None:
            order.remove(key)

    def victim(self, owner: bytes, can_go: Callable[[bytes], bool]) -> bytes | None:
        """Return what of this owner's goes next, None if nothing can."""
        order = self._order(owner)
        return None if order is None else order.victim(can_go)

    def _order(self, owner: bytes) -> EvictionPolicy | None:
        line = self._lines.get(owner)
        return None if line is None else line.order

    # --- questions ---------------------------------------------------------------------------------

    @property
    def total_nbytes(self) -> int:
        """Bytes of all owners."""
        return sum(line.nbytes for line in self._lines.values())

    def shares(self) -> list[Share]:
        """What each owner holds, most bytes first."""
        rows = [Share(owner, line.nbytes, line.count, self.limit(owner)) for owner, line in self._lines.items()]
        return sorted(rows, key=lambda row: (-row.nbytes, row.owner))

    def top(self) -> tuple[list[Share], Share]:
        """See the function of this name."""
        return top(self.shares())

    def check_integrity(self, keys: Mapping[bytes, bytes]) -> None:
        """Assert that the orders hold exactly these keys (key to owner), where owners have limits."""
        counts: dict[bytes, int] = {}
        for owner in keys.values():
            counts[owner] = counts.get(owner, 0) + 1
        for owner, line in self._lines.items():
            assert line.count > 0 and line.nbytes >= 0, "an owner of nothing is listed"
            if line.order is not None:
                assert line.order.statistics()["keys"] == counts.get(owner, 0), "an owner's order is not what it has"
