"""Which node hosts which actors: pure, from settings to a list of plans."""

from __future__ import annotations

import os
from dataclasses import dataclass

from schemas.settings import Settings

LIGHT_KINDS = ("admission", "tokenize", "detokenize")
ENGINE_KINDS = ("prefill", "decode", "both")
KINDS = ("edge", *LIGHT_KINDS, *ENGINE_KINDS, "transfer", "kv")
LIGHT_NODES = 2  # a light node may die; another one takes its requests over


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node by name, and the kinds of the actors that it hosts.

    `private` ones join them once the node is ready, and work for them alone.
    """

    name: str
    kinds: tuple[str, ...]
    private: tuple[str, ...] = ()

    @property
    def is_engine(self) -> bool:
        """Whether the node computes."""
        return any(kind in ENGINE_KINDS for kind in self.kinds)


def plan_nodes(settings: Settings) -> list[NodePlan]:
    """Return the nodes of an instance in the order in which they start; the edge is last."""
    engines = [
        NodePlan(f"{kind}-{i}", (kind,))
        for kind, count in (("prefill", settings.prefill), ("decode", settings.decode), ("both", settings.both))
        for i in range(count)
    ]
    stores_alone = [NodePlan(f"kv-{i}", ("kv",)) for i in range(settings.kv)]
    if settings.isolate:
        light = [NodePlan(f"{kind}-{i}", (kind,)) for kind in LIGHT_KINDS for i in range(LIGHT_NODES)]
        store = [*stores_alone, NodePlan("transfer-0", ("transfer",))]
        edge = NodePlan("edge", ("edge",))
    else:
        light = [NodePlan(f"light-{i}", LIGHT_KINDS) for i in range(LIGHT_NODES)]
        store = [NodePlan("kv-0", ("kv", "transfer")), *stores_alone[1:]]
        edge = NodePlan("edge", ("edge",), LIGHT_KINDS)
    return [*store, *engines, *light, edge]


def drain_order(plans: list[NodePlan]) -> list[list[NodePlan]]:
    """Return groups that stop one after another: who takes work in stops first, who holds memory last."""
    edges = [p for p in plans if "edge" in p.kinds]
    stores = [p for p in plans if not p.is_engine and set(p.kinds) & {"kv", "transfer"}]
    engines = [p for p in plans if p.is_engine]
    light = [p for p in plans if p not in edges and p not in stores and p not in engines]
    return [group for group in (edges, light, engines, stores) if group]


def threads_per_engine(settings: Settings, cores: int | None = None) -> int:
    """Return the most threads of one engine: as set, else the cores that it may run on.

    Engines that are busy at the same time share the cores (`engine/cores.py`), so each may have as many as there are.
    """
    if settings.threads:
        return settings.threads
    available = cores if cores is not None else len(os.sched_getaffinity(0))
    return max(1, available)


def cores_of(settings: Settings, node: str, cores: list[int]) -> list[int]:
    """Return the cores that a node may run on: all, or with `affinity: spread` an engine's own part of them.

    Parts are of equal size and follow the order of the engines; more engines than cores share them in turn.
    """
    engines = [plan.name for plan in plan_nodes(settings) if plan.is_engine]
    if settings.affinity != "spread" or node not in engines or not cores:
        return cores
    each = max(1, len(cores) // len(engines))
    first = engines.index(node) * each % len(cores)
    return cores[first : first + each]


def explain(settings: Settings, cores: int) -> str:
    """Say in a line how engines and threads are laid out, and why."""
    roles = [
        f"{n} {kind}" for kind, n in zip(ENGINE_KINDS, (settings.prefill, settings.decode, settings.both), strict=True)
    ]
    engines = ", ".join(role for role in roles if not role.startswith("0 ")) or "no engines"
    threads = threads_per_engine(settings, cores)
    if settings.affinity == "spread":
        return f"{engines}; each on its own part of {cores} cores (affinity: spread)"
    if threads == 1:
        return f"{engines}; one thread each"
    return f"{engines}; up to {threads} threads each: engines busy at the same time share the cores"
