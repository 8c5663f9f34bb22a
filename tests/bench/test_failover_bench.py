"""The benches of failover and cancellation: what they make of what they hear, and one real round of each."""

from __future__ import annotations

import pytest

from bench.cancel import waits_for_place
from bench.cancel_leaving import Ledger
from bench.client import Timing
from bench.failover import not_met, row
from bench.failover_rounds import Round, _gap, computed_ms
from bench.tap import Heard, HeardItems
from schemas import messages as m
from schemas.items import Item, ItemBatch
from schemas.record import Fence, Record, ReplyTo, Sampling
from schemas.subjects import Ref

D0, P0, T0 = Ref("decode", "d0", "e"), Ref("prefill", "p0", "e"), Ref("tokenize", "t0", "e")
ME = Ref("admission", "a", "e")
FENCE = Fence(0, "a.e", 0)
RECORD = Record(request_id="r", reply=ReplyTo(subject="x"), owner=ME, sampling=Sampling(), deadline=1.0)


def test_the_gap_is_the_longest_silence_that_ended_after_the_fault() -> None:
    """Earlier ones do not count; one that has not ended lasts until now."""
    timing = Timing(0.0, chunks_at=[1.0, 2.0, 2.1, 2.5, 2.6])

    assert _gap(timing, 2.05, None) == pytest.approx(0.4)
    assert _gap(timing, 1.5, None) == pytest.approx(1.0)
    assert _gap(timing, 2.05, 9.0) == pytest.approx(6.4)
    assert _gap(timing, 2.7, None) == 0.0


def test_a_target_is_held_against_the_gap_without_one_prefill() -> None:
    """However many streams the survivor computed again; one slow round of a hundred is its 99th percentile."""
    quick = [Round(70.0, 0, 0, 16, 0, moved=8, again_ms=60.0, one_prefill_ms=20.0) for _ in range(98)]
    slow = [Round(200.0, 0, 1, 16, 0, moved=8, again_ms=180.0, one_prefill_ms=90.0) for _ in range(2)]

    found = row("headrace", "null", ("cold", "kill", 16, 1), quick + slow)

    assert (found["gap_p50_ms"], found["gap_p99_ms"], found["one_prefill_ms"]) == (70.0, 200.0, 20.0)
    assert (found["over_p50_ms"], found["over_p99_ms"]) == (50.0, 180.0)
    assert (found["met"], found["differing"], found["compared"], found["moved"]) == (False, 2, 1600, 800)
    assert row("headrace", "null", ("cold", "kill", 16, 1), quick)["met"] is True
    assert row("headrace", "null", ("cold", "stop", 16, 1), quick + slow)["bound_ms"] == 1500.0
    assert "met" not in row("dynamo", "mocker", ("cold", "kill", 16, 1), quick)


def test_no_more_is_taken_off_than_the_survivor_took() -> None:
    """It may find blocks to load instead of computing; or no prefill may be known, or no stream that moved."""
    loaded = Round(70.0, 0, 0, 1, 0, moved=1, again_ms=5.0, one_prefill_ms=50.0)
    assert row("headrace", "null", ("cold", "kill", 1, 1), [loaded])["over_p99_ms"] == 65.0
    unmoved = Round(70.0, 0, 0, 1, 0, one_prefill_ms=50.0)
    assert row("headrace", "null", ("cold", "kill", 1, 1), [unmoved])["over_p99_ms"] == 70.0

    found = row("headrace", "null", ("cold", "kill", 1, 1), [Round(70.0, 0, 0, 1, 0, moved=1, again_ms=60.0)])

    assert (found["one_prefill_ms"], found["over_p99_ms"], found["met"]) == (0.0, 70.0, False)


def test_a_warm_round_in_which_the_survivor_computed_is_named() -> None:
    """A row that meets its bound without having loaded says nothing of warm failover; a cold one need not load."""
    loaded = Round(70.0, 0, 0, 1, 0, moved=1, again_ms=15.0, one_prefill_ms=15.0, loaded_share=0.9)
    computed = Round(70.0, 0, 0, 1, 0, moved=1, again_ms=15.0, one_prefill_ms=15.0, loaded_share=0.1)
    warm, cold = ("warm", "kill", 1, 1), ("cold", "kill", 1, 1)

    rows = [row("headrace", "null", warm, [loaded]), row("headrace", "null", cold, [computed])]
    assert all(r["met"] for r in rows) and not_met(rows) == []

    assert not_met([row("headrace", "null", warm, [computed])]) == [
        "null, warm kill, 1 streams: loaded 0.1 of the prompts"
    ]


def test_a_prefill_lasts_from_the_placing_to_the_first_id() -> None:
    """Of the request that was placed; one of which an end is missing counts for nothing."""
    dispatch = m.Dispatch(request_id="r", fence=FENCE, record=RECORD, detokenize=T0, reply=ME)
    placed = Heard(1.0, D0.subject, ME, dispatch)

    def chosen(t: float, name: str) -> HeardItems:
        return HeardItems(t, D0, ItemBatch(name, FENCE, [Item(0, 0, 1, None)], None, []))

    assert computed_ms([placed], [chosen(1.01, "other"), chosen(1.03, "r"), chosen(1.04, "r")]) == pytest.approx(30.0)
    assert computed_ms([placed], [chosen(1.01, "other")]) == 0.0
    assert computed_ms([], [chosen(1.03, "r")]) == 0.0


def test_blocks_are_free_when_every_engine_has_closed_and_every_copy_is_over() -> None:
    """The order of the words does not matter; a copy that was given up holds blocks until its end is told."""
    ledger = Ledger()
    seen = ledger.expect("7/3:")

    def heard(t: float, message: m.Message, sender: Ref = ME, to: Ref = ME) -> None:
        ledger.on_message(Heard(t, to.subject, sender, message))

    head = {"request_id": "r", "fence": FENCE}
    heard(0.5, m.Tokenize(request_id="other", fence=FENCE, api="chat", body={"messages": ["8/3: x"]}, reply=ME), to=T0)
    assert seen.request_id == ""
    heard(1.0, m.Tokenize(**head, api="chat", body={"messages": ["7/3: x"]}, reply=ME), to=T0)
    heard(1.1, m.Dispatch(**head, record=RECORD, detokenize=T0, decode=D0, reply=ME), to=P0)
    reserve = m.Reserve(
        **head, record=RECORD, part=0, parts=1, num_tokens=3, choices=[0], outputs=[[]], detokenize=T0, source=P0
    )
    heard(1.2, reserve, P0, to=D0)
    assert seen.request_id == "r" and seen.engines == {P0, D0} and seen.free_at(2.0) is None
    heard(2.01, m.Close(**head, reason="cancel"), to=P0)
    heard(2.02, m.TransferAbort(**head, job="r/0"), P0)
    heard(2.03, m.Closed(**head), P0)
    assert seen.free_at(2.0) is None
    heard(2.04, m.Closed(**head), D0)
    assert seen.free_at(2.0) is None and seen.stopped_at(2.0) == 2.04
    heard(2.06, m.TransferDone(**head, job="r/0", part=0), P0)
    assert seen.free_at(2.0) == 2.06
    ledger.on_items(HeardItems(2.2, D0, ItemBatch("r", FENCE, [Item(0, 0, 1, None)], None, [])))
    assert seen.last_items == 2.2


def test_a_request_that_reached_no_engine_is_free_when_it_was_given_up() -> None:
    """Its owner's word is all that there is."""
    ledger = Ledger()
    seen = ledger.expect("7/4:")
    head = {"request_id": "r", "fence": FENCE}
    ledger.on_message(
        Heard(1.0, T0.subject, ME, m.Tokenize(**head, api="chat", body={"messages": ["7/4: x"]}, reply=ME))
    )
    assert seen.free_at(1.5) is None
    ledger.on_message(Heard(1.6, T0.subject, ME, m.Close(**head, reason="cancel")))

    assert seen.free_at(1.5) == seen.told == 1.6 and seen.stopped_at(1.5) == 1.5


def test_a_request_is_queued_when_nothing_is_computed_for_it() -> None:
    """A prompt in a step is none: who leaves then waits for the end of that step, and the mean step is another one."""

    def beat(ref: Ref, **load: int) -> m.Heartbeat:
        return m.Heartbeat(ref=ref, node="n", host="h", pid=1, seq=1, sent_at=1.0, state="ready", load=dict(load))

    assert not waits_for_place(beat(P0, running=1, waiting=1))
    assert waits_for_place(beat(P0, held=1))
    assert not waits_for_place(beat(D0, running=4, held=1))
    assert waits_for_place(beat(D0, running=4, waiting=1))
