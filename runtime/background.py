"""Threads for work that nobody waits for."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

NICE = 10  # an eleventh of the share of others, where cores are short


def background_pool(name: str, threads: int = 1) -> ThreadPoolExecutor:
    """Return threads that give way to all others of the machine: no engine waits for what is only stored.

    On Linux a priority is a thread's own; the rest of the process keeps its.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_give_way)


def _give_way() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
