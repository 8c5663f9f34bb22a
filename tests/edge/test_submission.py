"""Whom the edge asks for admission, and when it asks again."""

from __future__ import annotations

from edge.submission import ACCEPT_LIMIT_S, ACCEPT_WAIT_S, CANCEL_LIMIT_S, CANCEL_REPEAT_S, Cancelling, Submission
from schemas.subjects import Ref

A, B, C = (Ref("admission", name, "e") for name in "abc")


def test_silence_is_answered_by_asking_another_under_a_higher_term() -> None:
    """Nobody is asked twice while somebody has not been asked."""
    s = Submission(0.0)
    s.sent(s.choose([A, B], 0) or A, 0.0)
    assert (s.target, s.term, s.due(ACCEPT_WAIT_S - 0.01), s.due(ACCEPT_WAIT_S)) == (A, 0, False, True)

    second = s.choose([A, B], 0)

    assert second == B
    s.sent(B, ACCEPT_WAIT_S)
    assert s.term == 1
    assert not s.due(ACCEPT_WAIT_S * 2), "each wait is longer than the one before"
    assert s.choose([A, B], 0) == A, "when all were asked, anyone but the last"
    assert s.choose([B], 0) == B, "a single one is asked again"
    assert s.choose([], 0) is None


def test_this_nodes_own_admission_is_asked_first_unless_the_edge_is_busy() -> None:
    """A repetition goes elsewhere, and with nobody else around it serves a busy edge too."""
    near = frozenset({B})
    quiet, busy = Submission(0.0), Submission(0.0)

    assert [quiet.choose([A, B, C], turn, near=near) for turn in range(3)] == [B, B, B]
    assert [busy.choose([A, B, C], turn, near=near, busy=True) for turn in range(3)] == [A, C, A]
    assert busy.choose([B], 0, near=near, busy=True) == B
    quiet.sent(B, 0.0)
    assert quiet.choose([A, B], 0, near=near) == A
    assert Submission(0.0).choose([A, C], 0, near=near) in (A, C), "it may have gone meanwhile"


def test_an_acceptance_ends_the_asking() -> None:
    """Also one of an earlier try; the fences decide who serves."""
    s = Submission(0.0)
    s.sent(A, 0.0)
    s.sent(B, 0.3)

    s.accepted(0)

    assert not s.due(100.0) and not s.given_up(100.0)


def test_the_death_of_an_owner_starts_the_asking_again() -> None:
    """And a late repetition of its acceptance does not end it."""
    s = Submission(0.0)
    s.sent(A, 0.0)
    s.accepted(0)

    assert not s.lost(B, A, 5.0)
    assert s.lost(A, A, 5.0)
    assert s.due(5.0)
    s.accepted(0)
    assert s.due(5.0)
    s.sent(B, 5.0)
    s.accepted(1)
    assert not s.due(100.0)


def test_the_death_of_whoever_was_asked_is_noticed_at_once() -> None:
    """Without waiting for the silence to pass."""
    s = Submission(0.0)
    s.sent(A, 0.0)

    assert not s.lost(C, None, 0.1)
    assert s.lost(A, None, 0.1)
    assert s.due(0.1)


def test_a_request_that_nobody_takes_is_given_up() -> None:
    """A bound on the wait, counted from the start."""
    s = Submission(10.0)
    s.sent(A, 10.0)

    assert not s.given_up(10.0 + ACCEPT_LIMIT_S - 0.01)
    assert s.given_up(10.0 + ACCEPT_LIMIT_S)


def test_silence_counts_anew_after_the_edge_itself_was_unwell() -> None:
    """A busy machine must not make the edge ask everybody."""
    s = Submission(0.0)
    s.sent(A, 0.0)

    s.postpone(5.0)

    assert not s.due(5.2)


def test_a_cancel_is_repeated_until_it_is_answered_or_too_late() -> None:
    """Every 200 ms, for five seconds at most."""
    c = Cancelling({A, B}, 0.0, CANCEL_LIMIT_S)

    assert c.due(0.0) and not c.due(CANCEL_REPEAT_S / 2) and c.due(CANCEL_REPEAT_S)
    assert not c.over(CANCEL_LIMIT_S - 0.01) and c.over(CANCEL_LIMIT_S)
    c.pending.clear()
    assert c.over(0.0)
