"""A running instance that does not verify what it stored: bits of its disk flip until wrong blocks are seen.

This is the proof that the running half of `chaos-kv` can fail. It stops as soon as something wrong was served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.kv import live
from kvstore.record import HEADER_NBYTES

SETTINGS = {**live.SETTINGS, "HEADRACE_KV_VERIFY": "off-and-serve-wrong-bytes"}
LIMIT_S = 60.0  # then nothing wrong was served, which the command tells as success: it could not fail
PACE_S = 0.3
EVERY_NBYTES = 512  # a bit flips: at least one in each block


def spoil(path: Path) -> int:
    """Flip a bit in every so many bytes of a segment, behind its first header; returns how many."""
    try:
        with path.open("r+b", buffering=0) as file:
            places = range(HEADER_NBYTES + 8, path.stat().st_size, EVERY_NBYTES)
            for place in places:
                file.seek(place)
                byte = file.read(1)
                if byte:
                    file.seek(place)
                    file.write(bytes([byte[0] ^ 1]))
            return len(places)
    except OSError:
        return 0  # evicted meanwhile


async def run(seed: int, *, port_base: int, say: Callable[[str], None], history: Path) -> dict[str, Any]:
    """Start the instance, flip bits until something wrong was served, stop it; returns the figures."""

    async def hurt(driver: live.Live) -> None:
        spoilt: set[Path] = set()
        async with driver.traffic():
            end = time.monotonic() + LIMIT_S
            while not driver.wrong() and time.monotonic() < end:
                for path in set(driver.segments()) - spoilt:
                    flips = spoil(path)
                    driver.result.performed["flip"] += flips
                    driver.result.effective["flip"] += flips
                    spoilt.add(path)
                await asyncio.sleep(PACE_S)
        driver.compare()
        say(f"  without verification {driver.result.wrong} requests were given wrong blocks")

    return await live.run(seed, 0, port_base=port_base, say=say, history=history, settings=SETTINGS, hurt=hurt)
