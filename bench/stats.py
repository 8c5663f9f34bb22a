"""Figures from timings: percentiles, rates, and what a level of load came to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.client import Timing


def percentile(values: Iterable[float], q: float) -> float:
    """Return the `q`-quantile (0 to 1) by the nearest rank; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, max(0, int(q * len(ordered))))]


@dataclass(frozen=True, slots=True)
class Level:
    """What one number of concurrent streams came to."""

    streams: int
    requests: int
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    prompt_tokens: float
    completion_tokens: float

    def row(self) -> dict[str, Any]:
        """Return the figures, rounded."""
        return {k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(self).items()}


def level(streams: int, timings: Sequence[Timing], elapsed_s: float) -> Level:
    """Sum up one level."""
    ttft = [t.ttft_s * 1000 for t in timings]
    itl = [gap * 1000 for t in timings for gap in t.itl_s]
    tokens = sum(t.completion_tokens for t in timings)
    return Level(
        streams=streams,
        requests=len(timings),
        tokens_per_s=tokens / elapsed_s,
        ttft_p50_ms=percentile(ttft, 0.5),
        ttft_p99_ms=percentile(ttft, 0.99),
        itl_p50_ms=percentile(itl, 0.5),
        itl_p99_ms=percentile(itl, 0.99),
        itl_max_ms=max(itl, default=float("nan")),
        prompt_tokens=sum(t.prompt_tokens for t in timings) / len(timings),
        completion_tokens=tokens / len(timings),
    )
