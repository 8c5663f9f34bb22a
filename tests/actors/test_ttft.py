"""The estimate of the time to a first token, and the replica where it is least."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.ttft import Costs, LoadCost, PrefillCost, View, estimate, least_ttft

PREFILL = PrefillCost(0.01, 1e-3, 1e-7)
LOAD = LoadCost(bytes_per_token=1000, bytes_per_s=1e8)  # 10 µs per token, a hundredth of its prefill
COPY = LoadCost(bytes_per_token=1000, bytes_per_s=1e7, fixed_s=0.005)
OWN = Costs(PREFILL, LOAD)
ALL = Costs(PREFILL, LOAD, COPY)


def test_a_prefill_after_a_prefix_attends_to_the_prefix() -> None:
    """Computing in two parts costs what the whole costs, but for the fixed part of the second."""
    whole, parts = PREFILL.seconds(3000), PREFILL.seconds(1000) + PREFILL.seconds(2000, 1000)

    assert parts - whole == pytest.approx(PREFILL.fixed_s)


def test_an_estimate_is_queue_and_load_and_the_rest() -> None:
    """The three terms, and what they are made of."""
    choice = estimate(View("a", 2.0, stored_tokens=600), 1000, OWN)

    assert choice.service_s == pytest.approx(600e-5 + PREFILL.seconds(400, 600))
    assert choice.ttft_s == pytest.approx(2.0 + choice.service_s)
    assert (choice.loaded_tokens, choice.copied_tokens, choice.copy_from) == (600, 0, "")


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is stored whole still needs its logits."""
    choice = estimate(View("a", 0.0, stored_tokens=5000), 1000, OWN)

    assert choice.loaded_tokens == 999


def test_nothing_is_loaded_where_computing_is_faster() -> None:
    """A slow store is left alone."""
    slow = Costs(PREFILL, LoadCost(1000, 1e5))

    assert estimate(View("a", 0.0, stored_tokens=600), 1000, slow).loaded_tokens == 0


def test_a_stored_prefix_wins_until_its_queue_is_longer_than_computing() -> None:
    """Neither the longest match nor the shortest queue decides alone."""
    short = [View("a", 0.5, stored_tokens=900), View("b", 0.0)]
    long = [View("a", 2.0, stored_tokens=900), View("b", 0.0)]

    answers = [least_ttft(views, 1000, OWN) for views in (short, long)]

    assert [answer and answer.name for answer in answers] == ["a", "b"]


def test_free_blocks_decide_between_equals_then_names_do() -> None:
    """Estimates within a millisecond are equal."""
    views = [View("c", 0.0, free_blocks=5), View("b", 0.0, free_blocks=9), View("a", 0.0002, free_blocks=9)]

    chosen = least_ttft(views, 100, OWN)
    without = least_ttft(views[:1], 100, OWN)

    assert chosen is not None and chosen.name == "a"
    assert without is not None and without.name == "c"


def test_a_replica_not_heard_of_is_the_last_choice() -> None:
    """A stale view counts as busy, whatever it says."""
    stale = View("a", 0.0, stored_tokens=900, stale=True)

    chosen, alone = least_ttft([stale, View("b", 9.0)], 1000, OWN), least_ttft([stale], 1000, OWN)

    assert chosen is not None and chosen.name == "b"
    assert alone is not None and alone.name == "a"


def test_nobody_there_is_no_choice() -> None:
    """Without replicas there is no answer."""
    assert least_ttft([], 1000, OWN) is None


def test_a_prefix_is_copied_when_its_holder_is_busy_and_only_then() -> None:
    """Hot prefixes spread by copies; cold ones stay where they are."""
    busy = [View("a", 3.0, stored_tokens=900), View("b", 0.0, stored_tokens=100)]
    idle = [View("a", 0.0, stored_tokens=900), View("b", 0.0, stored_tokens=100)]

    copied, stayed = least_ttft(busy, 1000, ALL), least_ttft(idle, 1000, ALL)

    assert copied is not None and stayed is not None
    assert (copied.name, copied.loaded_tokens, copied.copied_tokens, copied.copy_from) == ("b", 100, 800, "a")
    assert copied.service_s == pytest.approx(100e-5 + 0.005 + 800e-4 + PREFILL.seconds(100, 900))
    assert (stayed.name, stayed.copied_tokens) == ("a", 0)


def test_nothing_is_copied_over_a_slow_wire() -> None:
    """A copy that takes longer than computing is not made."""
    slow = Costs(PREFILL, LOAD, LoadCost(1000, 1e5))

    chosen = least_ttft([View("a", 3.0, stored_tokens=900), View("b", 0.0)], 1000, slow)

    assert chosen is not None and (chosen.name, chosen.copied_tokens) == ("b", 0)


def test_what_an_engine_has_itself_needs_no_loading() -> None:
    """Resident, then loaded, then computed; a slow load leaves what is resident."""
    view = View("a", 0.0, stored_tokens=800, resident_tokens=500)
    slow = Costs(PREFILL, LoadCost(1000, 1e5))

    loaded, left = estimate(view, 1000, OWN), estimate(view, 1000, slow)

    assert loaded.service_s == pytest.approx(300e-5 + PREFILL.seconds(200, 800))
    assert (left.loaded_tokens, left.service_s) == (500, pytest.approx(PREFILL.seconds(500, 500)))


def test_what_lies_on_a_disk_is_loaded_where_that_is_faster_than_computing() -> None:
    """It costs the disk and the load; a disk that is too slow is left alone, host memory is not."""
    view = View("a", 0.0, stored_tokens=800, memory_tokens=300)
    quick, slow = (Costs(PREFILL, LOAD, disk=LoadCost(1000, rate)) for rate in (1e7, 1e5))

    all_of_it, memory = estimate(view, 1000, quick), estimate(view, 1000, slow)

    assert all_of_it.service_s == pytest.approx(800e-5 + 500e-4 + PREFILL.seconds(200, 800))
    assert (memory.loaded_tokens, memory.service_s) == (300, pytest.approx(300e-5 + PREFILL.seconds(700, 300)))


def test_what_the_store_would_fetch_from_another_host_counts_with_the_time_that_takes() -> None:
    """Loaded after it has come; not fetched where computing is sooner."""
    view = View("a", 1.0, stored_tokens=200, far_tokens=900, far_s=0.05)

    choice = estimate(view, 1000, OWN)
    slow = estimate(View("a", 1.0, stored_tokens=200, far_tokens=900, far_s=5.0), 1000, OWN)

    assert choice.service_s == pytest.approx(0.05 + 900e-5 + PREFILL.seconds(100, 900))
    assert (choice.loaded_tokens, choice.copied_tokens, choice.copy_from) == (200, 700, "")
    assert (slow.loaded_tokens, slow.copied_tokens) == (200, 0)


def test_replicas_may_differ_in_speed() -> None:
    """A view's own costs go before the common ones."""
    fast = Costs(PrefillCost(0.001, 1e-4), LOAD)

    chosen = least_ttft([View("a", 0.0), View("b", 0.5, costs=fast)], 1000, OWN)

    assert chosen is not None and chosen.name == "b"
    assert chosen.ttft_s == pytest.approx(0.5 + 0.101)


VIEWS = st.lists(
    st.builds(
        View,
        name=st.sampled_from("abcdefgh"),
        queued_s=st.floats(0, 100),
        stored_tokens=st.integers(0, 5000),
        free_blocks=st.integers(0, 100),
    ),
    min_size=1,
    unique_by=lambda view: view.name,
)


@given(views=VIEWS, tokens=st.integers(1, 5000), costs=st.sampled_from([OWN, ALL]))
def test_no_replica_would_be_sooner(views: list[View], tokens: int, costs: Costs) -> None:
    """The choice is within a millisecond of the best, and never says more than is stored somewhere."""
    choice = least_ttft(views, tokens, costs)

    assert choice is not None
    assert choice.ttft_s <= min(estimate(view, tokens, OWN).ttft_s for view in views) + 0.001
    have = choice.loaded_tokens + choice.copied_tokens
    assert 0 <= have <= min(tokens - 1, max(view.stored_tokens for view in views))
    assert bool(choice.copied_tokens) == bool(choice.copy_from) and choice.copy_from != choice.name
