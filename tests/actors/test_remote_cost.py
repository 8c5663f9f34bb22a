"""Whether blocks of another host are worth fetching."""

from __future__ import annotations

import pytest

from actors.remote_cost import FIRST_BYTES_PER_S, Way, worth


def test_blocks_are_fetched_where_that_is_sooner_than_computing_them() -> None:
    """100 blocks of 1 MB at 100 MB/s take a second and the setup."""
    way = Way(setup_s=0.1, bytes_per_s=100e6)

    assert worth(100, 1_000_000, way, block_s=0.02, limit_s=10.0) == 100
    assert worth(100, 1_000_000, way, block_s=0.011, limit_s=10.0) == 0
    assert worth(100, 1_000_000, way, block_s=0.0, limit_s=10.0) == 100  # not known: it is tried


def test_no_more_is_asked_for_than_comes_in_time() -> None:
    """And what is too little to bother with is not asked for at all."""
    way = Way(setup_s=0.1, bytes_per_s=100e6)

    assert worth(100, 1_000_000, way, block_s=1.0, limit_s=0.6) == pytest.approx(50, abs=1)
    assert worth(100, 1_000_000, way, block_s=1.0, limit_s=0.1) == 0
    assert worth(1, 1, way, block_s=9.0, limit_s=9.0) == 0
    assert worth(0, 1, way, block_s=9.0, limit_s=9.0) == 0


def test_a_way_is_learned_from_what_fetches_take() -> None:
    """A large fetch says much of the rate, a small one little; both tell the setup."""
    large = small = Way()
    for _ in range(40):
        large = large.learned(8 << 20, total_s=0.030, copy_s=0.010)
        small = small.learned(4096, total_s=0.030, copy_s=0.010)

    assert large.bytes_per_s == pytest.approx((8 << 20) / 0.010, rel=0.01)
    assert large.setup_s == pytest.approx(0.020, rel=0.01)
    assert small.bytes_per_s > 0.9 * FIRST_BYTES_PER_S
    assert Way().learned(0, 1.0, 1.0) == Way().learned(1, 0.1, 1.0) == Way().learned(1, 1.0, 0.0) == Way()
