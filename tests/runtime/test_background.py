"""Threads for work that nobody waits for."""

from __future__ import annotations

import os
import threading

from runtime.background import NICE, background_pool


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_background_thread_gives_way_and_the_rest_of_the_process_keeps_its_priority() -> None:
    """Also a second thread of the same pool."""
    before = priority()
    met = threading.Barrier(2, timeout=10.0)

    def work(_: int) -> int:
        met.wait()
        return priority()

    with background_pool("test", 2) as pool:
        there = list(pool.map(work, range(2)))

    assert min(there) >= NICE
    assert priority() == before
