"""What is done to a store is a function of the seed; books, counters and sums of it add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.kv.faulty import cut
from chaos.kv.hosts import EACH, strikes
from chaos.kv.live import TOKENS, loads, unbalanced
from chaos.kv.model import NBYTES, ROOT, Tally, chain, content
from chaos.kv.plan import WEIGHTS, Growth, pick, plan, ripe

seeds = st.integers(0, 2**32)


@given(seeds, st.integers(0, 15))
def test_a_plan_follows_from_its_seed_and_only_grows(seed: int, count: int) -> None:
    """A failing seed is run again as it was; a longer run begins with the same faults."""
    assert plan(seed, count) == plan(seed, 15)[:count]


@given(seeds, st.integers(0, 15))
def test_what_is_done_to_two_hosts_follows_from_the_seed_as_well(seed: int, count: int) -> None:
    """Of each kind, and nothing that would end a process which has not been struck."""
    assert strikes(seed, count) == strikes(seed, 15)[:count]
    assert {each.kind for each in strikes(seed, 100)} == set(EACH) == {"flip", "freeze", "kill"}


def test_plans_of_two_seeds_differ_and_have_everything() -> None:
    """Each kind of fault comes about as often as it should."""
    one, two = plan(1, 1000), plan(2, 1000)

    assert one != two
    for kind, weight in WEIGHTS.items():
        share = sum(strike.kind == kind for strike in one) / 1000
        assert abs(share - weight / sum(WEIGHTS.values())) < 0.05 and share > 0
    assert all(0 <= s.victim < 1 and 0 <= s.place < 1 and 0 <= s.bit < 8 and 0 < s.seconds < 5 for s in one)


def test_somebody_is_picked_if_anybody_is_there() -> None:
    """The last of several is reached by a share just below one."""
    assert pick(0.5, []) is None
    assert [pick(share, ["a", "b"]) for share in (0.0, 0.49, 0.5, 0.999)] == ["a", "a", "b", "b"]


def test_only_who_has_lived_long_enough_is_killed() -> None:
    """Otherwise its supervisor would take it for a crash loop."""
    born = {"kv/0": 0.0, "decode/0": 95.0, "decode/1": 80.0}

    assert {ripe(share / 10, born, 100.0, 10.0) for share in range(10)} == {"kv/0", "decode/1"}
    assert ripe(0.0, born, 5.0, 10.0) is None


def test_counters_of_processes_that_die_add_up() -> None:
    """A counter that is lower than before has begun anew."""
    growth = Growth()
    for value in (3.0, 5.0, 5.0, 2.0, 0.0, 4.0):
        growth.take({"n": value})

    assert growth.total["n"] == 5 + 2 + 4


def test_requests_share_beginnings_and_are_all_different() -> None:
    """Several ends to each beginning; over HTTP and NATS, seeded and greedy."""
    made = loads("m")
    texts = [load.body["messages"][0]["content"] for load in made]

    assert len({load.key for load in made}) == len(set(texts)) == len(made) == 40
    assert len({text[:500] for text in texts}) == 10
    assert {load.client for load in made} == {"http", "native"}
    assert {"seed" in load.body for load in made} == {True, False}
    assert {load.total for load in made} == {TOKENS}


AT_REST = {
    "blocks_total": 8.0, "blocks_free": 5.0, "blocks_cached": 0.0, "blocks_in_use": 3.0, "blocks_quarantined": 0.0,
    "stored": 3.0, "reads": 0.0, "writes": 0.0, "unconfirmed": 0.0,
}  # fmt: skip


def test_a_store_at_rest_holds_what_it_stores_and_an_engine_nothing() -> None:
    """The same figures are right for the one and wrong for the other."""
    assert unbalanced("kv", AT_REST) == []
    assert unbalanced("decode", AT_REST) == ["3 blocks are held by nobody"]
    assert unbalanced("kv", {}) == [] and unbalanced("decode", {}) != []


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"blocks_free": 4.0}, "of 8"),
        ({"blocks_free": 4.0, "blocks_quarantined": 1.0}, "1 blocks are quarantined"),
        ({"stored": 2.0}, "1 blocks are held by nobody"),
        ({"reads": 2.0}, "2 reads"),
        ({"unconfirmed": 1.0}, "1 unconfirmed"),
    ],
)
def test_what_does_not_add_up_is_named(changed: dict[str, float], found: str) -> None:
    """Lost and quarantined blocks, and leases that nobody ends."""
    assert any(found in problem for problem in unbalanced("kv", AT_REST | changed))


@given(st.lists(st.binary(max_size=8), max_size=5), st.integers(-2, 50))
def test_cut_buffers_hold_the_first_bytes(parts: list[bytes], nbytes: int) -> None:
    """Together they are the beginning of what was given, and none is empty."""
    out = cut([memoryview(part) for part in parts], nbytes)

    assert b"".join(bytes(part) for part in out) == b"".join(parts)[: max(0, nbytes)]
    assert all(len(part) for part in out)


def test_every_hash_has_bytes_of_its_own() -> None:
    """So a block in another's place is always seen."""
    hashes = [digest for name in range(5) for digest in chain(name, 4).hashes]

    assert len({content(digest) for digest in hashes}) == len(set(hashes)) == 20
    assert {len(content(digest)) for digest in hashes} == {NBYTES}
    assert chain(1, 3).parents == [ROOT, *chain(1, 2).hashes]


def test_a_book_tells_wrong_bytes_from_right_ones_and_counts_what_struck() -> None:
    """Two books together say what both say."""
    (digest,) = chain(1, 1).hashes
    good, bad = Tally(), Tally()

    assert good.compare(digest, content(digest), "here")
    good.fault("flip", effective=True)
    assert good.ok
    assert not bad.compare(digest, bytes(NBYTES), "here")
    bad.fault("flip", effective=False)
    assert not bad.ok
    good.add(bad)

    assert (good.num_wrong, good.blocks_compared, good.ok) == (1, 2, False)
    assert (good.performed["flip"], good.effective["flip"]) == (2, 1)


def test_a_ledger_that_does_not_balance_is_a_violation() -> None:
    """It is told, and the campaign goes on."""

    class Broken:
        def check_integrity(self) -> None:
            raise AssertionError("a block is in no state")

    tally = Tally()
    tally.balance(Broken())

    assert tally.ledgers == 1 and tally.violations == [
        "the ledger of a Broken does not balance: a block is in no state"
    ]
