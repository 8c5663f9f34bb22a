"""What can be done to a running system, declared: a scenario names its victims, its fault and when it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chaos.faults import FaultKind


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of fault.

    `works` says where in a request's life the victim works. `streams`: it holds running streams, one of which must be
    past its first and before its last ten tokens. `upstream`: it works before the first token; it must hold (by its
    last heartbeat) a request that was accepted and has no item yet, while streams in that window run. `burst`: the
    same, but its work is too short for any heartbeat to show; it is frozen, a burst of requests is sent, and it is
    killed with its share of the burst unanswered in its hands.
    """

    name: str
    kinds: tuple[str, ...]
    fault: FaultKind
    works: Literal["streams", "upstream", "burst"]


SCENARIOS: dict[str, Scenario] = {
    s.name: s
    for s in (
        Scenario("kill-decode", ("decode",), "kill", "streams"),
        Scenario("kill-prefill", ("prefill",), "kill", "upstream"),
        Scenario("kill-detokenize", ("detokenize",), "kill", "streams"),
        Scenario("kill-tokenize", ("tokenize",), "freeze_then_kill", "burst"),
        Scenario("freeze-decode", ("decode",), "freeze", "streams"),
    )
}

GROUPS: dict[str, tuple[str, ...]] = {"failover": tuple(SCENARIOS)}


def resolve(name: str) -> list[Scenario]:
    """Return the scenarios of a name or of a group.

    Raises:
        KeyError: if there is none; the message lists what exists.
    """
    if name in GROUPS:
        return [SCENARIOS[n] for n in GROUPS[name]]
    if name not in SCENARIOS:
        raise KeyError(f"no scenario {name!r}; there are {', '.join([*SCENARIOS, *GROUPS])}")
    return [SCENARIOS[name]]
