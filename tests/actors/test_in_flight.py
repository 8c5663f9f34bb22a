"""Loads are what heartbeats say, with what was sent since and without what has ended since."""

from __future__ import annotations

from actors.in_flight import IN_FLIGHT_S, MAX_ENDED, InFlight
from schemas.subjects import Ref

A, B = Ref("decode", "a", "1"), Ref("decode", "b", "1")


def test_what_was_sent_counts_until_a_heartbeat_names_it() -> None:
    """Then the load has it."""
    flight = InFlight()
    flight.sent(A, 100, "r1", 0.0)
    flight.sent(A, 50, "r2", 0.1)

    assert flight.since([A, B], lambda _: (), 0.2) == {A: 150}
    assert flight.since([A, B], lambda ref: ["r1"] if ref == A else [], 0.2) == {A: 50}
    assert flight.since([A, B], lambda _: (), 0.1 + IN_FLIGHT_S) == {}


def test_what_has_ended_is_taken_from_a_load_that_still_names_it() -> None:
    """It adds nothing any more where it is not named yet."""
    flight = InFlight()
    flight.sent(A, 100, "r1", 0.0)
    flight.ended("r1", 64, 0.1)

    assert flight.since([A, B], lambda _: (), 0.2) == {}
    assert flight.since([A, B], lambda ref: ["r1", "r9"] if ref == B else [], 0.2) == {B: -64}
    assert flight.since([A, B], lambda _: ["r1"], 0.2 + IN_FLIGHT_S) == {}


def test_few_endings_are_remembered() -> None:
    """The oldest go first."""
    flight = InFlight()
    for number in range(MAX_ENDED + 1):
        flight.ended(f"r{number}", 1, 0.0)

    assert flight.since([A], lambda _: ["r0"], 0.0) == {}
    assert flight.since([A], lambda _: ["r1"], 0.0) == {A: -1}
