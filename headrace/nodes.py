"""From a layout to the command lines of its processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.embedded_nats import BusServer
from headrace.layout import NodePlan
from runtime.supervisor import NodeSpec
from schemas.settings import Settings

BUS_NODE = "nats"
# A frozen edge holds its clients' sockets; they notice nothing until it is gone.
EDGE_FROZEN_KILL_S = 2.0
CORES_PER_BUS_THREAD = 4


def bus_spec(server: BusServer, logs: Path) -> NodeSpec:
    """Return the child that is the embedded bus; it leaves last."""
    env = {"GOMAXPROCS": str(bus_threads(os.cpu_count() or 1)), **os.environ}
    return NodeSpec(BUS_NODE, tuple(server.argv), env=env, log=logs / f"{BUS_NODE}.log", stop_last=True)


def bus_threads(cores: int) -> int:
    """Return how many threads of the embedded bus may run at once, unless the environment says GOMAXPROCS.

    With as many as there are cores it wakes idle ones for every message, and these take the cores from those who wait
    for it: on two cores one thread gives a request its first token 5 to 10 % sooner than two.
    """
    return max(1, cores // CORES_PER_BUS_THREAD)


def node_spec(plan: NodePlan, settings: Settings, env: Mapping[str, str], logs: Path) -> NodeSpec:
    """Return the child that hosts a planned node.

    Args:
        plan: which actors.
        settings: `bus_url` is set.
        env: the settings for the child; secrets travel here, never on the command line.
        logs: directory for its output.
    """
    argv = (sys.executable, "-m", "headrace.cli", "actor", *plan.kinds, "--bus", settings.bus_url, "--node", plan.name)
    argv += tuple(f"--private={kind}" for kind in plan.private)
    limit = min(EDGE_FROZEN_KILL_S, settings.frozen_kill_s) if "edge" in plan.kinds else settings.frozen_kill_s
    return NodeSpec(
        plan.name, argv, env=dict(env), kinds=plan.kinds, frozen_kill_s=limit, log=logs / f"{plan.name}.log",
        noted=plan.is_engine,
    )  # fmt: skip


def tail(path: Path, lines: int = 12) -> str:
    """Return the end of a log; its last `error:` line alone if there is one."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 16_384))
            text = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    errors = [line for line in text[-lines:] if line.startswith("error:")]
    return errors[-1] if errors else "\n".join(text[-lines:])
