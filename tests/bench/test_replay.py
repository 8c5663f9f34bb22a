"""Replays of a small generated trace: hit rates, placements, the verdict."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.ttft import LoadCost, View
from bench.replay import facts, generate
from bench.replay.__main__ import main
from bench.replay.ahead import Ahead
from bench.replay.crowds import crowds
from bench.replay.fleet import Fleet, Load, Outcome, Replay, offered
from bench.replay.model import Deployment
from bench.replay.store import POLICIES, UNLIMITED, Store, hit_rate
from bench.replay.trace import BLOCK_TOKENS, Trace, read
from kvstore.index import Op

COSTS = Deployment().costs(100e9, 25e9)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """400 requests, every one with the same first block."""
    return read(generate.write(tmp_path_factory.mktemp("trace") / "small.jsonl", 400, 1))


def replay(trace: Trace, placement: str, *, load: float = 1.0, cache: int = 1_000_000, closed: bool = False) -> Outcome:
    """Eight replicas under an offered load."""
    fleet = Fleet(8, cache, "lru", COSTS)
    return Replay(placement, fleet, Load(trace, load / offered(Load(trace), fleet), closed)).run()


def plain_lru(trace: Trace, capacity: int) -> float:
    """The oracle: one ordered dictionary."""
    order: OrderedDict[bytes, None] = OrderedDict()
    hit = 0
    for arrival in trace.arrivals:
        hashes = arrival.hashes[: capacity or None]
        found = next((n for n, block in enumerate(arrival.hashes) if block not in order), len(arrival.hashes))
        hit += min(found * BLOCK_TOKENS, arrival.input_tokens)
        for block in reversed(hashes):
            order[block] = None
            order.move_to_end(block)
        while capacity and len(order) > capacity:
            order.popitem(last=False)
    return hit / trace.input_tokens


@pytest.mark.parametrize("tokens", [300_000, 1_000_000, UNLIMITED])
def test_the_store_with_lru_hits_what_a_plain_lru_hits(trace: Trace, tokens: int) -> None:
    """Policy, store and index together are an LRU of so many blocks."""
    assert hit_rate(trace, tokens, "lru") == pytest.approx(plain_lru(trace, tokens // BLOCK_TOKENS), abs=0.003)


@pytest.mark.slow
def test_nothing_hits_more_than_a_store_that_keeps_all(trace: Trace) -> None:
    """More room never does harm under LRU; no policy beats having everything."""
    rates = [hit_rate(trace, tokens, "lru") for tokens in (300_000, 1_000_000, UNLIMITED)]

    assert rates == sorted(rates) and rates[0] > 0
    for policy in POLICIES:
        assert 0 < hit_rate(trace, 1_000_000, policy) <= rates[-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_longer_than_the_store_keeps_its_head_there(policy: str) -> None:
    """Blocks of the prompt itself never go for its own tail, and every change is an event."""
    store = Store("s", 4, policy)
    old, prompt = [b"x", b"y"], [bytes([n]) for n in range(6)]
    store.use(old)

    assert store.use(prompt) == 0

    assert store.prefix(prompt) == 4 and store.prefix(old) == 0 and store.free_blocks == 0
    events = [(event.op, event.hash) for event in store.events.collect()]
    assert events.count((Op.ADD, b"x")) == events.count((Op.DROP, b"x")) == 1 and len(events) == 8


@pytest.mark.slow
def test_longest_prefix_alone_collapses(trace: Trace) -> None:
    """All prompts share their first block, so whoever has it first gets nearly everything, and queues without end."""
    longest, ours = replay(trace, "longest-prefix"), replay(trace, "ours")

    assert longest.busiest > 1.5 * ours.busiest and longest.growth > 2
    assert longest.mean_s > 10 * ours.mean_s and longest.p99_s > 5 * ours.p99_s


@pytest.mark.slow
def test_the_least_estimate_beats_load_alone_and_order_alone(trace: Trace) -> None:
    """Ours finds more than those that do not look, and waits less than those that do not look at queues."""
    ours, load = replay(trace, "ours"), replay(trace, "least-load")
    others = [replay(trace, name) for name in ("random", "round-robin")]

    assert ours.mean_s < 0.8 * load.mean_s and ours.hit_rate > 1.5 * load.hit_rate
    assert all(load.mean_s < other.mean_s for other in others)
    assert 0.5 < load.utilisation < 1.0


@pytest.mark.slow
def test_copies_of_hot_prefixes_shorten_the_wait(trace: Trace) -> None:
    """What a busy replica has is copied rather than computed again."""
    ours, copies = replay(trace, "ours"), replay(trace, "ours+copies")

    assert ours.copied == 0 < copies.copied < copies.hit_rate
    assert copies.mean_s < ours.mean_s and copies.hit_rate > ours.hit_rate


@pytest.mark.slow
def test_turns_that_wait_for_their_answers_load_a_slow_fleet_less(trace: Trace) -> None:
    """Above what the fleet can do, recorded times pile up; conversations slow down with the answers."""
    recorded, closed = (replay(trace, "round-robin", load=2.0, closed=closed) for closed in (False, True))

    assert closed.mean_s < recorded.mean_s


@pytest.mark.slow
def test_the_same_replay_comes_out_the_same(trace: Trace) -> None:
    """All chance is seeded."""
    assert replay(trace, "random") == replay(trace, "random")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the command; returns its exit code and its last line."""
    code = main(arguments)
    figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return code, figures


@pytest.fixture
def known(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """The small trace as one with published rates; a test may change them."""
    rates = {"1M": plain_lru(trace, 1_000_000 // BLOCK_TOKENS), "unlimited": plain_lru(trace, 0)}
    key = (len(trace.arrivals), trace.input_tokens)
    monkeypatch.setitem(facts._KNOWN, key, facts.Facts("small", rates, over_least_load=1.1))
    yield rates


@pytest.mark.slow
def test_the_command_checks_what_is_known_of_a_trace(
    trace: Trace, known: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Targets met: exit code 0; a published rate that is not found: 1, and the line says which."""
    code, figures = run(capsys, str(trace.path), "--parts", "hits")
    assert code == 0 and figures["met"] and len(figures["targets"]) == 2

    known["1M"] += 0.05
    code, figures = run(capsys, str(trace.path), "--parts", "hits")

    assert code == 1 and not figures["met"]
    assert [target["name"][:9] for target in figures["targets"] if not target["met"]] == ["LRU at 1M"]


@pytest.mark.slow
def test_a_load_that_proves_nothing_misses_its_target(
    trace: Trace, known: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where least-load has nothing to do, or drowns, the ratio is no evidence."""
    for load in ("0.3", "2.0"):
        code, figures = run(capsys, str(trace.path), "--parts", "placements", "--replicas", "8", "--load", load)
        missed = [target["name"] for target in figures["targets"] if not target["met"]]
        assert code == 1 and "8 replicas: utilisation under least-load" in missed


@pytest.mark.slow
def test_all_parts_run_on_a_part_of_a_trace(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run has all figures and no targets."""
    code, figures = run(capsys, str(trace.path), "--quick", "--replicas", "2")

    assert code == 0 and figures["quick"] and figures["targets"] == [] and figures["requests"] == 40
    assert set(figures["hits"]) == set(POLICIES) == set(figures["evictions"]["2"])
    assert figures["placements"]["2"]["longest-prefix"]["mean_s"] > 0
    assert figures["lighter"]["2"]["least_load_over_ours"] > 0 and figures["turns"]["2"]["ours"]["mean_s"] > 0


def test_without_hashes_placements_by_load_alone_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Azure's traces have no hashes: no hit rates, no longest prefix."""
    path = tmp_path / "azure.csv"
    rows = "".join(f"2023-11-16 18:17:{n:02}.5000000,{1000 + n},10\n" for n in range(60))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)

    code, figures = run(capsys, str(path), "--replicas", "2")

    assert code == 0 and figures["hits"] is None and figures["evictions"] is None
    assert {"random", "round-robin", "least-load", "ours"} < set(figures["placements"]["2"])
    assert "longest-prefix" not in figures["placements"]["2"] and figures["offered_load"] == 0.8


def test_no_trace_no_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is none ends with code 2 and its reason; so do unknown parts and senseless sizes."""
    assert main([str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    for arguments in (["--parts", "hits,misses"], ["--replicas", "0"], ["--load", "-1"]):
        with pytest.raises(SystemExit) as stopped:
            main([str(tmp_path / "none"), *arguments])
        assert stopped.value.code == 2


@pytest.mark.slow
def test_copies_ahead_of_demand_help_those_who_ask_for_a_hot_prefix() -> None:
    """Little, for a fleet soon has what many ask for; the others do not pay for it, and without crowds none is made."""
    asked, hot = crowds(1)
    fleet = Fleet(8, 3_000_000, "lru", COSTS)
    load = Load(asked, 1.0 / offered(Load(asked), fleet))
    plain, ahead = (Replay(name, fleet, load) for name in ("ours", "ours+ahead"))
    before, after = plain.run(), ahead.run()

    assert before.ahead == 0.0 < after.ahead
    assert ahead.mean_s(hot) < plain.mean_s(hot) and after.mean_s < before.mean_s


def test_a_copy_ahead_of_demand_is_refused_over_its_cap() -> None:
    """And one replica alone has nobody to copy from."""
    ahead = Ahead(["a", "b"], LoadCost(1.0, 8_000.0))  # a minute's share is 24,000 tokens
    busy, idle = View("a", 9.0, 64 * BLOCK_TOKENS), View("b", 0.0)
    hashes = [bytes([n]) for n in range(64)]

    assert [ahead.placed(hashes, [busy], COSTS, 0.0) for _ in range(9)] == [None] * 9 and ahead.refused == 0
    assert ahead.placed(hashes, [busy, idle], COSTS, 0.0) is None and ahead.refused == 1
    fast = Ahead(["a", "b"], COSTS.copy or LoadCost(1.0, 1.0))
    found = [fast.placed(hashes, [busy, idle], COSTS, 0.0) for _ in range(7)]
    assert found[:5] == [None] * 5 and found[6] is None  # not hot yet; told already
    assert found[5] is not None and (found[5].to, found[5].blocks) == ("b", 64)
