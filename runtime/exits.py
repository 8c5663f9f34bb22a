"""How a process ended, and whether that is the fault of what it computed: pure, but for one counter of the kernel's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# What a process does to itself: a fault in native code, an assertion, an instruction that does not exist.
OWN_FAULTS = frozenset(
    -number
    for number in (
        signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP,
    )
)  # fmt: skip
CGROUPS = Path("/sys/fs/cgroup")


def is_crash(code: int, *, failed: bool, out_of_memory: bool) -> bool:
    """Return whether a process went down by its own fault, and not because somebody wanted it to.

    Args:
        code: of its exit, negative for a signal.
        failed: its supervisor killed it because its actor had failed for good (a step that never ends, say).
        out_of_memory: the kernel has killed for want of memory meanwhile: a SIGKILL tells nobody who sent it.
    """
    if failed or code in OWN_FAULTS:
        return True
    return code > 0 or (code == -signal.SIGKILL and out_of_memory)


def oom_kills(own: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> int:
    """Return how often the kernel has killed for want of memory in this process's control group; 0 if it cannot tell.

    `oom_kill` counts the processes of the group that any kind of OOM killer ended: in `memory.events` (cgroup v2) or
    `memory.oom_control` (v1). Seen from a container, the group is often the root of what is mounted.
    """
    for row in _read(own).splitlines():
        _, controllers, path = row.split(":", 2)
        if controllers == "":
            name, top = "memory.events", root
        elif "memory" in controllers.split(","):
            name, top = "memory.oom_control", root / "memory"
        else:
            continue
        for group in (top / path.lstrip("/"), top):
            counts = dict(line.split() for line in _read(group / name).splitlines())
            if counts.get("oom_kill", "").isdigit():
                return int(counts["oom_kill"])
    return 0


def _read(path: Path) -> str:
    """Return a file of the kernel's, empty if absent: it has no disk to wait for, so that an event loop may ask."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.pread(descriptor, 65_536, 0).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
