"""What a detokenizer remembers of requests that have left it, and what it answers to who asks for one."""

from __future__ import annotations

import pytest

from actors.retired import Retired
from actors.sessions import Session
from schemas import messages as m
from schemas.record import Fence, Record, ReplyTo, Sampling
from schemas.subjects import Ref

OWNERS = [Ref("admission", str(i), f"{i:016x}") for i in range(2)]


def record(owner: Ref) -> Record:
    return Record(
        request_id="r", api="completion", model="m", prompt_ids=[[1, 2]], sampling=Sampling(max_tokens=8),
        created=0, deadline=60.0, reply=ReplyTo(subject="inbox", mode="inbox", encoding="json"), owner=owner,
    )  # fmt: skip


def test_what_was_only_fenced_off_is_not_said_to_have_ended() -> None:
    """An adopter that is told of an end drops the request; who was fenced off knows nothing of the end."""
    retired = Retired()
    retired.note("fenced", Fence(0, "a", 2), fenced_off=True)
    retired.note("over", Fence(0, "a", 2), fenced_off=False)

    assert (retired.ended("fenced"), retired.ended("over"), retired.ended("never here")) == (False, True, False)


@pytest.mark.parametrize(("fenced_off", "covered"), [(True, False), (False, True)])
def test_items_of_a_later_try_may_come_before_its_open_where_an_earlier_one_was_fenced_off(
    fenced_off: bool, covered: bool
) -> None:
    """Scenario: a request comes back to a detokenizer, and its engine would be told that nothing of it is wanted."""
    retired = Retired()
    retired.note("r", Fence(0, "a", 2), fenced_off=fenced_off)

    assert retired.covers("r", Fence(0, "a", 2))
    assert retired.covers("r", Fence(0, "a", 3)) is covered


def test_the_oldest_is_forgotten_first() -> None:
    """The table is bounded."""
    retired = Retired(limit=2)
    for name in ("a", "b", "a", "c"):
        retired.note(name, Fence(0, "o", 1), fenced_off=False)

    assert [retired.fence(name) is None for name in ("a", "b", "c")] == [False, True, False]


def test_an_owner_that_has_a_request_back_is_no_longer_told_that_another_one_has_it() -> None:
    """Scenario: A, then B, then A again: A would be told `superseded`, and let go of what it owns."""
    fences = [Fence(term, OWNERS[term % 2].id, 0) for term in range(3)]
    opens = [m.Open(request_id="r", fence=f, deadline=60.0, record=record(OWNERS[f.term % 2])) for f in fences]
    session = Session.open(opens[0], token_bytes=lambda _: b"x", eos_ids=frozenset(), now=0.0, remaining_s=60.0)

    session.reopen(opens[1])
    session.reopen(opens[2])

    assert session.record.owner == OWNERS[0]
    assert session.former == {OWNERS[1]}
