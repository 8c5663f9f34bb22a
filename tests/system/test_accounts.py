"""What answers say of cached tokens, with the real model over HTTP: cold, warm and half warm, streamed and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.launch import System, wait_until

pytestmark = pytest.mark.slow

STORY = "The river came down from the hills, past the mill and the old bridge, and nobody knew how long it was. " * 5
HALF = (
    STORY[: len(STORY) // 2] + "Then came the winter, and the wheel stood still for the first time in a hundred years."
)
BLOCK = 16


def cached(usage: dict[str, Any]) -> int:
    """Check the sums of an account; returns its cached tokens."""
    found = int(usage["prompt_tokens_details"]["cached_tokens"])
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert found % BLOCK == 0 and found < usage["prompt_tokens"]
    return found


@pytest.mark.parametrize("layout", [("--decode", "1"), ("--prefill", "1", "--decode", "1")], ids=["one", "split"])
def test_accounts_are_true_and_equal_in_every_form(
    layout: tuple[str, ...], tmp_path: Path, model_path: Path, nats_binary: str
) -> None:
    """Blocks that came from another engine for the same request are not cached ones; n counts its prompt once."""

    def usage(text: str, **options: Any) -> dict[str, Any]:
        response = system.chat(text, max_tokens=6, **options)
        assert response.status_code == 200, response.text
        return dict(response.json()["usage"])

    system = System(tmp_path, "--model", str(model_path), *layout).start()
    try:
        first = usage(STORY)
        assert cached(first) == 0
        full = (first["prompt_tokens"] - 1) // BLOCK * BLOCK
        # In the split form a prompt's blocks are known once the hand-off is over, which the answer does not wait for.
        wait_until(lambda: cached(usage(STORY)) == full, limit_s=10.0, what="the prompt is warm")

        warm = usage(STORY)
        streamed = system.stream(STORY, max_tokens=6).usage
        twice = usage(STORY, n=2)
        half = cached(usage(HALF))
        fresh = cached(system.stream(HALF[::-1], max_tokens=6).usage)
        salted = cached(usage(STORY, cache_salt="other"))

        assert warm == streamed and cached(warm) == full
        assert (twice["prompt_tokens"], twice["completion_tokens"]) == (warm["prompt_tokens"], 12)
        assert cached(twice) == full and 0 < half < full
        assert fresh <= BLOCK and salted == 0  # a block of the template's beginning is the same for all
    finally:
        assert (system.stop(), system.leftovers()) == (0, []), system.tail()
