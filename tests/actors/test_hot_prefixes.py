"""Hot prefixes: how they are counted, when a copy pays, and how much may be copied."""

from __future__ import annotations

import pytest

from actors.copy_budget import WINDOW_S, CopyBudget
from actors.hot_prefixes import HALF_LIFE_S, LEAST_ASKS, HotPrefixes, Place, worth_copying
from actors.kv_copies import LEAST_BLOCKS, MOST_WANTED, PART_NBYTES, WANTED_S, Copies
from actors.ttft import Costs, LoadCost, PrefillCost, View
from schemas import messages as m
from schemas.subjects import Ref

COSTS = Costs(PrefillCost(0.005, 1e-3), LoadCost(1.0, 1e5))
KV = Ref("kv", "0", "e")
SIZE = 1 << 20


def chain(name: str, blocks: int, *, after: list[bytes] | None = None) -> list[bytes]:
    """Hashes that begin like `after`."""
    return [*(after or []), *(f"{name}{n}".encode() for n in range(blocks))]


def test_what_many_prompts_share_is_hot_and_what_follows_it_is_not() -> None:
    """Up to the last length of the ladder within what is shared."""
    hot, shared = HotPrefixes(), chain("system", 100)

    for n in range(7):
        hot.ask(chain(f"user{n}", 60, after=shared), float(n))

    blocks, asks = hot.hottest(chain("another", 60, after=shared), 7.0)
    assert blocks == 96 and LEAST_ASKS <= asks < 7.0
    assert hot.hottest(chain("another", 60), 7.0) == (0, 0.0)


def test_a_prefix_cools_down() -> None:
    """Counts halve, so that what was hot an hour ago is not copied now."""
    hot, shared = HotPrefixes(), chain("system", 8)
    for _ in range(12):
        hot.ask(shared, 0.0)

    assert hot.hottest(shared, HALF_LIFE_S) == (8, pytest.approx(6.0))
    assert hot.hottest(shared, HALF_LIFE_S + 1.0) == (0, 0.0)


def test_one_of_several_senders_counts_for_all_of_them() -> None:
    """Each sees its share of the requests."""
    hot, shared = HotPrefixes(), chain("system", 8)
    for _ in range(3):
        hot.ask(shared, 0.0)

    assert hot.hottest(shared, 0.0)[0] == 0
    assert hot.hottest(shared, 0.0, senders=2) == (8, 6.0)


def test_the_table_is_bounded_and_forgets_what_was_asked_for_longest_ago() -> None:
    """A scan pushes out what is not asked for meanwhile, and nothing else."""
    hot, kept, lost = HotPrefixes(most=64), chain("kept", 4), chain("lost", 4)
    for prompt in [kept, lost] * 6:
        hot.ask(prompt, 0.0)

    for n in range(200):
        hot.ask(chain(f"scan{n}", 4), 0.0)
        hot.ask(kept, 0.0)

    assert len(hot) == 64
    assert hot.hottest(kept, 0.0)[0] == 4 and hot.hottest(lost, 0.0)[0] == 0


def holder(queued_s: float, tokens: int = 1000) -> Place:
    return Place("holder", View("a", queued_s, tokens, resident_tokens=tokens))


def other(queued_s: float = 0.0, copy_s: float = 0.05, name: str = "other", **stored: int) -> Place:
    return Place(name, View(name, queued_s, **stored), copy_s)


def test_a_hot_prefix_is_copied_when_its_holder_is_busy() -> None:
    """There the next prompt would begin sooner with the copy than anywhere without it."""
    copy = worth_copying(1000, [holder(0.5), other()], 10.0, COSTS)

    assert copy is not None and copy.to == "other"
    assert copy.gain_s == pytest.approx(0.5 - 0.01, abs=0.001)


@pytest.mark.parametrize(
    ("places", "asks"),
    [
        ([holder(0.0), other()], 10.0),
        ([holder(0.5), other(queued_s=0.5)], 10.0),
        ([holder(0.5), other(stored_tokens=1000)], 10.0),
        ([holder(0.5), other(), other(name="third", stored_tokens=1000)], 10.0),
        ([holder(0.5), other(copy_s=5.0)], 10.0),
        ([holder(0.5), Place("other", View("b", 0.0))], 10.0),
        ([holder(0.5), Place("other", View("b", 0.0, stale=True), 0.01)], 10.0),
        ([holder(0.5)], 10.0),
        ([], 10.0),
    ],
    ids="idle-holder busy-elsewhere there-already idle-second-holder dear no-way silent one-place none".split(),
)
def test_a_copy_that_would_change_nothing_is_not_made(places: list[Place], asks: float) -> None:
    """Nor one that takes more than it saves, nor one where there is one place alone."""
    assert worth_copying(1000, places, asks, COSTS) is None


def test_the_copy_goes_where_it_gains_most() -> None:
    """To one place at a time: by the next request more is known."""
    copy = worth_copying(1000, [holder(0.5), other(0.2, name="busier"), other(0.1, name="idler")], 10.0, COSTS)

    assert copy is not None and copy.to == "idler"


def test_no_minute_sees_more_bytes_than_allowed() -> None:
    """Whenever it begins; and never more than so many are under way."""
    budget = CopyBudget(per_minute=100, in_flight=60)
    budget.begin(60, 0.0)
    assert budget.left(1.0) == 0
    budget.end(60)
    assert budget.left(30.0) == 40
    budget.begin(40, 30.0)
    budget.end(40)

    assert budget.left(WINDOW_S - 0.1) == 0
    assert budget.left(WINDOW_S) == 60
    assert budget.left(WINDOW_S + 30.0) == 60


def hint(name: str, blocks: int) -> m.KvPrefetch:
    return m.KvPrefetch(hashes=chain(name, blocks), parents=[b""] * blocks, far=True)


def test_a_prefix_is_copied_in_parts_until_it_is_here() -> None:
    """No part has more bytes than may be under way."""
    copies, at = Copies(1 << 30), 0
    copies.add(hint("p", 80), KV, 0.0)
    copies.add(hint("p", 80), KV, 0.0)

    parts = []
    while (wanted := copies.first(1.0)) is not None and (count := copies.part(wanted, at, SIZE, 1.0)):
        copies.begin(wanted, count * SIZE, 1.0)
        copies.came(count, count * SIZE)
        copies.end(wanted, count * SIZE, failed=False)
        parts.append(count)
        at += count

    assert parts == [PART_NBYTES // SIZE] * 2 + [80 - 2 * (PART_NBYTES // SIZE)]
    said = copies.statistics()
    assert (said["copies_total"], said["copied_total"], said["copied_bytes_total"]) == (1, 80, 80 * SIZE)
    assert said["copies_waiting"] == said["copies_refused_total"] == said["copies_failed_total"] == 0


def test_what_the_cap_forbids_is_refused_and_counted() -> None:
    """A full queue likewise; with a cap of nothing all is refused."""
    copies = Copies(8 * SIZE)
    for n in range(MOST_WANTED + 1):
        copies.add(hint(f"p{n}", 8), KV, 0.0)
    assert copies.statistics()["copies_refused_total"] == 1
    first = copies.first(0.0)
    assert first is not None and copies.part(first, 0, SIZE, 0.0) == 8
    copies.begin(first, 8 * SIZE, 0.0)
    copies.end(first, 8 * SIZE, failed=False)
    assert copies.part(first, 8, SIZE, 0.0) == 0

    second = copies.first(0.0)

    assert second is not None and copies.part(second, 0, SIZE, 0.0) == 0
    assert copies.statistics()["copies_refused_total"] == 2
    nothing = Copies(0)
    nothing.add(hint("p", LEAST_BLOCKS), KV, 0.0)
    assert nothing.first(0.0) is None and nothing.statistics()["copies_refused_total"] == 1


def test_a_copy_that_fails_or_gets_stuck_or_waits_too_long_is_given_up() -> None:
    """It is told of again if it stays hot."""
    copies = Copies(1 << 30)
    for name in ("fails", "stuck", "late"):
        copies.add(hint(name, 8), KV, 0.0)
    fails = copies.first(0.0)
    assert fails is not None and copies.part(fails, 0, SIZE, 0.0) == 8
    copies.begin(fails, 8 * SIZE, 0.0)
    copies.end(fails, 8 * SIZE, failed=True)
    stuck = copies.first(0.0)
    assert stuck is not None and copies.part(stuck, 3, SIZE, 0.0) == 5

    assert copies.part(stuck, 3, SIZE, 0.0) == 0
    assert copies.first(WANTED_S) is None

    assert copies.statistics()["copies_failed_total"] == 3
