"""`bench.engine` fails where a figure misses its target, and says which."""

from __future__ import annotations

from bench.engine import missing


def test_a_figure_that_misses_is_named_and_one_without_a_target_is_not() -> None:
    """Ratios to peers and figures of the whole system alike."""
    ratios = [
        {"what": "decode", "number": 1, "over": "llama", "ratio": 1.2, "met": False},
        {"what": "decode", "number": 4, "over": "llama", "ratio": 1.1},
        {"what": "prefill", "number": 1024, "over": "vllm", "ratio": 3.0, "met": True},
    ]
    system = {"streams": 16, "pause_over_median_itl": {"value": 3.5, "met": False}, "other": {"value": 1, "met": True}}

    assert missing({"ratios": ratios, "system": system}) == ["decode 1 over llama", "pause_over_median_itl"]
    assert missing({"ratios": []}) == []


def test_an_engine_that_loads_slowly_or_is_too_large_misses_too() -> None:
    """By the configuration that counts: the first runner with the most threads."""
    row = {"runner": "native", "threads": 2, "load_to_first_token_s": 1.5, "rss_mb": 600.0}

    assert missing({"ratios": [], "ours": [row, row | {"threads": 1, "rss_mb": 900.0}]}) == ["load_to_first_token_s"]
