"""What the comparisons are held against, and ratios of one run. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A bound for a ratio: ours over the best peer (or over one that is named)."""

    bound: float
    at_least: bool
    peer: str = ""  # empty: the best of all

    def met(self, ratio: float) -> bool:
        """Whether a ratio keeps the bound; one that is not a number does not."""
        return ratio >= self.bound if self.at_least else ratio <= self.bound

    def __str__(self) -> str:
        """Return it as in a table."""
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}" + (f" × {self.peer}" if self.peer else "")


SHORT, LONG = 110, 1024  # tokens of a prompt, about

# (tokens of the prompt, streams, figure) to target, for whole servers.
SERVER: dict[tuple[int, int, str], Target] = {
    (SHORT, 1, "tokens_per_s"): Target(1.5, True),
    (SHORT, 4, "tokens_per_s"): Target(2.0, True),
    (SHORT, 16, "tokens_per_s"): Target(2.2, True),
    (SHORT, 1, "ttft_p50_ms"): Target(0.5, False),
    (SHORT, 16, "ttft_p50_ms"): Target(0.3, False),
}
START = Target(0.2, False, "vllm")

# (what, number) to target, for engines alone.
ENGINE: dict[tuple[str, int], Target] = {
    ("decode", 1): Target(1.3, True, "llama"),
    ("decode", 16): Target(2.0, True),
    ("decode", 64): Target(2.0, True),
    ("prefill", LONG): Target(4.0, True, "llama"),
}
PREFILL_VLLM = Target(1.8, True, "vllm")
ALONE = {"load_to_first_token_s": Target(1.0, False), "rss_mb": Target(700.0, False)}  # once the weights are packed

# The KV store. Time to the first token over that of the same prompts computed, for prompts from LONG tokens on; rates
# over a plain copy or plain reads in the same process; tokens per second beside write-back over those without.
KV_TTFT = {"host": Target(0.10, False), "disk": Target(0.20, False)}
KV_RATE = {"unverified": Target(0.7, True), "verified": Target(0.4, True)}
KV_WRITE_BACK = Target(0.98, True)

SMALLER_IS_BETTER = {"ttft_p50_ms", "itl_p50_ms", "itl_max_over_p50", "start_s", "pss_mb"}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over a peer's figure."""

    peer: str
    value: float


def ratio(figure: str, ours: float, peers: Mapping[str, float], peer: str = "") -> Ratio | None:
    """Return ours over the best peer, or over the one named; None without such a peer.

    Args:
        figure: its name, which tells whether small is good.
        ours: our own figure.
        peers: the figure of each peer.
        peer: the one to compare with; empty for the best.
    """
    known = {name: value for name, value in peers.items() if not math.isnan(value) and value > 0}
    if peer:
        known = {name: value for name, value in known.items() if name == peer}
    if not known:
        return None
    best = (min if figure in SMALLER_IS_BETTER else max)(known, key=lambda name: known[name])
    return Ratio(best, ours / known[best])


def medians(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median of each figure over the repetitions that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)) and not math.isnan(value):
                columns.setdefault(name, []).append(float(value))
    return {name: round(statistics.median(values), 3) for name, values in columns.items()}
