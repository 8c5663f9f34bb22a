"""The state file of a running instance: how `ps`, `chat` and `doctor` find it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil


class NoInstance(Exception):
    """Raised when no running instance is found; the message says how to start one."""


@dataclass(frozen=True, slots=True)
class InstanceState:
    """What a running instance says about itself; the file is readable by its owner alone, for it holds secrets."""

    instance: str
    pid: int
    started: float  # creation time of the process, as the system counts it: tells a reused pid apart
    http_url: str
    bus_url: str
    bus_token: str
    logs: str
    nodes: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)  # its settings, for nodes that join it by hand

    @property
    def alive(self) -> bool:
        """Whether the process that wrote the file still runs."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


def state_path(runtime: Path, instance: str) -> Path:
    """Path of an instance's state file."""
    return runtime / f"{instance}.json"


def write_state(runtime: Path, state: InstanceState) -> Path:
    """Write the state file by rename, so that no reader sees half of it."""
    runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = state_path(runtime, state.instance)
    staged = path.with_suffix(f".{state.pid}.tmp")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(state), file, indent=1)
    staged.replace(path)
    return path


def read_state(path: Path) -> InstanceState | None:
    """Return the state in a file, or None if it is absent or not readable as one."""
    try:
        return InstanceState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def remove_state(runtime: Path, instance: str) -> None:
    """Remove the state file, if it is there."""
    state_path(runtime, instance).unlink(missing_ok=True)


def running(runtime: Path) -> list[InstanceState]:
    """Return all running instances of this user."""
    found = [read_state(path) for path in sorted(runtime.glob("*.json"))]
    return [state for state in found if state is not None and state.alive]


def find(runtime: Path, instance: str) -> InstanceState:
    """Return the running instance of that name.

    Raises:
        NoInstance: if it does not run.
    """
    state = read_state(state_path(runtime, instance))
    if state is not None and state.alive:
        return state
    others = ", ".join(s.instance for s in running(runtime))
    hint = f"; running: {others} (use --instance)" if others else "; start one with: headrace up"
    raise NoInstance(f"no instance {instance!r} is running{hint}")


def process_start(pid: int) -> float:
    """Return when a process was created, as `InstanceState.started` holds it."""
    return psutil.Process(pid).create_time()
