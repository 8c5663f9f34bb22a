"""Traces: read, checked, linked, spread; and the generated one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.replay import generate
from bench.replay.facts import Target, facts_of
from bench.replay.trace import TraceError, read


def line(at_ms: int, tokens: int, *hashes: int) -> str:
    """One request of Mooncake's form."""
    fields = {"timestamp": at_ms, "input_length": tokens, "output_length": 10, "hash_ids": hashes}
    return json.dumps(fields) + "\n"


def written(tmp_path: Path, text: str) -> Path:
    """A file."""
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_a_mooncake_trace_starts_at_zero_and_keeps_its_hashes(tmp_path: Path) -> None:
    """Equal ids are equal hashes, in blocks of 512 tokens."""
    trace = read(written(tmp_path, line(5000, 1000, 7, 8) + line(2000, 512, 7)))

    first, second = trace.arrivals
    assert (first.at_s, first.input_tokens, second.at_s) == (0.0, 512, 3.0)
    assert first.hashes == second.hashes[:1] and len(set(second.hashes)) == 2
    assert trace.has_hashes and trace.input_tokens == 1512 and trace.span_s == 3.0


def test_an_azure_trace_has_lengths_alone(tmp_path: Path) -> None:
    """Times come from a column with seven digits of a second."""
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    rows = "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.2299600,3180,8\r\n"

    trace = read(written(tmp_path, head + rows))

    assert [a.input_tokens for a in trace.arrivals] == [4808, 3180]
    assert trace.span_s == pytest.approx(0.25, abs=1e-5) and not trace.has_hashes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: neither JSON"),
        ("a,b\n1,2\n", "line 1: neither JSON"),
        (line(0, 512, 1) + "{\n", "line 2: JSONDecodeError"),
        (line(0, 512, 1) + '{"timestamp": 1}\n', "line 2: KeyError"),
        (line(0, 2000, 1), "line 1: ValueError: 1 blocks of 512 for 2000 tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "line 2: ValueError"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    """Nothing is skipped silently."""
    with pytest.raises(TraceError, match=says):
        read(written(tmp_path, text))


def test_a_turn_follows_the_turn_it_repeats(tmp_path: Path) -> None:
    """All but the last block of an earlier prompt in common; a shared first block alone links nobody."""
    talk = line(0, 1500, 0, 1, 2) + line(9000, 2500, 0, 1, 3, 4, 5)
    stranger = line(4000, 1500, 0, 7, 8)

    trace = read(written(tmp_path, talk + stranger))

    assert [arrival.after for arrival in trace.arrivals] == [None, None, 0]


def test_requests_of_one_moment_are_drawn_apart_in_their_order(tmp_path: Path) -> None:
    """Ticks of three seconds are no bursts: their requests come until the next tick, the same way for one seed."""
    text = "".join(line(3000 * (n // 4), 100 + n, n) for n in range(8))

    trace = read(written(tmp_path, text))
    spread = trace.spread(seed=3)

    times = [arrival.at_s for arrival in spread.arrivals]
    assert times == sorted(times) and len(set(times[:4])) == 4 and times[0] == 0.0 and times[3] < 3.0 == times[4]
    assert [a.input_tokens for a in spread.arrivals] == [100 + n for n in range(8)]
    assert spread == trace.spread(seed=3) != trace.spread(seed=4)


def test_a_generated_trace_is_of_the_same_form(tmp_path: Path) -> None:
    """Same seed, same file; all begin with one block, some are next turns; it is not taken for a published one."""
    path = tmp_path / "a.jsonl"
    generate.main([str(path), "--requests", "300", "--seed", "5"])
    other = generate.write(tmp_path / "b.jsonl", 300, 5)

    trace = read(path)

    assert path.read_bytes() == other.read_bytes() != generate.write(other, 300, 6).read_bytes()
    assert len(trace.arrivals) == 300 and len({arrival.hashes[0] for arrival in trace.arrivals}) == 1
    assert 60 < sum(arrival.after is not None for arrival in trace.arrivals) < 180
    assert facts_of(trace) is None


def test_a_figure_that_is_no_number_meets_nothing() -> None:
    """A target needs a value within its bounds."""
    assert Target("t", 1.0, least=1.0, most=2.0).met
    assert not Target("t", 0.9, least=1.0).met and not Target("t", 2.1, most=2.0).met
    assert not Target("t", float("nan"), least=1.0).met and not Target("t", float("nan"), most=1.0).met
