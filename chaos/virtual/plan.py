"""What happens in a storm, decided beforehand: requests and faults as values, a function of the seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

BlowKind = Literal["kill", "freeze", "cut", "offline", "bus", "delay", "loss"]
"""What a fault does.

`kill`, `freeze`: a node's process. `cut`: two nodes hear nothing of each other. `offline`: a node loses both of its
connections. `bus`: the server goes away with all connections, and comes back. `delay`, `loss`: of all messages between
nodes (the client's own stay whole: nobody repeats for it).
"""

KINDS: dict[BlowKind, float] = {
    "kill": 8.0, "freeze": 3.0, "cut": 2.0, "offline": 2.0, "bus": 1.0, "delay": 1.5, "loss": 1.5,
}  # fmt: skip
SETTLE_S = 20.0  # at the end nothing breaks any more, and all must come to rest


@dataclass(frozen=True, slots=True)
class Blow:
    """One fault: at a moment, of a kind, on a node (or two), for a while.

    `for_s` is how long a passing fault lasts; after a kill it is the time to the next incarnation.
    """

    at: float
    kind: BlowKind
    victim: str = ""
    other: str = ""
    for_s: float = 0.3
    amount: float = 0.0  # share of lost messages, or most seconds of delay


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request and what its client does.

    `leaves_s`: seconds after which the client leaves; `silent`: without a word. `pause_s`: it takes nothing for so long
    after its first item. `deadline_s`: it may well pass if it is short (`may_expire`).
    """

    at: float
    key: str
    client: Literal["native", "edge"]
    prompt_len: int
    tokens: int
    choices: int = 1
    seed: int | None = None
    stop_at: int = 0
    deadline_s: float = 60.0
    may_expire: bool = False
    leaves_s: float = 0.0
    silent: bool = False
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StormPlan:
    """All of a storm."""

    seed: int
    minutes: float
    layout: Mapping[str, int]
    blows: tuple[Blow, ...]
    arrivals: tuple[Arrival, ...]

    def with_blows(self, blows: tuple[Blow, ...]) -> StormPlan:
        """Return the same storm with other faults."""
        return replace(self, blows=blows)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; `from_json` is the inverse."""
        return {
            "seed": self.seed, "minutes": self.minutes, "layout": dict(self.layout),
            "blows": [asdict(b) for b in self.blows], "arrivals": [asdict(a) for a in self.arrivals],
        }  # fmt: skip


def from_json(data: Mapping[str, Any]) -> StormPlan:
    """Read a plan.

    Raises:
        KeyError, TypeError: if it is none.
    """
    return StormPlan(
        int(data["seed"]), float(data["minutes"]), dict(data["layout"]),
        tuple(Blow(**b) for b in data["blows"]), tuple(Arrival(**a) for a in data["arrivals"]),
    )  # fmt: skip


SPLIT = {"admission": 2, "tokenize": 2, "detokenize": 2, "kv": 1, "transfer": 1, "prefill": 1, "decode": 2, "edge": 1}
LIGHT = {"light": 2, "kv": 1, "transfer": 1, "prefill": 1, "decode": 2, "edge": 1}
PLAIN = {"light": 2, "kv": 1, "transfer": 1, "decode": 3, "edge": 1}
LAYOUTS = (SPLIT, LIGHT, PLAIN)


OWNERS = ("admission", "light")  # kinds of nodes that own requests
OWNERS_APART_S = 3.0  # from the end of one owner's fault to the next one's: to adopt, and to find another backup


def make_plan(seed: int, minutes: float) -> StormPlan:
    """Decide a storm.

    A native client's request survives its owner, and its owner's heir, but nobody promises that it survives all who
    hold its record at once: where such clients are, only one owner is hurt at a time. In a third of the storms all
    clients are behind the edge, which keeps what it has asked for, and anybody else is hurt whenever it comes.

    Args:
        seed: decides everything.
        minutes: of virtual time in which faults come; a quiet while follows.
    """
    draw = random.Random(seed)
    layout = LAYOUTS[seed % len(LAYOUTS)]
    native = draw.random() < 2 / 3
    clients = ("native", "native", "edge") if native else ("edge",)
    end = minutes * 60.0
    blows = _blows(draw, layout, end, OWNERS_APART_S if native else 0.0)
    arrivals = []
    at, number = 1.0, 0
    while at < end:
        arrivals.append(_arrival(draw, at, number, draw.choice(clients)))
        at += draw.expovariate(1.2)
        number += 1
    return StormPlan(seed, minutes, layout, tuple(blows), tuple(arrivals))


@dataclass(slots=True)
class _Owners:
    """Who of the owners was hurt last, and until when the others are spared."""

    apart_s: float
    last: str = ""
    until: float = 0.0

    def struck(self, draw: random.Random, name: str, others: list[str], at: float, for_s: float) -> str:
        """Return who is hurt: this one, or somebody else while another owner recovers."""
        if not self.apart_s or name.partition("-")[0] not in OWNERS:
            return name
        if name != self.last and at < self.until:
            return draw.choice(others)
        self.last, self.until = name, max(self.until, at + for_s + self.apart_s)
        return name


def _blows(draw: random.Random, layout: Mapping[str, int], end: float, owners_apart_s: float) -> list[Blow]:
    # An edge's clients share its fate: it is never hurt itself, but what it hears may be late or lost.
    nodes = [f"{k}-{n}" for k in layout if k != "edge" for n in range(layout[k])]
    others = [name for name in nodes if name.partition("-")[0] not in OWNERS]
    owners = _Owners(owners_apart_s)
    out: list[Blow] = []
    at = 2.0
    while at < end:
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        victim, other = draw.sample(nodes, 2)
        at = round(at, 3)
        match kind:
            case "kill":
                for_s = round(draw.uniform(0.1, 1.5), 2)
                victim = owners.struck(draw, victim, others, at, for_s)
                out.append(Blow(at, kind, victim, for_s=for_s))
                if draw.random() < 0.25:  # two at once, or nearly
                    later, for_s = round(at + draw.choice([0.0, 0.1, 0.4, 1.0]), 3), round(draw.uniform(0.1, 1.5), 2)
                    other = owners.struck(draw, other, others, later, for_s)
                    out.append(Blow(later, kind, other, for_s=for_s))
                elif not owners_apart_s and draw.random() < 0.1:  # all who own requests, before a replacement is there
                    for name in (n for n in nodes if n not in others):
                        later = round(at + draw.choice([0.0, 0.1, 0.5]), 3)
                        out.append(Blow(later, kind, name, for_s=round(draw.uniform(0.6, 2.5), 2)))
            case "freeze" | "offline":
                for_s = round(draw.uniform(0.2, 5.0), 2)
                out.append(Blow(at, kind, owners.struck(draw, victim, others, at, for_s), for_s=for_s))
            case "cut":
                out.append(Blow(at, kind, victim, other, for_s=round(draw.uniform(0.2, 4.0), 2)))
            case "bus":
                out.append(Blow(at, kind, for_s=round(draw.uniform(0.1, 3.0), 2)))
            case "delay":
                lasts, most = draw.uniform(1.0, 8.0), draw.uniform(0.0, 0.2)
                out.append(Blow(at, kind, for_s=round(lasts, 2), amount=round(most, 3)))
            case "loss":
                lasts, share = draw.uniform(1.0, 6.0), draw.uniform(0.0, 0.05)
                out.append(Blow(at, kind, for_s=round(lasts, 2), amount=round(share, 3)))
        at += draw.expovariate(1 / 3.0)
    return sorted(out, key=lambda b: b.at)


def _arrival(draw: random.Random, at: float, number: int, client: Any) -> Arrival:
    tokens = draw.choice([1, 5, 20, 60, 60, 120, 200])
    request = Arrival(
        round(at, 3), f"r{number}", client, prompt_len=draw.choice([3, 40, 200, 600, 1500]), tokens=tokens,
        choices=draw.choice([1, 1, 1, 2, 3]), seed=draw.choice([None, None, number + 1]),
    )  # fmt: skip
    match draw.choice(["plain"] * 6 + ["stop", "expires", "leaves", "silent", "slow"]):
        case "stop":
            return replace(request, stop_at=tokens // 2 if tokens > 10 else 0)
        case "expires":
            return replace(request, tokens=2000, deadline_s=round(draw.uniform(0.05, 4.0), 2), may_expire=True)
        case "leaves":
            return replace(request, leaves_s=round(draw.uniform(0.02, 3.0), 2))
        case "silent" if client == "native":
            return replace(request, tokens=1000, leaves_s=round(draw.uniform(0.02, 3.0), 2), silent=True)
        case "slow":
            return replace(request, tokens=300, pause_s=round(draw.uniform(0.5, 6.0), 2))
        case _:
            return request
