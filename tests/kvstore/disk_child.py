"""A process that writes to a disk tier and is killed at a named step of it, or meets a limit; run by the tests."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from disk_cases import blocks, make, served


def killed_at(directory: Path, where: str) -> None:
    """Write chain 1, then chain 2, and die at the given occurrence of a step of the second."""
    name, _, count = where.partition(":")
    left = int(count or 1)
    armed = False

    def step(reached: str) -> None:
        nonlocal left
        if armed and reached == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    tier = make(directory, "dead", step=step)
    assert tier.write(blocks(1, 3), 0.0) == 3
    armed = True
    tier.write(blocks(2, 3), 0.0)
    raise SystemExit(f"{where} was never reached")


def limited(directory: Path, nbytes: int) -> None:
    """Write under a limit on the size of files; print what came of it."""
    tier = make(directory, "e1")
    first = tier.write(blocks(1, 3), 0.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
    second = tier.write(blocks(2, 8), 0.0)
    errno = tier.statistics()["errno"]
    files = len(list(tier.folder.iterdir()))
    tier.check_integrity()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    healed = tier.probe(1.0)
    third = tier.write(blocks(2, 8), 1.0)
    print(json.dumps([first, second, errno, files, healed, third, served(tier, 2, 8)]))


def owner(directory: Path) -> None:
    """Own a directory until killed."""
    tier = make(directory, "alive")
    tier.write(blocks(1, 3), 0.0)
    print("ready", flush=True)
    signal.pause()


if __name__ == "__main__":
    what, where, value = sys.argv[1:4]
    match what:
        case "kill":
            killed_at(Path(where), value)
        case "limit":
            limited(Path(where), int(value))
        case "own":
            owner(Path(where))
