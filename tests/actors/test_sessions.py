"""What a detokenizer holds per request: order, loss, credit, repeats and the one ending."""

from __future__ import annotations

from typing import Any

import pytest

from actors.byte_text import EOS, ByteText
from actors.sessions import DEFAULT_WINDOW, MAX_ITEMS_PER_FRAME, RESEND_S, STALL_S, Session
from schemas import messages as m
from schemas.errors import EngineFailed, ReplayMismatch
from schemas.items import Item, ItemBatch
from schemas.record import Fence, Record, ReplyTo, Sampling
from schemas.subjects import Ref

OWNER = Ref("admission", "a", "e1")
ENGINE = Ref("decode", "d0", "e2")
FENCE = Fence(0, "a.e1", 0)


def opened(*, n: int = 1, max_tokens: int = 1000, stop: tuple[str, ...] = (), now: float = 0.0) -> Session:
    """A fresh session of `n` choices that speaks bytes."""
    record = Record(
        request_id="r1",
        n=n,
        sampling=Sampling(max_tokens=max_tokens, stop=list(stop)),
        reply=ReplyTo(subject="_INBOX.x", mode="inbox"),
        owner=OWNER,
        prompt_ids=[[65, 66, 67]],
    )
    text = ByteText()
    return Session.open(
        m.Open(request_id="r1", fence=FENCE, record=record),
        token_bytes=text.visible_bytes,
        eos_ids=text.eos_ids,
        now=now,
        remaining_s=60.0,
    )


def batch(
    ids: bytes | list[int], *, start: int = 0, choice: int = 0, cached: int | None = None, fence: Fence = FENCE
) -> ItemBatch:
    """Items of one choice from `start` on."""
    items = [Item(choice, start + i, token_id, None) for i, token_id in enumerate(ids)]
    return ItemBatch("r1", fence, items, cached, [])


def shown(*frames: dict[str, Any] | None) -> str:
    """The text in the items of frames."""
    return "".join(item[3] for f in frames if f is not None for item in f.get("items", ()))


# --- items in ---------------------------------------------------------------------------------------


def test_items_beyond_a_gap_are_ignored_until_the_gap_is_filled() -> None:
    """A lost message leaves a hole: what follows it is left to be repeated, nothing is out of order."""
    session = opened()
    session.accept(batch(b"ab"), ENGINE, 0.0)

    session.accept(batch(b"ef", start=4), ENGINE, 0.1)
    assert session.engine_ack().next == [2]

    session.accept(batch(b"cdef", start=2), ENGINE, 0.2)
    assert session.engine_ack().next == [6]
    assert shown(session.take_frame(0.2)) == "abcdef"


def test_repeated_items_change_nothing() -> None:
    """The engine repeats what it thinks unacknowledged; each item counts once."""
    session = opened()
    session.accept(batch(b"abc"), ENGINE, 0.0)

    session.accept(batch(b"abc"), ENGINE, 0.1)
    session.accept(batch(b"bcd", start=1), ENGINE, 0.2)

    assert shown(session.take_frame(0.2)) == "abcd"
    assert session.completion_tokens == 4


def test_an_id_that_differs_on_replay_ends_the_request_with_an_error() -> None:
    """A survivor that computes another id must not continue the text of the dead one."""
    session = opened()
    session.accept(batch(b"abc"), ENGINE, 0.0)

    session.accept(batch(b"abX"), Ref("decode", "d1", "e3"), 0.1)

    assert isinstance(session.error, ReplayMismatch)
    terminal = (session.take_frame(0.1) or {})["terminal"]
    assert terminal["error"]["code"] == "replay_mismatch"


def test_items_of_choices_that_do_not_exist_are_dropped() -> None:
    """A foreign choice number harms nothing."""
    session = opened()

    session.accept(batch(b"ab", choice=7), ENGINE, 0.0)
    session.accept(batch(b"ab", choice=-1), ENGINE, 0.0)

    assert session.completion_tokens == 0


def test_a_finished_choice_wants_no_more_of_its_engine() -> None:
    """The acknowledgement says -1, so that the engine stops that choice and goes on with the others."""
    session = opened(n=2, stop=("b",))

    session.accept(batch(b"ab"), ENGINE, 0.0)
    session.accept(batch(b"xy", choice=1), ENGINE, 0.0)

    assert session.engine_ack().next == [-1, 2]


def test_items_behind_the_finish_do_not_count() -> None:
    """The engine was a step ahead of the stop string: usage ends with the item that completed it."""
    session = opened(stop=("b",))

    session.accept(batch(b"abcd"), ENGINE, 0.0)

    assert session.completion_tokens == 2
    assert shown(session.take_frame(0.0)) == "a"
    assert session.engine_ack().status == "done"


def test_cached_tokens_are_those_of_the_first_items() -> None:
    """After a failover the survivor's cache is not this request's hit."""
    session = opened()

    session.accept(batch(b"a", cached=16), ENGINE, 1.0)
    session.accept(batch(b"b", start=1, cached=48, fence=FENCE.next()), ENGINE, 2.0)

    assert session.cached_tokens == 16


def test_cached_tokens_of_later_prompts_of_the_same_try_count() -> None:
    """Engines report the sum over the prompts that are complete; it grows."""
    session = opened()

    session.accept(batch(b"a", cached=16), ENGINE, 1.0)
    session.accept(batch(b"b", start=1, cached=48), ENGINE, 2.0)

    assert session.cached_tokens == 48


# --- frames out -------------------------------------------------------------------------------------


def test_a_client_that_grants_no_window_gets_the_default_one() -> None:
    """Credit bounds what is under way to a client that never acknowledges."""
    session = opened()
    session.accept(batch([65] * 1000), ENGINE, 0.0)

    first = session.take_frame(0.0)

    assert first is not None and len(first["items"]) == DEFAULT_WINDOW
    assert session.take_frame(0.0) is None


def test_each_acknowledgement_opens_the_window_further() -> None:
    """`window` counts from the acknowledged index."""
    session = opened()
    session.accept(batch([65] * 100), ENGINE, 0.0)
    session.client_ack("ok", [0], 8, 0.0)
    assert len((session.take_frame(0.0) or {})["items"]) == 8

    session.client_ack("ok", [8], 4, 0.1)
    second = session.take_frame(0.1) or {}

    assert [item[1] for item in second["items"]] == [8, 9, 10, 11]


def test_a_window_of_zero_lets_one_item_through() -> None:
    """A lost grant must not stop a stream for good: one item keeps asking."""
    session = opened()
    session.accept(batch([65] * 100), ENGINE, 0.0)

    session.client_ack("ok", [0], 0, 0.0)

    assert len((session.take_frame(0.0) or {})["items"]) == 1


def test_an_acknowledgement_without_a_window_leaves_it() -> None:
    """Native clients may leave the field out."""
    session = opened()
    session.accept(batch([65] * 100), ENGINE, 0.0)
    session.client_ack("ok", [0], 8, 0.0)

    session.client_ack("ok", [4], -1, 0.0)

    assert [item[1] for item in (session.take_frame(0.0) or {})["items"]] == list(range(4, 12))


def test_a_client_ahead_of_this_detokenizer_is_believed() -> None:
    """Scenario: the detokenizer died, the client has 100 items of it; the new one holds 40 and sends none of them."""
    session = opened()
    session.accept(batch([65] * 40), ENGINE, 0.0)

    session.client_ack("ok", [100], 64, 0.0)
    assert session.take_frame(0.0) is None

    session.accept(batch([65] * 80, start=40), ENGINE, 0.1)
    session.client_ack("ok", [100], 64, 0.1)
    assert [item[1] for item in (session.take_frame(0.1) or {})["items"]] == list(range(100, 120))


def test_a_frame_is_bounded() -> None:
    """A large window does not make a large message."""
    session = opened()
    session.accept(batch([65] * 2000), ENGINE, 0.0)
    session.client_ack("ok", [0], 10_000, 0.0)

    frame = session.take_frame(0.0) or {}

    assert len(frame["items"]) == MAX_ITEMS_PER_FRAME


def test_the_finish_waits_for_the_last_item_and_the_terminal_for_all_finishes() -> None:
    """No finish before its items are sent; the terminal ends all choices and carries the totals."""
    session = opened(n=2)
    session.client_ack("ok", [0, 0], 2, 0.0)
    session.accept(batch([*b"abc", EOS]), ENGINE, 0.0)
    session.accept(batch([*b"d", EOS], choice=1), ENGINE, 0.0)

    first = session.take_frame(0.0) or {}
    assert first["finish"] == [[1, "stop", 2]]
    assert "terminal" not in first

    session.client_ack("ok", [2, 2], 2, 0.0)
    last = session.take_frame(0.0) or {}
    assert last["finish"] == [[0, "stop", 4]]
    assert last["terminal"]["items"] == [4, 2]
    assert last["terminal"]["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "cached_tokens": 0}


def test_an_error_ends_the_stream_at_once() -> None:
    """Its terminal does not wait for credit."""
    session = opened()
    session.client_ack("ok", [0], 1, 0.0)
    session.accept(batch(b"abcdef"), ENGINE, 0.0)

    session.end(EngineFailed("bad numbers"), 0.1)

    assert (session.take_frame(0.1) or {})["terminal"]["error"]["code"] == "engine_failed"


def test_there_is_one_ending() -> None:
    """The first one stays, whatever comes later."""
    session = opened()
    session.accept(batch([*b"a", EOS]), ENGINE, 0.0)

    session.end(EngineFailed("late"), 0.1)

    assert "error" not in (session.take_frame(0.1) or {})["terminal"]
    assert session.take_frame(0.2) is None


def test_a_silent_end_writes_nothing() -> None:
    """A request that was fenced off or cancelled owes its client no terminal from here."""
    session = opened()
    session.accept(batch(b"abc"), ENGINE, 0.0)

    session.end(EngineFailed("closed"), 0.1, silent=True)

    assert session.take_frame(0.1) is None
    assert not session.rewind(10.0)


# --- repeats ----------------------------------------------------------------------------------------


def test_what_is_not_acknowledged_is_sent_again() -> None:
    """From the acknowledged index on, after `RESEND_S`."""
    session = opened()
    session.accept(batch(b"abcd"), ENGINE, 0.0)
    session.take_frame(0.0)
    session.client_ack("ok", [1], 64, 0.1)

    assert not session.rewind(0.1 + RESEND_S - 0.01)
    assert session.rewind(0.1 + RESEND_S)

    assert [item[1] for item in (session.take_frame(0.5) or {})["items"]] == [1, 2, 3]


def test_new_frames_do_not_put_off_the_repeat_of_a_lost_one() -> None:
    """Scenario: one frame of a running stream is lost; the client can use none that follows until it comes again."""
    session = opened()
    now, repeated_at = 0.0, None
    for index in range(60):
        now = index * 0.02
        session.accept(batch(b"x", start=index), ENGINE, now)
        if session.rewind(now):
            repeated_at = now
            break
        session.take_frame(now)

    assert repeated_at is not None and repeated_at <= RESEND_S + 0.03


def test_a_long_silence_before_the_next_item_repeats_nothing() -> None:
    """The wait counts from the sending of what is unacknowledged, not from the last acknowledgement."""
    session = opened()
    session.accept(batch(b"a"), ENGINE, 0.0)
    session.take_frame(0.0)
    session.client_ack("ok", [1], 64, 0.1)

    session.accept(batch(b"b", start=1), ENGINE, 5.0)
    session.take_frame(5.0)

    assert not session.rewind(5.05)


def test_a_lost_terminal_is_repeated_with_the_finishes() -> None:
    """Also when every item was acknowledged."""
    session = opened()
    session.accept(batch([*b"a", EOS]), ENGINE, 0.0)
    session.take_frame(0.0)
    session.client_ack("ok", [2], 64, 0.1)

    assert session.rewind(1.0)
    again = session.take_frame(1.0) or {}

    assert again["finish"] == [[0, "stop", 2]] and "terminal" in again
    session.client_ack("done", [], 0, 1.1)
    assert not session.rewind(9.0)


def test_a_stall_is_reported_once_per_second() -> None:
    """No ids for a second is news for the owner; it is repeated while it lasts, and never after the end."""
    session = opened()

    assert not session.stalled(STALL_S - 0.01)
    assert session.stalled(STALL_S)
    assert not session.stalled(STALL_S + 0.5)
    assert session.stalled(2 * STALL_S + 0.01)

    session.end(None, 3.0)
    assert not session.stalled(10.0)


def test_nothing_is_forgotten_before_everybody_knows() -> None:
    """A session stays until client, owner and engine have all confirmed the end."""
    session = opened()
    session.accept(batch([*b"a", EOS]), ENGINE, 0.0)
    assert not session.settled

    session.client_ack("done", [], 0, 0.1)
    session.finished_acked = True
    assert not session.settled

    session.engine_closed = True
    assert session.settled


@pytest.mark.parametrize("higher", [Fence(0, "a.e1", 1), Fence(1, "A.e9", 0)])
def test_a_reopened_session_keeps_ids_and_text(higher: Fence) -> None:
    """Another try, or another owner, continues the same text; a lower fence changes nothing."""
    session = opened()
    session.accept(batch(b"abc"), ENGINE, 0.0)

    session.reopen(m.Open(request_id="r1", fence=higher, record=session.record))
    session.reopen(m.Open(request_id="r1", fence=FENCE, record=session.record))

    assert session.fence == higher
    assert session.choices[0].text.ids == list(b"abc")


def test_the_owner_is_told_the_totals() -> None:
    """`Finished` carries what quota and the log need."""
    session = opened(max_tokens=2)
    session.accept(batch(b"ab", cached=0), ENGINE, 1.0)

    told = session.finished_message(wall=99.0, now=9.0)

    assert (told.prompt_tokens, told.completion_tokens, told.finish_reasons) == (3, 2, ["length"])
    assert told.error is None and told.ended_at == 99.0


def test_a_new_owner_is_told_the_end_although_the_old_one_needs_it_no_more() -> None:
    """Scenario: the owner exits, which settles it; another one opens the request under a higher term."""
    session = opened()
    session.finished_acked = True
    heir = Ref("admission", "b", "e7")

    record = session.record.model_copy(update={"owner": heir})
    session.reopen(m.Open(request_id="r1", fence=Fence(1, "b.e7", 0), record=record))

    assert session.record.owner == heir and not session.finished_acked


# --- slow readers -----------------------------------------------------------------------------------


def test_a_client_that_takes_nothing_is_given_up_with_a_typed_error() -> None:
    """It is held by its window until then; the terminal says why."""
    session = opened()
    session.accept(batch(b"x" * 400), ENGINE, 1.0)
    session.take_frame(1.0)

    assert not session.give_up_reader(30.0, 30.9)
    assert session.give_up_reader(30.0, 31.0)
    frame = session.take_frame(31.0)

    assert frame is not None and frame["terminal"]["error"]["code"] == "slow_reader"
    assert session.close_reason == "slow_reader"
    assert not session.give_up_reader(30.0, 90.0), "once"


def test_a_client_that_takes_its_time_is_kept() -> None:
    """Each acknowledgement that brings something starts the time anew; with nothing to take there is no time."""
    session = opened()
    session.accept(batch(b"x" * 300), ENGINE, 0.0)
    for turn in range(1, 11):
        session.client_ack("ok", [turn * 30], 64, turn * 20.0)
        assert not session.give_up_reader(30.0, turn * 20.0 + 29.0)

    assert not session.give_up_reader(30.0, 10_000.0)
    session.accept(batch(b"y", start=300), ENGINE, 10_000.0)
    assert not session.give_up_reader(30.0, 10_029.0)
    assert session.give_up_reader(30.0, 10_030.0)


def test_an_answer_that_is_complete_and_not_taken_fails_too() -> None:
    """The engine has long finished; what was kept for the client is let go."""
    session = opened(max_tokens=300)
    session.accept(batch(b"x" * 300), ENGINE, 0.0)
    assert session.ended and session.error is None

    assert session.give_up_reader(30.0, 31.0)
    assert session.take_frame(31.0)["terminal"]["error"]["code"] == "slow_reader"  # type: ignore[index]
