"""Ports for servers of the tests."""

from __future__ import annotations

import random
import socket

# Below the range that the kernel hands out to anybody who asks for any port: while a server is down, or has not
# started yet, nobody else comes to hold its port by chance.
RANGE = range(22_000, 32_000)


def free_ports(count: int = 1) -> int:
    """Return the first of `count` successive ports that are free on 127.0.0.1 now."""
    choose = random.SystemRandom()  # the shared generator is seeded alike before each test
    for _ in range(1000):
        first = choose.choice(RANGE)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise RuntimeError(f"no {count} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
