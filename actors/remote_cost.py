"""Whether blocks of another host are worth fetching: pure, over what fetches and prefills were measured to take."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_BLOCKS = 2
FIRST_SETUP_S = 0.005
FIRST_BYTES_PER_S = 100e6
FULL_WEIGHT_NBYTES = 4 << 20
WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class Way:
    """What it takes to get blocks from one host: seconds until bytes flow, and bytes per second from then on."""

    setup_s: float = FIRST_SETUP_S
    bytes_per_s: float = FIRST_BYTES_PER_S

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that a fetch of so many bytes takes."""
        return self.setup_s + nbytes / self.bytes_per_s

    def learned(self, nbytes: int, total_s: float, copy_s: float) -> Way:
        """Return the way after a fetch; a small one says little of the rate.

        Args:
            nbytes: that came.
            total_s: from the question to the last byte.
            copy_s: of these, from the request for bytes on.
        """
        if nbytes <= 0 or copy_s <= 0 or total_s < copy_s:
            return self
        weight = WEIGHT * min(1.0, nbytes / FULL_WEIGHT_NBYTES)
        rate = self.bytes_per_s + weight * (nbytes / copy_s - self.bytes_per_s)
        return Way(self.setup_s + WEIGHT * (total_s - copy_s - self.setup_s), rate)


def worth(count: int, block_nbytes: int, way: Way, block_s: float, limit_s: float) -> int:
    """Return how many of `count` blocks to fetch; 0 if computing them is sooner, or if they are too few to bother.

    Args:
        count: blocks that the other host has, from the first one that is missing here on.
        block_nbytes: bytes of each.
        way: to that host.
        block_s: seconds in which the asker computes a block; 0 where that is not known, and then fetching is trusted.
        limit_s: what the fetch may take; more blocks than fit are not asked for.
    """
    fits = int((limit_s - way.setup_s) * way.bytes_per_s / block_nbytes)
    take = min(count, fits)
    if take < LEAST_BLOCKS:
        return 0
    if block_s > 0 and way.seconds(take * block_nbytes) >= take * block_s:
        return 0
    return take
