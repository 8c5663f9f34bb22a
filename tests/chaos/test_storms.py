"""Storms in virtual time: decided by a seed, judged by what clients saw, repeated exactly, made small."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chaos.virtual.storm
from chaos import commands
from chaos.virtual.minimise import minimise
from chaos.virtual.plan import LAYOUTS, OWNERS, OWNERS_APART_S, Blow, from_json, make_plan
from chaos.virtual.storm import run_storm
from engine.scripted_runner import Rules, ScriptedRunner


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Engines and executors run on the loop by design; real time does not pass."""
    yield


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_a_plan_is_its_seeds_and_survives_its_file(seed: int) -> None:
    """The same seed decides the same storm, and a plan read back from JSON is the one that was written."""
    plan = make_plan(seed, 1.0)

    assert plan == make_plan(seed, 1.0)
    assert from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert all(0.0 <= b.at <= 61.0 for b in plan.blows)
    assert [b.at for b in plan.blows] == sorted(b.at for b in plan.blows)


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_an_edge_is_never_struck_and_owners_of_native_requests_one_at_a_time(seed: int) -> None:
    """What nobody promises to survive does not happen: that all who hold a native client's request die at once."""
    plan = make_plan(seed, 3.0)
    hurt = [b for b in plan.blows if b.kind in ("kill", "freeze", "offline")]
    owners = [b for b in hurt if b.victim.partition("-")[0] in OWNERS]

    assert "edge" not in {name.partition("-")[0] for b in plan.blows for name in (b.victim, b.other)}
    if any(a.client == "native" for a in plan.arrivals):
        for first, second in itertools.pairwise(owners):
            assert first.victim == second.victim or second.at >= first.at + first.for_s + OWNERS_APART_S


def test_all_kinds_of_faults_layouts_and_clients_occur() -> None:
    """Over a few seeds nothing is left out."""
    plans = [make_plan(seed, 3.0) for seed in range(6)]

    assert {b.victim.partition("-")[0] for p in plans for b in p.blows} >= {"admission", "light", "decode"}
    assert {b.kind for p in plans for b in p.blows} == {"kill", "freeze", "cut", "offline", "bus", "delay", "loss"}
    assert {tuple(p.layout) for p in plans} == {tuple(layout) for layout in LAYOUTS}
    arrivals = [a for p in plans for a in p.arrivals]
    assert {a.client for a in arrivals} == {"native", "edge"}
    assert any(_ownerless(p.blows) for p in plans if all(a.client == "edge" for a in p.arrivals))
    for wanted in ("stop_at", "may_expire", "leaves_s", "silent", "pause_s", "seed"):
        assert any(getattr(a, wanted) for a in arrivals), wanted


def _ownerless(blows: tuple[Blow, ...]) -> bool:
    """Whether at some moment both owners of requests are dead."""
    dead = [b for b in blows if b.kind == "kill" and b.victim.partition("-")[0] in OWNERS]
    return any(
        a.victim != b.victim and a.at < b.at + b.for_s and b.at < a.at + a.for_s
        for a, b in itertools.combinations(dead, 2)
    )


@given(st.lists(st.integers(0, 99), min_size=1, max_size=40, unique=True), st.data())
def test_a_failing_storm_is_made_small(parts: list[int], data: st.DataObject) -> None:
    """What is left still fails, in its old order, and nothing of it could be left out."""
    culprits = set(data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=3, unique=True)))

    left = minimise(parts, lambda some: culprits <= set(some), most_runs=2000)

    assert set(left) == culprits
    assert list(left) == [p for p in parts if p in culprits]


def test_minimising_keeps_to_its_number_of_runs() -> None:
    """A storm takes a while; whoever waits says how often."""
    runs = []

    minimise(range(64), lambda some: bool(runs.append(some)) or {7, 50} <= set(some), most_runs=9)

    assert len(runs) == 9


@pytest.mark.slow
def test_a_storm_repeats_exactly_and_its_file_alone_convicts_or_clears(tmp_path: Path) -> None:
    """Event for event, times included; `check` on the file finds what the run found."""
    plan = make_plan(3, 0.2)

    verdict, first = run_storm(plan, tmp_path / "first.jsonl")
    _, second = run_storm(plan, tmp_path / "second.jsonl")

    assert [e.line() for e in first] == [e.line() for e in second]
    assert [str(v) for v in verdict.violations] + verdict.errors == []
    assert sum(bool(e.data["effective"]) for e in verdict.faults) >= 2
    result = commands.check(tmp_path / "first.jsonl")
    assert result["ok"] and result["texts_compared"] == verdict.compared >= 5


@pytest.mark.slow
def test_a_survivor_that_says_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: engines that were started after a kill follow another script."""
    made = []

    def runner(_script: Rules) -> ScriptedRunner:
        made.append(1)
        return ScriptedRunner(Rules({} if len(made) <= 3 else {"default_range": [97, 122]}))

    monkeypatch.setattr(chaos.virtual.storm, "ScriptedRunner", runner)
    plan = make_plan(2, 0.3)
    blows = tuple(Blow(2.0 + at, "kill", f"decode-{at % 3}", for_s=0.1) for at in range(12))

    verdict, _ = run_storm(plan.with_blows(blows), tmp_path / "bad.jsonl")

    assert verdict.violations or verdict.errors
    assert not commands.check(tmp_path / "bad.jsonl")["ok"]


@pytest.mark.slow
def test_storms_of_some_seeds_break_no_promise(tmp_path: Path) -> None:
    """Seeds of every layout, several at once, as the command runs them."""
    argv = (sys.executable, "-m", "chaos", "storm", "--seeds", "6", "--minutes", "0.4", "--jobs", "2")
    done = subprocess.run([*argv, "--history", str(tmp_path)], capture_output=True, text=True, timeout=110)

    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["faults_effective"] >= 20 and result["texts_compared"] >= 80
    assert not list(tmp_path.iterdir())
