"""Whether requests can be served now. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.membership import Member

STATES = ("starting", "ready", "draining", "failed")
SILENCE_S = 1.5
NEEDED: dict[str, tuple[str, ...]] = {
    "admission": ("admission",),
    "tokenize": ("tokenize",),
    "detokenize": ("detokenize",),
    "decode engine": ("decode", "both"),
}


def cut_off(members: Iterable[Member], now: float) -> bool:
    """Whether not even this node's own heartbeats come back from the bus; a mere lag of the loop does not count."""
    return now - max((m.last_heard for m in members), default=now) > SILENCE_S


def missing(members: Iterable[Member]) -> list[str]:
    """Return why requests cannot be served, one reason per missing part; empty when they can.

    Engines are `ready` only after a real step, so that this says that the model answers. A prefill engine is not
    needed: a decode engine computes a prompt itself when there is none.
    """
    reasons = []
    for part, of_kind in _lacking(members).items():
        failed = next((m for m in of_kind if m.state == "failed"), None)
        if failed is not None:
            reasons.append(f"no {part} is ready: {failed.reason or 'it failed to start'}")
        elif of_kind:
            reasons.append(f"no {part} is ready: {of_kind[0].state}")
        else:
            reasons.append(f"no {part} is running")
    return reasons


def coming(members: Iterable[Member]) -> bool:
    """Whether what is missing may be here in a moment, as what was killed is: no part of it has failed to start."""
    return not any(m.state == "failed" for of_kind in _lacking(members).values() for m in of_kind)


def _lacking(members: Iterable[Member]) -> dict[str, list[Member]]:
    """Return the parts of which none is ready, and who of each is there."""
    known = list(members)
    parts = {part: [m for m in known if m.ref.kind in kinds] for part, kinds in NEEDED.items()}
    return {part: of_kind for part, of_kind in parts.items() if not any(m.state == "ready" for m in of_kind)}


def degraded(members: Iterable[Member]) -> list[str]:
    """Return what does not work although requests can be served: a store without one of its tiers, say."""
    return [f"{m.ref.kind} {m.ref.id}: {m.load['unhealthy']}" for m in members if m.load.get("unhealthy")]
