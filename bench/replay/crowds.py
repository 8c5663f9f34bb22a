"""A load with hot prefixes, which the published traces lack: crowds that ask for the same long prefixes for a while."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from bench.replay.trace import BLOCK_TOKENS, Arrival, Trace

COUNT, PER_S = 3000, 10.0
SHARE = 0.8  # of the requests, that are of a crowd; the others share nothing
PREFIXES = 16  # that are hot at a time
LIFE_S = 150.0  # then others are
HOT_BLOCKS, OWN_BLOCKS = 32, 2  # of a crowd's prompt: what it shares, and what follows
OTHER_BLOCKS = (2, 12)
OUTPUT_TOKENS = 100


def crowds(seed: int) -> tuple[Trace, list[int]]:
    """Return the requests, and the positions of those with a hot prefix."""
    draw, at, arrivals, hot = random.Random(seed), 0.0, [], []
    for number in range(COUNT):
        if draw.random() < SHARE:
            hot.append(number)
            which = f"hot {int(at / LIFE_S)} {draw.randrange(PREFIXES)}"
            hashes = [_named(which, block) for block in range(HOT_BLOCKS)]
        else:
            hashes = [_named(f"other {number}", block) for block in range(draw.randrange(*OTHER_BLOCKS))]
        hashes += [_named(f"own {number}", block) for block in range(OWN_BLOCKS)]
        arrivals.append(Arrival(at, len(hashes) * BLOCK_TOKENS, OUTPUT_TOKENS, tuple(hashes)))
        at += draw.expovariate(PER_S)
    return Trace(Path("crowds"), tuple(arrivals)), hot


def _named(name: str, block: int) -> bytes:
    return hashlib.blake2b(f"{name} {block}".encode(), digest_size=16).digest()
