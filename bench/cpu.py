"""Processor time of an instance: its supervisor and everything under it."""

from __future__ import annotations

import psutil


def seconds(pid: int) -> dict[str, float]:
    """Return the processor seconds used so far, by process name, of a process and its living descendants."""
    out: dict[str, float] = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times, name = process.cpu_times(), title(process)
        except psutil.Error:
            continue
        out[name] = out.get(name, 0.0) + times.user + times.system
    return out


def resident_mb(pid: int) -> dict[str, float]:
    """Return the resident megabytes, by process name."""
    return {name: round(size / 1024, 1) for name, size in resident_kib(pid).items()}


def resident_kib(pid: int) -> dict[str, float]:
    """Return the resident KiB, by process name, of a process and its living descendants."""
    out: dict[str, float] = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            name, size = title(process), process.memory_info().rss / 1024
        except psutil.Error:
            continue
        out[name] = out.get(name, 0.0) + size
    return out


def title(process: psutil.Process) -> str:
    """Return the name that a node gave itself, else the program's."""
    text = " ".join(process.cmdline()).strip()  # a changed title is padded to the length of the old one
    return text.removeprefix("headrace: ") if text.startswith("headrace: ") else process.name()
