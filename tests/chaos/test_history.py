"""A history survives being written and read, and the recorder knows how far requests have come."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.history import Event, Recorder, by_request, parse, read


def test_a_history_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """Every event comes back, texts of any script included."""
    now = iter([1.0, 2.0, 3.0])
    recorder = Recorder(lambda: next(now), tmp_path / "h.jsonl")
    recorder.add("r", "sent", choices=1, key="k")
    recorder.add("r", "item", choice=0, index=0, id=7, text="ď\n漢\u2028")
    recorder.add("r", "terminal", error=None)
    recorder.close()

    assert read(tmp_path / "h.jsonl") == recorder.events


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    """A client that was killed while writing leaves a readable history."""
    path = tmp_path / "h.jsonl"
    path.write_text(Event(1.0, "r", "left").line() + "\n" + '{"t": 2.0, "req')

    assert read(path) == [Event(1.0, "r", "left")]


@pytest.mark.parametrize("line", ["[]", "{}", '{"t": 1, "request": "r", "kind": "sneeze"}', "not json"])
def test_what_is_no_event_is_refused(line: str) -> None:
    """A foreign line is an error, not an event without a meaning."""
    with pytest.raises(ValueError):
        parse(line)


def test_progress_counts_the_slowest_choice_and_no_repeats() -> None:
    """A repeated index is no progress; a request is as far as its last choice."""
    recorder = Recorder(lambda: 0.0)
    recorder.add("r", "sent", choices=2)
    for choice, index in ((0, 0), (0, 0), (0, 1), (1, 0), (1, 5)):
        recorder.add("r", "item", choice=choice, index=index, id=1, text="x")

    assert recorder.done["r"] == 1


def test_grouping_leaves_out_what_belongs_to_no_request() -> None:
    """Loads and faults concern the system."""
    events = [Event(2.0, "r", "left"), Event(0.0, "", "load"), Event(1.0, "r", "sent")]

    assert [e.kind for e in by_request(events)["r"]] == ["sent", "left"]
    assert set(by_request(events)) == {"r"}
