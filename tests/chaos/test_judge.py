"""A history that was written to a file is judged from it alone, part by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chaos import commands
from chaos.history import Recorder
from chaos.judge import figures
from chaos.run import interleaved
from chaos.scenarios import GROUPS, SCENARIOS, Act, Scenario
from chaos.workload import LOADS


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


def write(path: Path, *, said: str = "abc", end: bool = True, busy: bool = False) -> None:
    """Record two parts with a request each; the second says `said` and may never end."""
    now = Now()
    recorder = Recorder(now, path)
    recorder.add("", "run", made="processes", seed=3, name="kill-decode")
    recorder.add("", "reference", key="k", texts=["abc"], reasons=["length"])
    for part, text in enumerate(("abc", said)):
        name = f"part-{part}"
        recorder.add("", "segment", label=name)
        recorder.add(name, "sent", client="native", key="k", choices=1, deadline_s=5.0, indexed=True)
        recorder.add(name, "accepted", id=name)
        for index, character in enumerate(text):
            now.t += 0.1
            recorder.add(name, "item", choice=0, index=index, id=ord(character), text=character)
        recorder.add("", "fault", fault="kill", victim="decode/decode-0", pid=1, at=now.t, streams=[name],
                     effective=True, scenario="kill-decode", round=part, stall_s=0.2)  # fmt: skip
        if end or part == 0:
            recorder.add(name, "finish", choice=0, reason="length", total=len(text))
            recorder.add(name, "terminal", error=None, usage=None)
        now.t += 2.5
        recorder.add("", "load", actor="decode/1", running=int(busy), waiting=0, blocks_in_use=0, steps=1)
        recorder.add("", "baseline", engines=["decode/1"], caps={"running": 64})
        now.t += 100.0
        recorder.forget()
    recorder.close()


def test_a_clean_history_is_clean(tmp_path: Path) -> None:
    """Faults, texts and stalls are counted from the file."""
    write(tmp_path / "h.jsonl")

    result = commands.check(tmp_path / "h.jsonl")

    assert result["ok"]
    assert (result["faults_effective"], result["texts_compared"], result["kills_of_decode"]) == (2, 2, 2)
    assert result["longest_stall_ms"]["p50"] == 200.0
    assert result["scenarios"]["kill-decode"]["faults_effective"] == 2


@pytest.mark.parametrize(
    ("broken", "figure"),
    [({"said": "abd"}, "differing"), ({"end": False}, "failed"), ({"busy": True}, "violations")],
)
def test_a_broken_promise_in_any_part_is_found(tmp_path: Path, broken: dict[str, Any], figure: str) -> None:
    """Another text, a request without an end, an engine that goes on working."""
    write(tmp_path / "h.jsonl", **broken)

    result = commands.check(tmp_path / "h.jsonl")

    assert not result["ok"]
    assert result[figure] >= 1


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    """Whoever wrote it may have been killed."""
    path = tmp_path / "h.jsonl"
    write(path)
    path.write_text(path.read_text() + '{"t": 1.0, "requ')

    assert commands.check(path)["ok"]


def test_a_history_says_how_it_was_made(tmp_path: Path) -> None:
    """Its first line is enough to make it again; a file that does not say so is refused."""
    write(tmp_path / "h.jsonl")
    assert commands.how_made(tmp_path / "h.jsonl")["seed"] == 3
    (tmp_path / "other.jsonl").write_text(json.dumps({"t": 0, "request": "", "kind": "segment"}) + "\n")

    with pytest.raises(RuntimeError, match="how it was made"):
        commands.how_made(tmp_path / "other.jsonl")


def test_scenarios_name_only_what_exists() -> None:
    """Faults, requests and kinds; and there are enough of them."""
    from chaos.faults import FAULTS

    assert len(GROUPS["full"]) >= 30
    for scenario in SCENARIOS.values():
        assert scenario.loads in LOADS
        assert {act.fault for act in scenario.acts} <= set(FAULTS)
        assert scenario.acts


def test_a_scenario_that_needs_a_proxy_runs_only_with_one() -> None:
    """And one for scripted engines not with a real model."""
    cut = Scenario("cut", (Act("decode", "kill"),), engine="scripted", needs=frozenset({"proxy"}))

    assert not commands.fits(cut, "scripted")
    assert commands.fits(cut, "scripted:/x.json", proxy=True)
    assert not commands.fits(cut, "auto", proxy=True)


def test_turns_are_the_seeds_and_complete() -> None:
    """Every scenario once per round, in another order with another seed."""
    scenarios = list(SCENARIOS.values())

    plan = interleaved(scenarios, 3, 1)

    assert plan == interleaved(scenarios, 3, 1) != interleaved(scenarios, 3, 2)
    assert sorted((s.name, r) for s, r in plan) == sorted((s.name, r) for s in scenarios for r in range(3))


def test_no_stall_is_told_where_no_fault_counted() -> None:
    """A figure that nobody measured is absent."""
    from chaos.judge import Verdict

    assert figures(Verdict())["longest_stall_ms"]["p50"] is None


@pytest.mark.slow
def test_the_headrace_command_is_the_chaos_command(tmp_path: Path) -> None:
    """The command line starts it without importing it."""
    import subprocess
    import sys

    program = "from headrace.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "chaos", "list"], capture_output=True, text=True, check=True)

    assert "kill-decode-then-survivor" in done.stdout
