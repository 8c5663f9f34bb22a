"""What an admission node shows on its metrics page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from virtual_fleet import fleet

from runtime.virtual_clock import VirtualClock, run_virtual


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def test_failovers_are_on_the_page_as_zero_before_the_first(tmp_path: Path) -> None:
    """A dashboard tells "none yet" from "not measured"."""

    async def main(clock: VirtualClock) -> str:
        async with fleet(clock, tmp_path) as f:
            return str(f.actor("admission-0").context.telemetry.render())

    page = run_virtual(main, seed=0)

    for kind in ("prefill", "decode", "both", "detokenize"):
        assert f'headrace_failovers_total{{kind="{kind}",reason="exit"}} 0.0' in page
