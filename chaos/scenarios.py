"""What can be done to a running system, declared: whom it strikes, how, when it counts, under which requests.

Another scenario is a few lines in `SCENARIOS`. Faults are looked up by name in `chaos.faults.FAULTS`, requests in
`chaos.workload.LOADS`; what is new there can be named here at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Act:
    """One fault of a scenario.

    Args:
        victim: kind of the actor whose process is struck; for faults that strike no actor, what they strike.
        fault: its name in `chaos.faults.FAULTS`.
        who: `serving` holds a stream of the moment; `other` is any of its kind that was not struck before.
        after_s: seconds after the act before it.
        for_s: bounds of how long a passing fault (a freeze, a cut) lasts; the seed chooses.
    """

    victim: str
    fault: str = "kill"
    who: Literal["serving", "other"] = "serving"
    after_s: float = 0.0
    for_s: tuple[float, float] = (1.5, 5.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Faults that belong together, and when the first of them strikes.

    Args:
        name: what it is called on the command line.
        acts: in their order.
        works: where in a request's life the first victim works. `streams`: it holds running streams, one of which must
            be past its first and before its last ten tokens. `upstream`: it works before the first token; it must hold
            (by its last heartbeat) a request that was accepted and has no item yet, while streams in that window run.
            `burst`: the same, but its work is too short for any heartbeat to show; it is frozen, a burst of requests
            is sent, and the fault comes with its share of the burst unanswered in its hands.
        loads: name of the requests that run, in `chaos.workload.LOADS`.
        engine: which engines it makes sense with.
        needs: what the system under test must have (`proxy`: all connections to NATS go through one).
    """

    name: str
    acts: tuple[Act, ...]
    works: Literal["streams", "upstream", "burst"] = "streams"
    loads: str = "mixed"
    engine: Literal["any", "scripted", "real"] = "any"
    needs: frozenset[str] = frozenset()

    @property
    def summary(self) -> str:
        """The acts in a line."""
        parts = []
        for act in self.acts:
            later = f" {act.after_s:g} s later" if act.after_s else ""
            parts.append(f"{act.fault} {'another ' if act.who == 'other' else ''}{act.victim}{later}")
        return ", ".join(parts)


PROXY = frozenset({"proxy"})


def _one(fault: str, victim: str, works: Literal["streams", "upstream", "burst"], loads: str = "mixed") -> Scenario:
    return Scenario(f"{fault}-{victim}", (Act(victim, fault),), works, loads)


def _under(loads: str, fault: str, victim: str, engine: Literal["any", "scripted", "real"] = "any") -> Scenario:
    return Scenario(f"{fault}-{victim}-{loads}", (Act(victim, fault),), "streams", loads, engine)


def _slow(victim: str) -> Act:
    return Act(victim, "slow-bus", for_s=(3.0, 6.0))


SCENARIOS: dict[str, Scenario] = {
    s.name: s
    for s in (
        # One process of each kind.
        _one("kill", "decode", "streams"),
        _one("kill", "prefill", "upstream"),
        _one("kill", "detokenize", "streams"),
        _one("kill", "tokenize", "burst"),
        _one("kill", "transfer", "burst"),
        _one("kill", "kv", "burst"),
        _one("kill", "admission", "streams"),
        _one("freeze", "decode", "streams"),
        _one("freeze", "prefill", "upstream"),
        _one("freeze", "detokenize", "streams"),
        _one("freeze", "tokenize", "burst"),
        _one("freeze", "transfer", "burst"),
        _one("freeze", "kv", "burst"),
        _one("freeze", "admission", "streams"),
        # Engines that crash, of a request that kills whoever runs it.
        Scenario("poison-decode", (Act("decode", "poison"),), engine="scripted"),
        # The bus: the victim only says under whose streams.
        Scenario("restart-nats", (Act("decode", "restart-nats"),)),
        Scenario("freeze-nats", (Act("decode", "freeze-nats", for_s=(1.0, 4.0)),)),
        Scenario("cut-decode", (Act("decode", "cut", for_s=(1.0, 5.0)),), needs=PROXY),
        Scenario("cut-detokenize", (Act("detokenize", "cut", for_s=(1.0, 5.0)),), needs=PROXY),
        Scenario("cut-admission", (Act("admission", "cut", for_s=(1.0, 5.0)),), needs=PROXY),
        Scenario("break-decode", (Act("decode", "break"),), needs=PROXY),
        Scenario("break-detokenize", (Act("detokenize", "break"),), needs=PROXY),
        Scenario("break-all", (Act("decode", "break-all"),), needs=PROXY),
        Scenario("slow-bus-kill-decode", (_slow("decode"), Act("decode", after_s=0.5)), needs=PROXY),
        Scenario("slow-bus-kill-detokenize", (_slow("detokenize"), Act("detokenize", after_s=0.5)), needs=PROXY),
        Scenario("slow-bus-kill-admission", (_slow("admission"), Act("admission", after_s=0.5)), needs=PROXY),
        # Asked to leave: what runs there moves, and the process ends by itself.
        Scenario("drain-decode", (Act("decode", "drain"),)),
        Scenario("drain-detokenize", (Act("detokenize", "drain"),)),
        Scenario("drain-decode-kill-survivor", (Act("decode", "drain"), Act("decode", who="other", after_s=0.1))),
        # Two at once, or one after the other.
        Scenario("kill-decode-and-detokenize", (Act("decode"), Act("detokenize"))),
        Scenario("kill-decode-then-survivor", (Act("decode"), Act("decode", who="other", after_s=0.3))),
        Scenario("kill-two-decodes", (Act("decode"), Act("decode", who="other"))),
        Scenario("kill-decode-freeze-survivor", (Act("decode"), Act("decode", "freeze", who="other", after_s=0.2))),
        Scenario("freeze-decode-kill-survivor", (Act("decode", "freeze"), Act("decode", who="other", after_s=0.5))),
        Scenario("kill-decode-and-admission", (Act("decode"), Act("admission"))),
        Scenario("kill-detokenize-and-admission", (Act("detokenize"), Act("admission"))),
        Scenario("kill-all-admission", (Act("admission"), Act("admission", who="other"))),
        Scenario("kill-admission-then-heir", (Act("admission"), Act("admission", who="other", after_s=1.5))),
        Scenario("kill-detokenize-then-other", (Act("detokenize"), Act("detokenize", who="other", after_s=2.0))),
        Scenario("kill-decode-and-prefill", (Act("decode"), Act("prefill", who="other"))),
        Scenario("kill-decode-and-tokenize", (Act("decode"), Act("tokenize", who="other"))),
        Scenario("kill-decode-and-store", (Act("decode"), Act("kv", who="other"), Act("transfer", who="other"))),
        # One fault under requests of a kind.
        _under("choices", "kill", "decode"),
        _under("choices", "kill", "detokenize"),
        _under("choices", "freeze", "decode"),
        Scenario("kill-decode-and-detokenize-choices", (Act("decode"), Act("detokenize")), loads="choices"),
        _under("stops", "kill", "decode"),
        _under("stops", "kill", "detokenize"),
        _under("completions", "kill", "decode"),
        _under("completions", "kill", "detokenize"),
        _under("repeats", "kill", "decode", "real"),
    )
}

GROUPS: dict[str, tuple[str, ...]] = {
    "failover": ("kill-decode", "kill-prefill", "kill-detokenize", "kill-tokenize", "freeze-decode"),
    "full": tuple(SCENARIOS),
    "bus": tuple(n for n, s in SCENARIOS.items() if s.needs or n.endswith("-nats")),
    # A real model is slow: mostly what only it can show, which is that ids do not depend on who computes them.
    "real": (
        "kill-decode", "kill-decode-choices", "kill-decode-stops", "kill-decode-completions", "kill-decode-repeats",
        "kill-two-decodes", "kill-decode-and-detokenize", "kill-decode-then-survivor", "kill-decode-and-prefill",
        "kill-decode-and-tokenize", "freeze-decode", "kill-detokenize", "kill-prefill",
    ),
}  # fmt: skip


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
