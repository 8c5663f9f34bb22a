"""The gremlin strikes whom it may, when it may, and the same way for the same seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.gremlin import MARGIN, TAIL, Gremlin, Progress, draw
from chaos.scenarios import GROUPS, SCENARIOS, resolve

seeds = st.integers(0, 2**32)


@given(seeds, st.integers(0, 50), st.integers(30, 400))
def test_the_moment_lies_between_the_first_and_the_last_ten(seed: int, round_: int, total: int) -> None:
    """A stream that has reached the moment is past its first token and can still be struck before its last ten."""
    moment = Gremlin(seed, round_).moment(total)

    assert 1 <= moment
    assert total - moment > TAIL + MARGIN - 1


@given(seeds, st.integers(0, 100), st.integers(30, 100))
def test_only_servers_of_a_stream_in_the_window_are_struck(seed: int, done: int, total: int) -> None:
    """Whatever the progress, a strike means that its victim holds a stream past its first and before its last ten."""
    progress = [Progress("a", min(done, total), total), Progress("b", 0, total)]
    serving = {"decode/0": frozenset({"a"}), "decode/1": frozenset({"b"}), "decode/2": frozenset()}

    strike = Gremlin(seed, 0).decide(progress, serving)

    if strike is not None:
        assert strike.victim == "decode/0"
        assert strike.streams == ("a",)
        assert 1 <= done < total - TAIL


@given(seeds, st.integers(0, 20))
def test_a_stream_that_advances_one_by_one_is_always_struck(seed: int, round_: int) -> None:
    """No seed draws a moment that never comes."""
    gremlin = Gremlin(seed, round_)
    serving = {"decode/0": frozenset({"a"})}

    strikes = [gremlin.decide([Progress("a", done, 64)], serving) for done in range(65)]

    assert any(strikes)


@given(seeds)
def test_the_same_seed_decides_the_same(seed: int) -> None:
    """Victim and moment follow from seed and round alone."""
    progress = [Progress("a", 30, 64), Progress("b", 30, 64)]
    serving = {"decode/0": frozenset({"a"}), "decode/1": frozenset({"b"})}

    assert Gremlin(seed, 3).decide(progress, serving) == Gremlin(seed, 3).decide(list(reversed(progress)), serving)


def test_seeds_differ_in_what_they_decide() -> None:
    """Both victims and many moments occur."""
    progress = [Progress("a", 45, 64), Progress("b", 45, 64)]
    serving = {"decode/0": frozenset({"a"}), "decode/1": frozenset({"b"})}
    strikes = {s.victim for s in (Gremlin(seed, 0).decide(progress, serving) for seed in range(40)) if s}

    assert strikes == {"decode/0", "decode/1"}
    assert len({Gremlin(seed, 0).moment(96) for seed in range(100)}) > 30


def test_upstream_victims_hold_a_pending_request_while_streams_run() -> None:
    """Neither an idle victim nor a moment without running streams is struck."""
    gremlin = Gremlin(1, 0)
    running = [Progress("a", 5, 64)]
    serving = {"prefill/0": frozenset({"long"})}

    assert gremlin.decide_upstream([], frozenset({"long"}), serving) is None
    assert gremlin.decide_upstream(running, frozenset(), serving) is None
    assert gremlin.decide_upstream([Progress("a", 0, 64)], frozenset({"long"}), serving) is None
    strike = gremlin.decide_upstream(running, frozenset({"long"}), serving)
    assert strike is not None and strike.victim == "prefill/0"


@given(seeds, st.text(max_size=5))
def test_draws_lie_in_the_unit_interval(seed: int, purpose: str) -> None:
    """A draw may index a list."""
    assert 0.0 <= draw(seed, purpose) < 1.0


def test_groups_name_scenarios() -> None:
    """Every member of a group exists; an unknown name lists what does."""
    for members in GROUPS.values():
        assert set(members) <= set(SCENARIOS)
    assert [s.name for s in resolve("failover")] == list(GROUPS["failover"])
    with pytest.raises(KeyError, match="kill-decode"):
        resolve("nothing")
