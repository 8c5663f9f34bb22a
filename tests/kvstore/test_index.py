"""The index of stored blocks: events, gaps, dumps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.index import BlockIndex, Dump, Event, EventLog, Op

HASHES = [bytes([i]) * 32 for i in range(6)]


def test_a_follower_that_joins_late_ends_up_equal() -> None:
    """Events that come before the dump are kept and applied after it, each once."""
    log, index = EventLog("e"), BlockIndex()
    log.record(Op.ADD, HASHES[0])
    log.record(Op.ADD, HASHES[1])
    log.collect()
    log.record(Op.DROP, HASHES[0])
    dump = Dump("e", log.number, (HASHES[1],))
    log.record(Op.ADD, HASHES[2])

    answers = [index.apply(event) for event in log.collect()]
    assert answers == [False, False] and index.longest_prefix(HASHES[1:]) == {}

    assert index.load(dump)
    assert index.ready("e") and index.longest_prefix(HASHES[1:]) == {"e": 2}
    assert index.locations(HASHES[0]) == []


def test_a_missing_number_stops_the_hints_until_the_next_dump() -> None:
    """After a gap nothing of that tier is served; others are; a dump heals it."""
    index = BlockIndex()
    for epoch in ("e", "f"):
        assert index.load(Dump(epoch, 5, tuple(HASHES[:3])))

    assert not index.apply(Event("e", 7, Op.ADD, HASHES[4]))

    assert index.longest_prefix(HASHES) == {"f": 3} and not index.ready("e")
    assert index.load(Dump("e", 6, (HASHES[0],)))
    assert index.locations(HASHES[4]) == ["e"] and index.statistics()["gaps_total"] == 1


def test_old_events_and_dumps_change_nothing() -> None:
    """A number that was applied already is stale."""
    index = BlockIndex()
    index.load(Dump("e", 5, (HASHES[0],)))

    assert index.apply(Event("e", 5, Op.DROP, HASHES[0]))
    assert index.load(Dump("e", 4, ()))

    assert index.locations(HASHES[0]) == ["e"]


def test_a_hole_ends_the_prefix_and_a_dead_tier_is_forgotten() -> None:
    """Only consecutive blocks from the first on count."""
    index = BlockIndex()
    index.load(Dump("e", 1, (HASHES[0], HASHES[2])))

    assert index.longest_prefix(HASHES) == {"e": 1} and index.longest_prefix(HASHES[1:]) == {}
    assert index.drop_source("e") == 2 and index.drop_source("e") == 0
    assert index.longest_prefix(HASHES) == {}


def test_the_index_is_bounded() -> None:
    """Beyond its capacity the oldest hint goes; early events beyond theirs become a gap."""
    index = BlockIndex(capacity=2, max_early=2)
    for number in (1, 2, 3):
        index.apply(Event("early", number, Op.ADD, HASHES[number]))
    index.load(Dump("e", 0, ()))
    for number in (1, 2, 3):
        index.apply(Event("e", number, Op.ADD, HASHES[number]))

    assert index.locations(HASHES[1]) == [] and index.locations(HASHES[3]) == ["e"]
    assert index.statistics()["early"] == 2
    assert index.load(Dump("early", 0, ())) and not index.apply(Event("early", 4, Op.ADD, HASHES[4]))


def test_a_log_that_overflows_shows_as_a_gap() -> None:
    """Events that nobody collected in time are missed by number, not silently."""
    log, index = EventLog("e", max_pending=2), BlockIndex()
    index.load(Dump("e", 0, ()))
    for digest in HASHES[:3]:
        log.record(Op.ADD, digest)

    assert [index.apply(event) for event in log.collect()] == [False, False]


@given(
    st.lists(st.tuples(st.sampled_from(list(Op)), st.sampled_from(HASHES)), max_size=30),
    st.integers(0, 30),
    st.sets(st.integers(0, 30), max_size=3),
)
def test_a_follower_is_equal_or_knows_that_it_is_not(
    changes: list[tuple[Op, bytes]], at: int, lost: set[int]
) -> None:
    """Whatever is lost, an index that calls itself ready and current has exactly what the tier has."""
    log, index, truth = EventLog("e"), BlockIndex(), set[bytes]()
    at, whole = min(at, len(changes)), True
    for number, (op, digest) in enumerate(changes):
        if number == at:
            whole = index.load(Dump("e", log.number, tuple(truth)))
        log.record(op, digest)
        (truth.add if op is Op.ADD else truth.discard)(digest)
        for event in log.collect():
            if number not in lost:
                whole = index.apply(event)
    if at == len(changes):
        whole = index.load(Dump("e", log.number, tuple(truth)))

    unseen = any(n >= at for n in lost if n == len(changes) - 1)
    if whole and index.ready("e") and not unseen:
        assert {h for h in HASHES if index.locations(h)} == truth
    else:
        assert lost
