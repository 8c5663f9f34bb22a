"""Ids to text: stop strings, split characters and the finish, for every way to cut a text into tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.text import ChoiceText, TextRules, first_stop, live_prefix

EOS = 0


class Pieces:
    """A vocabulary made for one run: token `i + 1` is the i-th piece; token 0 ends the text."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)
        self.ids = list(range(1, len(self.pieces) + 1))

    def bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else self.pieces[token_id - 1]


class Run:
    """What one choice released, delta by delta."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        stop: Sequence[str] = (),
        max_tokens: int = 10_000,
        end: bool = True,
        ignore_eos: bool = False,
    ) -> None:
        words = Pieces(pieces)
        rules = TextRules(tuple(stop), max_tokens, ignore_eos, frozenset({EOS}))
        self.choice = ChoiceText(rules, words.bytes_of)
        self.deltas: list[str] = []
        for token_id in [*words.ids, *([EOS] if end else [])]:
            if self.choice.finish_reason is not None:
                break
            self.deltas.append(self.choice.push(token_id))

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def reason(self) -> str | None:
        return self.choice.finish_reason

    @property
    def num_tokens(self) -> int:
        return len(self.choice.ids)


def splits(data: bytes) -> Iterator[list[bytes]]:
    """Every way to cut `data` into non-empty pieces."""
    for mask in range(1 << (len(data) - 1)):
        pieces, start = [], 0
        for at in range(1, len(data)):
            if mask >> (at - 1) & 1:
                pieces.append(data[start:at])
                start = at
        yield [*pieces, data[start:]]


def expected_cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The rule read naively: character by character, end before the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


# --- stop strings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("one two thr", ["wo th"]),
        ("one two thr", ["o t"]),
        ("ab four", ["four"]),
        ("abab four", ["four", "fo"]),
        ("aaab", ["aab"]),
        ("abcabd", ["abd"]),
        ("abcd", ["bc", "abcd"]),
        ("xyxyz", ["xyz", "yxyz"]),
        ("a\u010fb", ["\u010f"]),
        ("plain", ["q"]),
    ],
)
def test_a_stop_string_cuts_the_text_wherever_token_borders_lie(text: str, stops: list[str]) -> None:
    """All splits of a text into tokens, also inside a character, give the same text and reason."""
    wanted, stopped = expected_cut(text, stops)

    for pieces in splits(text.encode()):
        run = Run(pieces, stop=stops)

        assert run.text == wanted, pieces
        assert run.reason == "stop"
        assert run.num_tokens <= len(pieces) + (0 if stopped else 1)


@pytest.mark.parametrize(
    "stops", [["wo th"], ["four"], ["o t"], ["tw", "two"], ["three", "thr"], [*"zxq", "e tw"]]
)
def test_no_character_of_a_stop_string_is_ever_in_a_delta(stops: list[str]) -> None:
    """A counting text, cut into pieces of each size: what was released before the match is the text before it."""
    text = "one two three four"
    wanted, _ = expected_cut(text, stops)

    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size].encode() for i in range(0, len(text), size)]
        run = Run(pieces, stop=stops)

        assert run.text == wanted
        assert all(s not in run.text for s in stops)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    """With one stop a prefix of another the shorter one is complete first."""
    assert Run([b"one two three"], stop=["two three", "two"]).text == "one "


def test_of_stop_strings_complete_at_once_the_longest_wins() -> None:
    """A stop that is the tail of another ends at the same character: nothing of either is shown."""
    assert Run([b"one two three"], stop=["ee", "three"]).text == "one two "


def test_stop_wins_over_length_on_the_last_allowed_token() -> None:
    """The match completes exactly with the token that also exhausts `max_tokens`."""
    run = Run([b"ab", b"cd", b"ef"], stop=["cd"], max_tokens=2)

    assert (run.text, run.reason, run.num_tokens) == ("ab", "stop", 2)


def test_held_text_is_released_when_the_limit_comes_first() -> None:
    """Text that might have become a stop string is part of the answer if the answer ends before it did."""
    run = Run([b"ab", b"wo t"], stop=["wo th"], max_tokens=2)

    assert (run.text, run.reason) == ("abwo t", "length")


def test_held_text_is_released_at_the_end_of_text() -> None:
    """The same when the model ends by itself; the reason is the end, not a match."""
    run = Run([b"ab", b"wo t"], stop=["wo th"])

    assert (run.text, run.reason, run.num_tokens) == ("abwo t", "stop", 3)


def test_held_text_is_never_longer_than_the_live_stop_prefix() -> None:
    """What cannot begin a stop string any more leaves at once."""
    run = Run([b"wo", b" x", b"wo t"], stop=["wo th"], end=False)

    assert run.deltas == ["", "wo x", ""]


def test_a_stop_string_may_hold_a_replacement_character() -> None:
    """Bytes that never become a character count as U+FFFD, also when they complete a stop string at the very end."""
    run = Run([b"ab", b"\xf0\x9f"], stop=["b\ufffd"])

    assert (run.text, run.reason) == ("a", "stop")


@given(
    text=st.text(alphabet="ab\u010f", min_size=1, max_size=24),
    stops=st.lists(st.text(alphabet="ab\u010f", min_size=1, max_size=4), max_size=4),
    cuts=st.sets(st.integers(1, 47)),
)
def test_any_text_any_stops_any_split(text: str, stops: list[str], cuts: set[int]) -> None:
    """The text is a function of the bytes alone, and equals the naive rule's."""
    data = text.encode()
    borders = [0, *sorted(c for c in cuts if c < len(data)), len(data)]

    run = Run([data[a:b] for a, b in zip(borders, borders[1:], strict=False)], stop=stops)

    assert run.text == expected_cut(text, stops)[0]


# --- characters split over tokens -------------------------------------------------------------------

HARD = "\u010f \u6f22 \u05e9 \U0001f469\u200d\U0001f680 \U0001f1e8\U0001f1ff e\u0301"


def test_no_delta_has_a_replacement_character_unless_the_text_has() -> None:
    """One byte per token: every character comes whole."""
    run = Run([bytes([b]) for b in HARD.encode()])

    assert run.text == HARD
    assert all("\ufffd" not in d for d in run.deltas)


def test_every_limit_gives_a_prefix_and_one_mark_for_a_cut_character() -> None:
    """For each `max_tokens` the deltas joined are the bytes decoded once; buffering changes no count."""
    data = HARD.encode()
    for limit in range(1, len(data) + 1):
        run = Run([bytes([b]) for b in data], max_tokens=limit, end=False)

        assert run.text == data[:limit].decode("utf-8", "replace")
        assert (run.reason, run.num_tokens) == ("length", limit)
        assert run.text.count("\ufffd") <= 1


@pytest.mark.parametrize("bad", [b"\xc4", b"\xf0\x9f", b"\xff", b"\x80", b"\xed\xa0\xbd"])
@pytest.mark.parametrize("tail", [b"", b"xy", "\u010f".encode()])
def test_invalid_bytes_never_raise_and_show_the_same_for_every_split(bad: bytes, tail: bytes) -> None:
    """In the middle and at the end, in all splits: what one decode of the whole gives."""
    data = b"a" + bad + tail
    wanted = data.decode("utf-8", "replace")

    for pieces in splits(data):
        assert Run(pieces).text == wanted


@given(data=st.binary(min_size=1, max_size=40), cuts=st.sets(st.integers(1, 39)))
def test_streamed_text_equals_the_whole(data: bytes, cuts: set[int]) -> None:
    """Any bytes in any tokens: the concatenation of the deltas is the text of the whole."""
    borders = [0, *sorted(c for c in cuts if c < len(data)), len(data)]

    run = Run([data[a:b] for a, b in zip(borders, borders[1:], strict=False)])

    assert run.text == data.decode("utf-8", "replace")


# --- the finish -------------------------------------------------------------------------------------


def test_the_end_of_text_counts_as_an_item_and_shows_nothing() -> None:
    """The id that ends a text is the last item, without text."""
    run = Run([b"a", b"b"])

    assert (run.deltas, run.reason, run.num_tokens) == (["a", "b", ""], "stop", 3)


def test_an_ignored_end_of_text_goes_on_until_the_limit() -> None:
    """With `ignore_eos` only `max_tokens` (or a stop string) ends the text."""
    rules = TextRules((), 3, True, frozenset({EOS}))
    choice = ChoiceText(rules, Pieces([b"a"]).bytes_of)

    deltas = [choice.push(i) for i in (1, EOS, 1)]

    assert (deltas, choice.finish_reason) == (["a", "", "a"], "length")


def test_nothing_may_follow_the_finish() -> None:
    """Pushing on is a fault of the caller."""
    run = Run([b"a"])

    with pytest.raises(AssertionError):
        run.choice.push(1)


# --- the two searches -------------------------------------------------------------------------------


@given(text=st.text(alphabet="ab", max_size=12), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5)))
def test_the_live_prefix_is_the_longest_tail_that_may_become_a_stop(text: str, stops: list[str]) -> None:
    """Compared with trying all tails."""
    tails = [n for n in range(len(text) + 1) if any(len(s) > n and s.startswith(text[len(text) - n :]) for s in stops)]

    assert live_prefix(text, tuple(stops)) == max(tails, default=0)


def test_a_stop_string_may_begin_in_text_that_was_searched_before() -> None:
    """Only what is complete there was excluded."""
    assert first_stop("one two", 5, ("e two",)) == 2


def test_stop_strings_in_the_first_tokens_do_not_count_below_min_tokens() -> None:
    """Neither one that is complete there nor one that begins there; the next one ends the text."""
    pieces = Pieces([b"a|", b"b", b"|", b"|c", b"d|e"])
    choice = ChoiceText(TextRules(("|", "b|"), 100, False, frozenset({EOS}), min_tokens=3), pieces.bytes_of)

    deltas = [choice.push(token) for token in pieces.ids[:4]]

    assert deltas == ["a|", "b", "|", ""]
    assert choice.finish_reason == "stop"
