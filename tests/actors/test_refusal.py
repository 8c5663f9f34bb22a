"""Early refusal, as a pure policy: what goes first, how long that takes, and what a refused client is told."""

from __future__ import annotations

import pytest

from actors.refusal import (
    MAX_SENT,
    SENT_S,
    Asked,
    Queue,
    Sent,
    Standing,
    least_ttft_s,
    predicted_ttft_s,
    refusal,
    standing,
    tokens_ahead,
)
from schemas.subjects import Ref

D0 = Ref("decode", "d0", "e")
D1 = Ref("decode", "d1", "e")
BUSY = Standing(busy=True)


def waits(*queues: tuple[str, int, float], computing: float = 0.0, rate: float = 1000.0) -> Standing:
    """An engine with queues of (tenant, class, tokens)."""
    return Standing(tuple(Queue(*q) for q in queues), computing, rate, busy=True)


def test_what_is_begun_and_what_came_before_goes_first() -> None:
    """Of one's own tenant everything of the same class or a better one, of the others a like share."""
    engine = waits(("a", 0, 1000), ("a", 2, 400), ("b", 0, 50), computing=30)

    assert tokens_ahead(engine, Asked("a", 0, 100), {}) == 30 + 1000 + 50
    assert tokens_ahead(engine, Asked("b", 0, 100), {}) == 30 + 50 + 50
    assert tokens_ahead(engine, Asked("c", 0, 100), {}) == 30, "nobody is before the first of one with nothing there"


def test_a_worse_class_waits_for_better_ones_and_not_the_other_way() -> None:
    """Batch is behind all interactive prompts, whoever they are of."""
    engine = waits(("a", 0, 1000), ("a", 2, 400))

    assert tokens_ahead(engine, Asked("b", 2, 100), {}) == 1000
    assert tokens_ahead(waits(("a", 2, 400)), Asked("b", 0, 100), {}) == 0


def test_weights_count_as_they_do_at_the_engine() -> None:
    """A tenant of weight 2 lets half as much of the others go first."""
    engine = waits(("a", 0, 1000), ("b", 0, 100))

    assert tokens_ahead(engine, Asked("b", 0, 100), {"b": 2.0}) == 100 + 50
    assert tokens_ahead(engine, Asked("b", 0, 100), {"a": 3.0}) == 100 + 300


def test_the_estimate_is_the_queue_over_its_rate() -> None:
    """Where no rate is known, each token ahead counts as one of the prompt."""
    assert predicted_ttft_s(waits(("a", 0, 900)), Asked("a", 0, 100), 0.1, {}) == pytest.approx(1.0)
    assert predicted_ttft_s(waits(("a", 0, 900), rate=0.0), Asked("a", 0, 100), 0.1, {}) == pytest.approx(1.0)


def test_what_was_worked_off_since_the_heartbeat_is_in_nobodys_way() -> None:
    """No longer than heartbeats are late at most: an engine that has gone silent works nothing off."""
    load = {"running": 1, "queues": [["a", 0, 900]], "queued_tokens": 900, "drain_rate": 1000.0}

    def expected(age_s: float) -> float:
        return predicted_ttft_s(standing(load, (), age_s=age_s), Asked("a", 0, 100), 0.1, {})

    assert expected(0.0) == pytest.approx(1.0)
    assert expected(0.2) == pytest.approx(0.8)
    assert expected(60.0) == expected(SENT_S) == pytest.approx(1.0 - SENT_S)


def test_what_is_expected_later_than_promised_is_refused_and_the_wait_is_told() -> None:
    """The client is told to come back when the queue has drained to where it would be taken."""
    assert refusal(BUSY, 0.99, 9.0, 60.0, 1.0) is None
    error = refusal(BUSY, 3.0, 0.1, 60.0, 1.0)

    assert error is not None and error.status == 429 and error.code == "overloaded"
    assert error.retry_after_s == pytest.approx(3.0 - 1.0)


def test_a_deadline_that_is_nearer_than_the_promise_is_the_limit() -> None:
    """What cannot begin in time by more than estimates are off is not begun."""
    assert refusal(BUSY, 5.9, 5.9, 5.0, 60.0) is None
    error = refusal(BUSY, 9.0, 7.0, 5.0, 60.0)

    assert error is not None and error.retry_after_s == pytest.approx(2.0)


def test_one_estimate_that_misses_a_deadline_refuses_nobody() -> None:
    """After minutes of few prompts and long steps the rate is far too low, and the deadline ends what was hopeless."""
    assert refusal(BUSY, 64.0, 3.0, 40.0, 60.0) is None
    assert refusal(BUSY, 3.0, 64.0, 40.0, 60.0) is None
    assert refusal(BUSY, 64.0, 64.0, 40.0, 60.0) is not None


def test_a_class_without_a_promise_is_refused_nothing() -> None:
    """Much of a queue of whole prompts may be stored, and a deadline ends its request anyway."""
    assert refusal(BUSY, 64.0, 64.0, 5.0, None) is None


def test_the_least_that_a_queue_takes_is_what_its_tokens_cost() -> None:
    """Whatever rate was measured."""
    engine = waits(("a", 0, 900), rate=1.0)
    assert least_ttft_s(engine, Asked("a", 0, 100), 0.1, {}) == pytest.approx(1.0)


def test_an_engine_that_does_nothing_refuses_nobody() -> None:
    """A wrong estimate could otherwise never be corrected: only work does that."""
    assert refusal(Standing(), 100.0, 100.0, 5.0, 1.0) is None


def test_what_was_sent_since_counts_until_a_heartbeat_shows_it() -> None:
    """Of other senders as much is taken to be on its way, but for a tenant's first: one alone is no crowd."""
    sent = Sent()
    sent.sent(D0, "r1", Asked("a", 0, 100), 0.0)
    sent.sent(D0, "r2", Asked("a", 1, 50), 0.1)
    sent.sent(D1, "r3", Asked("a", 0, 70), 0.1)

    assert sent.since(D0, (), 2, 0.2) == [Queue("a", 0, 100), Queue("a", 1, 100)]
    assert sent.since(D0, ("r1",), 2, 0.2) == [Queue("a", 1, 50)]
    assert sent.since(D0, (), 1, 0.1 + SENT_S) == [Queue("a", 1, 50)]
    assert sent.since(D0, (), 1, 1.0) == []


def test_what_has_ended_is_in_nobodys_way() -> None:
    """A short request is over before any heartbeat shows it; one that is sent again counts once, where it is now."""
    sent = Sent()
    sent.sent(D0, "r1", Asked("a", 0, 100), 0.0)
    sent.sent(D0, "r2", Asked("a", 0, 50), 0.0)
    sent.ended("r1")
    sent.ended("r1")
    assert sent.since(D0, (), 1, 0.1) == [Queue("a", 0, 50)]
    sent.sent(D1, "r2", Asked("a", 0, 50), 0.2)
    assert sent.since(D0, (), 1, 0.3) == [] and sent.since(D1, (), 1, 0.3) == [Queue("a", 0, 50)]


def test_what_was_sent_is_bounded() -> None:
    """The oldest is forgotten."""
    sent = Sent()
    for number in range(MAX_SENT + 10):
        sent.sent(D0, f"r{number}", Asked("a", 0, 1), 0.0)

    assert len(sent.since(D0, (), 1, 0.1)) == MAX_SENT


def test_a_heartbeat_that_makes_no_sense_is_an_engine_without_a_queue() -> None:
    """A foreign or newer engine cannot break admission."""
    rows = [["a", 0, 10], ["a"], "x", ["b", -1, 5], ["c", "x", 1]]

    engine = standing({"queues": rows, "queued_tokens": 30, "drain_rate": -3, "running": 1}, [])

    assert engine == Standing((Queue("a", 0, 10.0),), 20.0, 0.0, busy=True)
