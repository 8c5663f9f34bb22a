"""What a sender believes of replicas' queues."""

from __future__ import annotations

import pytest

from actors.backlog import MAX_RECENT, Backlog


def test_a_queue_is_what_was_reported_less_the_time_since() -> None:
    """Work that waits is done at the pace of time; nobody owes work to the past."""
    backlog = Backlog()
    backlog.heard("a", 2.0, taken=10.0)

    assert backlog.queued_s("a", 10.5) == pytest.approx(1.5)
    assert backlog.queued_s("a", 20.0) == 0.0
    assert backlog.queued_s("unknown", 20.0) == 0.0


def test_what_was_sent_since_the_report_counts_at_once() -> None:
    """Two requests within one heartbeat do not both see an idle replica; an idle one starts when work comes."""
    backlog = Backlog()
    backlog.heard("a", 0.0, taken=0.0)

    backlog.sent("a", 1.0, now=5.0)
    backlog.sent("a", 1.0, now=5.5)

    assert backlog.queued_s("a", 5.5) == pytest.approx(1.5)


def test_a_report_replaces_what_it_has_seen() -> None:
    """Sends before the report are in it, sends after it are not."""
    backlog = Backlog()
    backlog.sent("a", 10.0, now=1.0)
    backlog.sent("a", 1.0, now=1.3)

    backlog.heard("a", 0.5, taken=1.25)

    assert backlog.queued_s("a", 1.3) == pytest.approx(0.45 + 1.0)


def test_what_was_on_its_way_when_a_report_was_taken_still_counts() -> None:
    """A message takes a moment to arrive: better counted twice than not at all."""
    backlog = Backlog(transit_s=0.05)
    backlog.sent("a", 1.0, now=1.0)
    backlog.sent("a", 2.0, now=1.2)

    backlog.heard("a", 0.0, taken=1.24)

    assert backlog.queued_s("a", 1.24) == pytest.approx(2.0)


def test_a_replica_that_is_gone_is_forgotten() -> None:
    """Nothing of it stays."""
    backlog = Backlog()
    backlog.sent("a", 5.0, now=1.0)

    backlog.forget("a")

    assert backlog.statistics() == {"replicas": 0, "recent": 0} and backlog.queued_s("a", 1.0) == 0.0


def test_memory_is_bounded_by_time_and_by_number() -> None:
    """Old sends are forgotten, and so are the oldest of very many."""
    backlog = Backlog(keep_s=2.0)
    for n in range(10):
        backlog.sent("a", 0.001, now=float(n))
    assert backlog.statistics()["recent"] == 3

    for _ in range(2 * MAX_RECENT):
        backlog.sent("a", 0.001, now=10.0)

    assert backlog.statistics()["recent"] == MAX_RECENT
