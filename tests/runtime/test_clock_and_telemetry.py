"""Clocks, deadlines, telemetry and the rules of the wire."""

from __future__ import annotations

import asyncio
import json
import timeit
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.clock import SystemClock
from runtime.telemetry import Telemetry, json_logger, parse_traceparent
from runtime.virtual_clock import VirtualClock, run_virtual
from runtime.wire import check_pattern, check_subject, decode_headers, encode_headers, matches


def test_virtual_time_jumps_over_waiting() -> None:
    """An hour of sleeps, timeouts and timers takes no real time and reads as an hour."""

    async def main(clock: VirtualClock) -> tuple[float, float]:
        started = clock.wall()
        await clock.sleep(3000.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 600.0)
        return clock.now(), clock.wall() - started

    seconds = timeit.timeit(lambda: run_virtual(main), number=1)
    assert run_virtual(main) == (pytest.approx(3600.0), pytest.approx(3600.0))
    assert seconds < 10


def test_virtual_time_waits_for_threads() -> None:
    """A result from a thread wakes the loop although no timer is set."""

    async def main(clock: VirtualClock) -> int:
        return await asyncio.get_running_loop().run_in_executor(None, lambda: 7)

    assert run_virtual(main) == 7


def test_randomness_of_a_virtual_clock_is_its_seed() -> None:
    """Two clocks of one seed agree, two seeds do not."""
    first, same, other = VirtualClock(1), VirtualClock(1), VirtualClock(2)
    assert [first.random_hex(8), first.random()] == [same.random_hex(8), same.random()]
    assert first.random_hex(8) != other.random_hex(8)


@pytest.mark.anyio
async def test_a_failing_task_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody awaits it, yet its exception is seen."""

    async def fail() -> None:
        raise RuntimeError("nobody awaits me")

    clock = SystemClock()
    task = clock.spawn(fail(), name="failing")
    await asyncio.wait({task})
    await asyncio.sleep(0)
    assert clock.tasks.failed == 1
    assert "nobody awaits me" in caplog.text and "failing" in caplog.text
    assert len(clock.tasks) == 0


def test_metrics_are_made_once_and_named_with_the_prefix() -> None:
    """The same name is the same metric, in every node its own; another type under the name is an error."""
    telemetry = Telemetry("n", otlp_endpoint="", spans_file="")
    counter = telemetry.counter("things", "Things.", ("kind",))
    assert telemetry.counter("headrace_things_total", "Things.", ("kind",)) is counter
    counter.labels("a").inc(3)
    telemetry.histogram("wait_seconds", "Waiting.", buckets=(0.001, 1.0)).observe(0.5)
    text = telemetry.render()
    assert 'headrace_things_total{kind="a"} 3.0' in text
    assert 'headrace_wait_seconds_bucket{le="1.0"} 1.0' in text
    with pytest.raises(ValueError, match="headrace_things is a Counter"):
        telemetry.gauge("things", "Things.")
    assert "things" not in Telemetry("m", otlp_endpoint="", spans_file="").render()


def test_trace_contexts_keep_their_trace() -> None:
    """A child has its parent's trace id and a span id of its own; nonsense starts a new trace."""
    telemetry = Telemetry("n", otlp_endpoint="", spans_file="")
    root = telemetry.new_traceparent(None)
    child = telemetry.new_traceparent(root)
    assert parse_traceparent(child)[0] == parse_traceparent(root)[0]  # type: ignore[index]
    assert child != root
    for nonsense in ("", "x", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", root.upper() + "X"):
        assert parse_traceparent(nonsense) is None
        assert parse_traceparent(telemetry.new_traceparent(nonsense)) is not None


def test_spans_in_a_file_form_a_tree(tmp_path: Path) -> None:
    """A request's span and a hop below it; attributes come along."""
    path = tmp_path / "spans.jsonl"
    telemetry = Telemetry("n", otlp_endpoint="", spans_file=str(path))
    client = telemetry.new_traceparent(None)
    request = telemetry.new_traceparent(client)
    telemetry.hop("prefill", request, 1.0, 2.0, tokens=5)
    telemetry.request_span("chat", request, 0.5, 3.0, parent=client)
    telemetry.hop("nowhere", "nonsense", 1.0, 2.0)
    telemetry.close()
    hop, root = (json.loads(line) for line in path.read_text().splitlines())
    assert hop["parent_id"] == root["span_id"] and hop["trace_id"] == root["trace_id"]
    assert root["parent_id"] == parse_traceparent(client)[1]  # type: ignore[index]
    assert hop["attributes"] == {"tokens": 5} and (hop["start"], hop["end"]) == (1.0, 2.0)


def test_a_span_that_goes_nowhere_costs_next_to_nothing() -> None:
    """Tracing is off by default, and then a hop takes less than 5 µs."""
    telemetry = Telemetry("n", otlp_endpoint="", spans_file="")
    trace = telemetry.new_traceparent(None)
    best = min(timeit.repeat(lambda: telemetry.hop("x", trace, 1.0, 2.0, a=1), number=1000, repeat=5)) / 1000
    assert best < 5e-6


def test_log_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One object per line, on stderr, from the level on."""
    log = json_logger("info").bind(node="n")
    log.debug("unseen")
    log.info("request", id="r", tokens=3)
    captured = capsys.readouterr()
    line = json.loads(captured.err)
    assert captured.out == ""
    assert (line["event"], line["node"], line["id"], line["tokens"], line["level"]) == ("request", "n", "r", 3, "info")
    with pytest.raises(ValueError, match="loud"):
        json_logger("loud")


_TOKEN = st.sampled_from(["a", "b", "*", ">"])


@given(st.lists(_TOKEN, min_size=1, max_size=4), st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=4))
def test_matching_agrees_with_the_definition(pattern: list[str], subject: list[str]) -> None:
    """`*` stands for one token, `>` at the end for one or more."""
    text = ".".join(pattern)
    if ">" in pattern[:-1]:
        with pytest.raises(ValueError):
            check_pattern(text)
        return
    check_pattern(text)
    fixed = pattern[:-1] if pattern[-1] == ">" else pattern
    enough = len(subject) > len(fixed) if pattern[-1] == ">" else len(subject) == len(fixed)
    expected = enough and all(p in ("*", s) for p, s in zip(fixed, subject, strict=False))
    assert matches(text, ".".join(check_subject(".".join(subject)).split("."))) is expected


@given(st.dictionaries(st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,10}", fullmatch=True), st.text(max_size=20), max_size=4))
def test_headers_survive_the_wire(headers: dict[str, str]) -> None:
    """Any value without line breaks comes back, trimmed; one with line breaks is refused."""
    if any("\r" in v or "\n" in v for v in headers.values()):
        with pytest.raises(ValueError):
            encode_headers(headers)
        return
    status, fields = decode_headers(encode_headers(headers))
    assert status == ""
    assert fields == {k: v.strip() for k, v in headers.items()} or any(not v.isprintable() for v in headers.values())


@given(st.binary(max_size=100))
def test_foreign_header_bytes_never_raise(block: bytes) -> None:
    """Whatever a peer sends ends no read loop."""
    decode_headers(block)
    assert decode_headers(b"NATS/1.0 503\r\n\r\n") == ("503", {})
