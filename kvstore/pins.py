"""Prefixes that people asked to keep for a while: which blocks must not be evicted, and until when. Pure.

A pin is a promise about eviction alone. Its blocks need not be stored yet; a damaged one goes all the same; and the end
of its time ends it, whatever else happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import PinRefused

MAX_PINS = 256
MAX_TTL_S = 86_400.0
SHARE = 0.5  # of a tier, and of an owner's quota in it: the rest can always be evicted


@dataclass(frozen=True, slots=True)
class Pin:
    """Blocks of one chain, from its head on, that are kept until a time (seconds on the caller's clock)."""

    id: str
    owner: bytes
    hashes: tuple[bytes, ...]
    until: float


class Pins:
    """The pins of one tier. A block of several pins is held until the last of them ends."""

    def __init__(self, max_blocks: int) -> None:
        """Start empty; `max_blocks` is how many different blocks may be held in all."""
        self._max_blocks = max_blocks
        self._pins: dict[str, Pin] = {}
        self._holders: dict[bytes, int] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._holders

    def __len__(self) -> int:
        return len(self._pins)

    def pin(
        self, name: str, owner: bytes, hashes: Sequence[bytes], until: float, owner_blocks: int | None = None
    ) -> list[bytes]:
        """Hold blocks until a time; a name that is known is pinned anew. Returns the blocks that were not held before.

        Args:
            name: of the pin.
            owner: whose blocks they are.
            hashes: of the blocks, the head of the chain first.
            until: when it ends.
            owner_blocks: how many different blocks this owner may hold; None: no limit of its own.

        Raises:
            PinRefused: if there are too many pins, or too many blocks; nothing has changed then.
        """
        wanted = dict.fromkeys(hashes)
        others = [pin for pin in self._pins.values() if pin.id != name]
        if len(others) >= MAX_PINS:
            raise PinRefused("too_many_pins", f"{MAX_PINS} prefixes are pinned already", MAX_PINS)
        held = {digest for pin in others for digest in pin.hashes}
        if len(held | wanted.keys()) > self._max_blocks:
            raise PinRefused("tier_share", "pins may hold half of the tier", self._max_blocks)
        theirs = {digest for pin in others if pin.owner == owner for digest in pin.hashes}
        if owner_blocks is not None and len(theirs | wanted.keys()) > owner_blocks:
            raise PinRefused("tenant_share", "pins may hold half of the tenant's quota", owner_blocks)
        before = set(self._holders)
        old = self._pins.get(name)
        self._pins[name] = Pin(name, owner, tuple(wanted), until)
        for digest in wanted:
            self._holders[digest] = self._holders.get(digest, 0) + 1
        self._release(old)
        return [digest for digest in wanted if digest not in before]

    def unpin(self, name: str) -> list[bytes] | None:
        """End a pin; returns the blocks that nothing holds any more, None if there is no such pin."""
        pin = self._pins.pop(name, None)
        return None if pin is None else self._release(pin)

    def expire(self, now: float) -> list[bytes]:
        """End the pins whose time is over; returns the blocks that nothing holds any more."""
        return [d for name in [p.id for p in self._pins.values() if p.until <= now] for d in self.unpin(name) or ()]

    def all(self) -> list[Pin]:
        """Return all pins, the first to end first."""
        return sorted(self._pins.values(), key=lambda pin: pin.until)

    def _release(self, pin: Pin | None) -> list[bytes]:
        gone = []
        for digest in () if pin is None else pin.hashes:
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                gone.append(digest)
        return gone
