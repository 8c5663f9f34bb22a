"""Time per hop, from the spans that nodes write to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.stats import percentile

HOPS = ("tokenize", "admission", "prefill", "transfer", "decode", "detokenize", "edge")


def read(path: Path) -> dict[str, list[float]]:
    """Return the durations of every hop in seconds; a cut last line is left out."""
    found: dict[str, list[float]] = {}
    if not path.exists():
        return found
    for line in path.read_text().split("\n"):
        try:
            span = json.loads(line)
            name, duration = str(span["name"]), float(span["end"]) - float(span["start"])
        except (ValueError, KeyError, TypeError):
            continue
        if name.startswith("hop."):
            found.setdefault(name.removeprefix("hop."), []).append(duration)
    return found


def table(durations: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return count and percentiles per hop, in the order of a request's way; unknown hops come last."""
    order = [*HOPS, *sorted(set(durations) - set(HOPS))]
    return {
        hop: {
            "count": len(durations[hop]),
            "p50_ms": round(percentile(durations[hop], 0.5) * 1000, 3),
            "p99_ms": round(percentile(durations[hop], 0.99) * 1000, 3),
        }
        for hop in order
        if hop in durations
    }
