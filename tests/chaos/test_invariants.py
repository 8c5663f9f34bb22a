"""Each invariant checker accepts a good history and rejects every mutation of it that breaks its promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.history import Event
from chaos.invariants import (
    Answer,
    Idle,
    answer,
    bounded,
    classify,
    longest_gap_s,
    no_gap_no_repeat,
    one_ending,
    same_text,
    work_stops,
)

DEADLINE_S = 10.0
WORDS = ("one ", "two ", "three ", "four ", "five ", "six ", "seven ", "eight ")


def stream(request: str = "r", count: int = 6, *, choices: int = 1, indexed: bool = True) -> list[Event]:
    """Return the history of one request that went well."""
    sent = {"client": "native", "key": "k", "choices": choices, "deadline_s": DEADLINE_S, "indexed": indexed}
    events = [Event(0.0, request, "sent", sent), Event(0.1, request, "accepted", {"id": "x"})]
    for index in range(count):
        for choice in range(choices):
            data = {"choice": choice, "index": index if indexed else None, "id": index, "text": WORDS[index % 8]}
            events.append(Event(0.2 + index * 0.1, request, "item", data))
    end = 0.3 + count * 0.1
    events += [
        Event(end, request, "finish", {"choice": c, "reason": "length", "total": count if indexed else None})
        for c in range(choices)
    ]
    return [*events, Event(end, request, "terminal", {"error": None, "usage": None})]


def reference(count: int = 6, choices: int = 1) -> dict[str, Answer]:
    """Return what the undisturbed run of `stream` said."""
    text = "".join(WORDS[i % 8] for i in range(count))
    return {"k": Answer((text,) * choices, ("length",) * choices)}


def everything(events: list[Event], count: int, choices: int) -> list[str]:
    """Return the names of the invariants that a history violates."""
    found = one_ending(events) + no_gap_no_repeat(events) + same_text(events, reference(count, choices))
    return sorted({v.invariant for v in found})


def items(events: list[Event]) -> list[int]:
    """Return the positions of items in a history."""
    return [at for at, e in enumerate(events) if e.kind == "item"]


shapes = st.tuples(st.integers(2, 20), st.integers(1, 3))


@given(shapes, st.booleans())
def test_a_good_history_violates_nothing(shape: tuple[int, int], indexed: bool) -> None:
    """No checker complains of a stream that went well, whatever its length, choices and client."""
    count, choices = shape

    assert everything(stream(count=count, choices=choices, indexed=indexed), count, choices) == []


@given(shapes, st.data())
def test_a_dropped_item_is_a_gap(shape: tuple[int, int], data: st.DataObject) -> None:
    """An item that never came is found by its index and by the text."""
    events = stream(count=shape[0], choices=shape[1])
    del events[data.draw(st.sampled_from(items(events)))]

    assert everything(events, *shape) == ["gap", "same_text"]


@given(shapes, st.data())
def test_a_dropped_item_shows_in_the_text_of_a_client_without_indices(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    """Over HTTP the text alone tells."""
    events = stream(count=shape[0], choices=shape[1], indexed=False)
    del events[data.draw(st.sampled_from(items(events)))]

    found = same_text(events, reference(*shape))

    assert found and " gap:" in found[0].detail


@given(shapes, st.data())
def test_a_doubled_item_shows_in_the_text_of_a_client_without_indices(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    """Over HTTP nobody can drop a repeat, so the text has it twice."""
    events = stream(count=shape[0], choices=shape[1], indexed=False)
    at = data.draw(st.sampled_from(items(events)))
    events.insert(at, events[at])

    found = same_text(events, reference(*shape))

    assert found and " repeat:" in found[0].detail


@given(shapes, st.data())
def test_a_retransmission_is_no_repeat(shape: tuple[int, int], data: st.DataObject) -> None:
    """With indices, an item that says the same again is dropped by its receiver, as the protocol has it."""
    events = stream(count=shape[0], choices=shape[1])
    at = data.draw(st.sampled_from(items(events)))
    events.insert(at + 1, events[at])

    assert everything(events, *shape) == []


@given(shapes, st.data())
def test_an_index_that_says_two_things_is_a_repeat(shape: tuple[int, int], data: st.DataObject) -> None:
    """A retransmission with another id is a violation even though its receiver would drop it."""
    events = stream(count=shape[0], choices=shape[1])
    at = data.draw(st.sampled_from(items(events)))
    events.insert(at + 1, replace(events[at], data={**events[at].data, "id": 999}))

    assert everything(events, *shape) == ["repeat"]


@given(shapes, st.data())
def test_a_renumbered_item_is_a_gap(shape: tuple[int, int], data: st.DataObject) -> None:
    """Duplicating an item under a later number, as a wrong resumption would, breaks the total or the text."""
    events = stream(count=shape[0], choices=shape[1])
    at = data.draw(st.sampled_from(items(events)))
    choice, index = events[at].data["choice"], events[at].data["index"]
    shifted = [
        replace(e, data={**e.data, "index": e.data["index"] + 1})
        if e.kind == "item" and e.data["choice"] == choice and e.data["index"] >= index
        else e
        for e in events
    ]
    shifted.insert(at, events[at])

    assert "repeat" in everything(shifted, *shape)


@given(st.integers(2, 20), st.data())
def test_swapped_texts_differ(count: int, data: st.DataObject) -> None:
    """Items in the wrong order are found by the text."""
    events = stream(count=count, indexed=False)
    at = data.draw(st.sampled_from(items(events)[:-1]))
    events[at], events[at + 1] = replace(events[at], data=events[at + 1].data), replace(
        events[at + 1], data=events[at].data
    )

    assert everything(events, count, 1) == ["same_text"]


@given(shapes, st.data())
def test_an_altered_item_differs(shape: tuple[int, int], data: st.DataObject) -> None:
    """One other token is one violation."""
    events = stream(count=shape[0], choices=shape[1])
    at = data.draw(st.sampled_from(items(events)))
    events[at] = replace(events[at], data={**events[at].data, "text": "zero "})

    assert everything(events, *shape) == ["same_text"]


def test_another_reason_differs() -> None:
    """The finish reason belongs to the answer."""
    events = stream()
    at = next(i for i, e in enumerate(events) if e.kind == "finish")
    events[at] = replace(events[at], data={**events[at].data, "reason": "stop"})

    assert [v.invariant for v in same_text(events, reference())] == ["same_text"]


def test_a_second_terminal_is_found() -> None:
    """A stream that ends twice does not have one ending."""
    events = stream()
    events.append(replace(events[-1], t=events[-1].t + 0.1))

    assert [v.detail for v in one_ending(events)] == ["ended 2 times"]


def test_a_missing_terminal_is_found() -> None:
    """A silent hang is what must never happen."""
    assert [v.detail for v in one_ending(stream()[:-1])] == ["never ended"]


def test_a_request_whose_client_left_needs_no_ending() -> None:
    """Nobody is there to read it."""
    events = [*stream()[:4], Event(1.0, "r", "left")]

    assert one_ending(events) == []


@given(st.floats(0.001, 100.0))
def test_a_late_terminal_is_found(late: float) -> None:
    """The limit is the deadline plus a second, counted from when the request was sent."""
    events = stream()
    events[-1] = replace(events[-1], t=DEADLINE_S + 1.0 + late)

    assert [v.invariant for v in one_ending(events)] == ["one_ending"]


def test_a_terminal_at_the_limit_is_in_time() -> None:
    """The bound itself is allowed."""
    events = stream()
    events[-1] = replace(events[-1], t=DEADLINE_S + 1.0)

    assert one_ending(events) == []


def test_a_deadline_runs_from_when_the_request_is_taken() -> None:
    """What a native client names is a duration; nobody may stretch it beyond that."""

    def ended(at: float, *, until: float) -> list[str]:
        events = stream()
        events[1] = replace(events[1], t=2.5, data={"id": "x", "until": until})
        events[-1] = replace(events[-1], t=at)
        return [v.detail for v in one_ending(events)]

    assert ended(13.4, until=12.4) == []
    assert ended(13.5, until=12.4) == ["ended 0.100 s too late"]
    assert ended(13.4, until=13.0) == ["was given more time than it asked for"]


def test_a_client_that_was_cut_off_is_told_when_it_is_back() -> None:
    """Its second begins when its connection is back, if that was gone when the second after its deadline ended."""
    *before, _, terminal = stream()
    error = {"error": {"code": "deadline_exceeded"}, "usage": None}

    def ended(at: float, *, gone: float, for_s: float, client: str = "native", again: float = 0.0) -> list[str]:
        sent = replace(before[0], data={**before[0].data, "client": client})
        away = [Event(t, "", "away", {"for_s": for_s}) for t in (gone, again) if t]
        end = replace(terminal, t=at, data=error)
        return [v.detail for v in one_ending([sent, *before[1:], *away, end])]

    limit = DEADLINE_S + 1.0
    assert ended(limit + 2.5, gone=limit - 1.0, for_s=3.0) == []
    assert ended(limit + 3.5, gone=limit - 1.0, for_s=3.0) == ["ended 0.500 s too late"]
    assert ended(limit + 5.5, gone=limit - 1.0, for_s=3.0, again=limit + 1.8) == []
    assert ended(limit + 0.1, gone=limit - 3.0, for_s=1.0) == ["ended 0.100 s too late"]
    assert ended(limit + 0.1, gone=limit - 1.0, for_s=3.0, client="http") == ["ended 0.100 s too late"]


def test_an_item_after_the_terminal_is_found() -> None:
    """An ending ends."""
    events = stream()
    at = items(events)[0]
    events.append(replace(events[at], t=events[-1].t + 0.1))

    assert [v.detail for v in one_ending(events)] == ["item after the terminal"]


def test_a_choice_without_a_finish_is_found() -> None:
    """Without an error every choice has its finish."""
    events = [e for e in stream(choices=2) if not (e.kind == "finish" and e.data["choice"] == 1)]

    assert [v.detail for v in one_ending(events)] == ["1 of 2 choices finished"]


def test_a_failed_request_shows_a_prefix() -> None:
    """What was shown before an error must be right, as far as it goes."""
    error = {"kind": "DeadlineExceeded"}
    cut = [*stream()[:5], Event(3.0, "r", "terminal", {"error": error})]
    wrong = [replace(e, data={**e.data, "text": "no "}) if e.kind == "item" else e for e in cut]

    assert same_text(cut, reference()) == []
    assert [v.invariant for v in same_text(wrong, reference())] == ["same_text"]


def test_a_request_without_a_reference_cannot_pass() -> None:
    """A comparison that did not happen is no success."""
    assert [v.invariant for v in same_text(stream(), {})] == ["same_text"]


@pytest.mark.parametrize(
    ("text", "how"), [("abcdef", "same"), ("abef", "gap"), ("abcdcdef", "repeat"), ("abXdef", "differs"), ("", "gap")]
)
def test_differences_are_classified(text: str, how: str) -> None:
    """A missing run, a doubled run and anything else are told apart."""
    assert classify(text, "abcdef") == how


def load(t: float, actor: str = "decode/0", running: int = 0, waiting: int = 0, blocks: int = 0) -> Event:
    """Return one load snapshot."""
    figures = {"running": running, "waiting": waiting, "blocks_in_use": blocks, "steps": 0}
    return Event(t, "", "load", {"actor": actor, **figures})


BASELINE = {"decode/0": Idle()}


def test_work_that_stops_is_accepted() -> None:
    """Back at the baseline within the bound, whatever happened before it."""
    events = [*stream()[:4], Event(1.0, "r", "left"), load(1.2, running=1, blocks=3), load(2.9), load(3.1)]

    assert work_stops(events, BASELINE) == []


@pytest.mark.parametrize("held", [{"running": 1}, {"waiting": 1}, {"blocks": 1}])
def test_work_that_goes_on_is_found(held: dict[str, int]) -> None:
    """Anything still held after the bound is a violation."""
    events = [*stream()[:4], Event(1.0, "r", "left"), load(1.2, running=1, blocks=3), load(3.1, **held)]

    assert [v.invariant for v in work_stops(events, BASELINE)] == ["work_stops"]


def test_a_silent_engine_is_found() -> None:
    """An engine that says nothing proves nothing."""
    events = [*stream()[:4], Event(1.0, "r", "left"), load(3.1, actor="decode/1")]

    assert [v.detail for v in work_stops(events, BASELINE)] == ["decode/0 said nothing"]


def test_a_moment_with_a_next_request_shows_nothing() -> None:
    """Load that belongs to the next request is not held against the last one."""
    busy = [replace(e, t=e.t + 1.5, request="s") for e in stream(count=1)]
    events = [*stream()[:4], Event(1.0, "r", "left"), *busy[:-2], load(3.1, running=1)]

    assert work_stops(events, BASELINE) == []


def test_bounds_hold_or_are_found() -> None:
    """A figure at its cap is within it; above it is not."""
    assert bounded([load(0.0, waiting=5)], {"waiting": 5}) == []
    assert [v.invariant for v in bounded([load(0.0, waiting=6)], {"waiting": 5})] == ["bounded"]


def test_the_longest_gap_is_between_items_of_one_request() -> None:
    """The wait for the first item is no gap, nor is the time between two requests' items."""
    events = stream("a") + [replace(e, t=e.t + 50.0) for e in stream("b")]
    at = items(events)[3]
    events = [replace(e, t=e.t + 2.0) if i >= at and e.request == "a" else e for i, e in enumerate(events)]

    assert longest_gap_s(events) == pytest.approx(2.1)


def test_repeats_do_not_break_a_silence() -> None:
    """Items that came before are no progress."""
    events = stream()
    at = items(events)[3]
    events = [replace(e, t=e.t + 2.0) if i >= at else e for i, e in enumerate(events)]
    events.insert(at, replace(events[at - 1], t=events[at - 1].t + 1.0))

    assert longest_gap_s(events) == pytest.approx(2.1)


def test_an_answer_is_read_as_a_client_reads_it() -> None:
    """Repeats and items out of order are dropped; choices are kept apart."""
    events = stream(count=2, choices=2)
    at = items(events)[0]
    ahead = replace(events[at], data={**events[at].data, "index": 7, "text": "ahead"})

    assert answer([*events[: at + 1], events[at], ahead, *events[at + 1 :]]) == Answer(
        ("one two ", "one two "), ("length", "length")
    )
