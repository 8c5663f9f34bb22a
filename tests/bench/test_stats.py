"""A benchmark's figures are what its timings say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench import hops
from bench.client import Timing
from bench.stats import level, percentile


def test_percentiles_are_values_that_occurred() -> None:
    """By the nearest rank, whatever the order."""
    values = [float(v) for v in (5, 1, 4, 2, 3)]

    assert [percentile(values, q) for q in (0.0, 0.5, 0.99, 1.0)] == [1, 3, 5, 5]
    assert math.isnan(percentile([], 0.5))


def test_a_level_sums_up_its_timings() -> None:
    """Rate over the elapsed time; first text from the sending; gaps between texts."""
    one = Timing(10.0, [10.5, 10.6, 10.9], 11.0, prompt_tokens=100, completion_tokens=4)
    two = Timing(10.0, [11.5, 11.6], 12.0, prompt_tokens=120, completion_tokens=4)

    found = level(2, [one, two], 2.0)

    assert found.tokens_per_s == 4.0
    assert (found.ttft_p50_ms, found.ttft_p99_ms) == (pytest.approx(1500), pytest.approx(1500))
    assert found.itl_p50_ms == pytest.approx(100)
    assert found.itl_max_ms == pytest.approx(300)
    assert found.prompt_tokens == 110


def test_hops_come_from_spans_in_the_order_of_a_request(tmp_path: Path) -> None:
    """Other spans, cut lines and foreign lines are left out."""
    path = tmp_path / "spans.jsonl"
    spans = [
        {"name": "hop.decode", "start": 1.0, "end": 1.5},
        {"name": "hop.tokenize", "start": 1.0, "end": 1.002},
        {"name": "request", "start": 1.0, "end": 2.0},
    ]
    path.write_text("\n".join(json.dumps(s) for s in spans) + '\n"foreign"\n{"name": "hop.de')

    found = hops.table(hops.read(path))

    assert list(found) == ["tokenize", "decode"]
    assert found["decode"] == {"count": 1, "p50_ms": 500.0, "p99_ms": 500.0}


def test_no_spans_are_no_hops(tmp_path: Path) -> None:
    """A file that nobody wrote is an empty table."""
    assert hops.read(tmp_path / "nothing") == {}
