"""The receiving end of one request, in every order that frames can come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.inflight import CREDIT, HARD_LIMIT, Delta, Finish, Inflight, Usage, Verdict
from schemas.errors import EngineFailed, Overloaded, ReplayMismatch
from schemas.items import TextItem, frame
from schemas.record import Fence

F0, F1, F2 = Fence(0, "a", 0), Fence(0, "a", 1), Fence(1, "b", 0)
USAGE = {"usage": {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 1}}


def item(index: int, text: str = "", *, choice: int = 0, id: int | None = None) -> TextItem:
    """An item whose text names it unless told otherwise."""
    return TextItem(choice, index, id if id is not None else 10 + index, text or f"{choice}.{index} ", None)


def accepted(owner: str = "a") -> dict[str, Any]:
    """What an owner says first."""
    return {"id": "r", "seed": 1, "created": 2, "deadline": 3.0, "owner": ["admission", owner, "e"]}


def text_of(inflight: Inflight, choice: int = 0) -> str:
    """Take what is there and return one choice's text."""
    return "".join(e.text for e in inflight.take() if isinstance(e, Delta) and e.choice == choice)


def test_an_answer_in_order_ends_once_with_its_usage() -> None:
    """Items, a finish and a terminal make deltas, one finish and the totals."""
    inflight = Inflight("r", 1)

    inflight.receive(frame("r", F0, accepted=accepted()))
    inflight.receive(frame("r", F0, items=[item(0, "a"), item(1, "b")]))
    last = inflight.receive(frame("r", F0, finish=[(0, "stop", 2)], terminal=USAGE))

    assert inflight.take() == [Delta(0, "ab", 2), Finish(0, "stop")]
    assert last.verdict is Verdict.DONE and inflight.ended and inflight.error is None
    assert inflight.usage == Usage(3, 4, 1)
    assert inflight.receive(frame("r", F0, items=[item(2)])).verdict is Verdict.DONE


def test_a_repeated_item_is_dropped_and_a_gap_waits() -> None:
    """Only the next index of a choice is taken."""
    inflight = Inflight("r", 1)

    inflight.receive(frame("r", F0, items=[item(0), item(0), item(2), item(1)]))
    inflight.receive(frame("r", F0, items=[item(1), item(2)]))

    assert inflight.next == [3]
    assert text_of(inflight) == "0.0 0.1 0.2 "


def test_an_ending_waits_for_the_items_below_its_total() -> None:
    """A terminal that overtakes a lost frame ends nothing; its sender repeats and is asked to."""
    inflight = Inflight("r", 1)

    early = inflight.receive(frame("r", F0, items=[item(0)], finish=[(0, "length", 3)], terminal=USAGE))
    assert early.verdict is Verdict.OK and not inflight.ended
    assert inflight.take() == [Delta(0, "0.0 ", 1)]

    late = inflight.receive(frame("r", F0, items=[item(1), item(2)]))
    assert late.verdict is Verdict.DONE and inflight.ended
    assert inflight.take() == [Delta(0, "0.1 0.2 ", 2), Finish(0, "length")]


def test_an_error_ends_at_once() -> None:
    """Whatever is missing, a failure is told; what came with it is kept."""
    inflight = Inflight("r", 1)

    inflight.receive(frame("r", F0, items=[item(0)], terminal={"error": EngineFailed("boom").info()}))

    assert isinstance(inflight.error, EngineFailed) and not inflight.ended_here
    assert text_of(inflight) == "0.0 "


def test_a_lower_fence_changes_nothing() -> None:
    """Once a newer owner has spoken, the older one is told so."""
    inflight = Inflight("r", 1)
    inflight.receive(frame("r", F0, accepted=accepted("a")))
    inflight.receive(frame("r", F2, accepted=accepted("b")))

    old = inflight.receive(frame("r", F1, items=[item(0)], terminal={"error": EngineFailed("x").info()}))

    assert old.verdict is Verdict.FENCED
    assert inflight.next == [0] and not inflight.ended
    assert inflight.accepted is not None and inflight.accepted.owner.id == "b"


def test_a_replay_under_a_higher_fence_goes_on_where_the_old_one_stopped() -> None:
    """The new detokenizer begins at item 0; what is here already is neither repeated nor lost."""
    inflight = Inflight("r", 1)
    inflight.receive(frame("r", F0, items=[item(0), item(1)]))

    inflight.receive(frame("r", F2, items=[item(i) for i in range(4)], finish=[(0, "stop", 4)], terminal=USAGE))

    assert text_of(inflight) == "0.0 0.1 0.2 0.3 "
    assert inflight.ended and inflight.error is None


def test_an_announcement_of_an_older_owner_is_void_under_a_newer_one() -> None:
    """A finish whose items never came does not end what the newer owner replays."""
    inflight = Inflight("r", 1)
    inflight.receive(frame("r", F0, items=[item(0)], finish=[(0, "length", 2)], terminal=USAGE))

    inflight.receive(frame("r", F2, items=[item(0), item(1), item(2)]))

    assert not inflight.ended
    assert text_of(inflight) == "0.0 0.1 0.2 "


def test_a_replay_that_says_something_else_is_an_error() -> None:
    """Two different answers are never spliced."""
    inflight = Inflight("r", 1)
    inflight.receive(frame("r", F0, items=[item(0), item(1)]))

    received = inflight.receive(frame("r", F2, items=[item(0), item(1, id=99), item(2)]))

    assert received.verdict is Verdict.DONE
    assert isinstance(inflight.error, ReplayMismatch) and inflight.ended_here
    assert inflight.next == [2]


def test_a_refusal_of_a_second_try_does_not_end_what_the_first_one_serves() -> None:
    """An owner that was slow to accept goes on, also under its lower fence."""
    inflight = Inflight("r", 1)
    inflight.receive(frame("r", F0, accepted=accepted("a")))

    refusal = inflight.receive(frame("r", F2, terminal={"error": Overloaded("full").info()}))
    inflight.receive(frame("r", F0, items=[item(0)], finish=[(0, "stop", 1)], terminal=USAGE))

    assert refusal.verdict is Verdict.DONE
    assert inflight.ended and inflight.error is None


def test_a_refusal_before_any_acceptance_ends_the_request() -> None:
    """A typed error instead of `accepted` is the answer."""
    inflight = Inflight("r", 1)

    inflight.receive(frame("r", F0, terminal={"error": Overloaded("full", retry_after_s=7).info()}))

    assert isinstance(inflight.error, Overloaded) and inflight.error.retry_after_s == 7


def test_choices_end_one_by_one() -> None:
    """Each has its own finish; the request ends with the last."""
    inflight = Inflight("r", 2)

    inflight.receive(frame("r", F0, items=[item(0), item(0, choice=1)], finish=[(1, "stop", 1)]))
    assert inflight.take() == [Delta(0, "0.0 ", 1), Delta(1, "1.0 ", 1), Finish(1, "stop")]
    inflight.receive(frame("r", F0, items=[item(1)], finish=[(0, "length", 2)], terminal=USAGE))

    assert inflight.take() == [Delta(0, "0.1 ", 1), Finish(0, "length")]
    assert inflight.ended


def test_credit_falls_while_nobody_reads_and_comes_back() -> None:
    """A slow reader is held by the window; what is sent in spite of it is refused and not lost."""
    inflight = Inflight("r", 1)
    assert inflight.window == CREDIT

    for i in range(HARD_LIMIT + 10):
        inflight.receive(frame("r", F0, items=[item(i)]))

    assert inflight.window == 0
    assert inflight.next == [HARD_LIMIT]
    inflight.take()
    assert inflight.window == CREDIT


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"v": 2, "id": "r", "fence": [0, "a", 0]},
        {"v": 1, "id": "r", "fence": [0]},
        {"v": 1, "id": "r", "fence": [0, "a", 0], "items": [[5, 0, 1, "x", None]]},
        {"v": 1, "id": "r", "fence": [0, "a", 0], "items": [[-1, 0, 1, "x", None]]},
        {"v": 1, "id": "r", "fence": [0, "a", 0], "items": [[0, 0]]},
        {"v": 1, "id": "r", "fence": [0, "a", 0], "terminal": {}},
        {"v": 1, "id": "r", "fence": [0, "a", 0], "accepted": {"owner": ["x"]}},
    ],
)
def test_a_malformed_frame_ends_nothing(bad: dict[str, Any]) -> None:
    """It is an error to whoever reads the bus, not to the client."""
    inflight = Inflight("r", 1)

    with pytest.raises((ValueError, TypeError, KeyError, IndexError)):
        inflight.receive(bad)

    assert not inflight.ended


@given(st.data())
def test_any_loss_repetition_and_order_gives_the_same_text(data: st.DataObject) -> None:
    """As long as senders repeat, the client sees each item once, in order, and one ending."""
    totals = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    inflight = Inflight("r", len(totals))
    pieces: list[dict[str, Any]] = []
    for c, total in enumerate(totals):
        pieces += [frame("r", F0, items=[item(i, choice=c)]) for i in range(total)]
        pieces.append(frame("r", F0, finish=[(c, "stop", total)]))
    pieces.append(frame("r", F0, terminal=USAGE))
    fences = st.sampled_from([F0, F1, F2])
    noise = data.draw(st.lists(st.tuples(st.sampled_from(pieces), fences), max_size=30))
    seen: list[list[str]] = [[] for _ in totals]
    finishes: list[int] = []

    def look() -> None:
        for event in inflight.take():
            if isinstance(event, Finish):
                finishes.append(event.choice)
            else:
                seen[event.choice].append(event.text)

    for piece, fence in noise:
        inflight.receive({**piece, "fence": list(fence)})
        if data.draw(st.booleans()):
            look()
    for piece in pieces:
        inflight.receive({**piece, "fence": list(F2)})
    look()

    assert inflight.ended and inflight.error is None
    assert sorted(finishes) == list(range(len(totals)))
    for c, total in enumerate(totals):
        assert "".join(seen[c]) == "".join(f"{c}.{i} " for i in range(total))
