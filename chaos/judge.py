"""Holds a history to the promises, from the history alone: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos import invariants
from chaos.history import Event
from chaos.invariants import Answer, Idle, Violation

CAPS = {"running": 64, "waiting": 1024}  # what an engine may hold, as it is set by default


@dataclass(slots=True)
class Verdict:
    """What was found in a history, or in a part of one."""

    faults: list[Event] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    requests: int = 0
    compared: int = 0
    failed: int = 0
    refused: int = 0  # before they were accepted, where clients allow for it
    errors: list[str] = field(default_factory=list)

    def __add__(self, other: Verdict) -> Verdict:
        """Take two parts together."""
        return Verdict(
            self.faults + other.faults, self.violations + other.violations, self.requests + other.requests,
            self.compared + other.compared, self.failed + other.failed, self.refused + other.refused,
            self.errors + other.errors,
        )  # fmt: skip


def references(events: Iterable[Event]) -> dict[str, Answer]:
    """Return what undisturbed runs said, by the key of their request."""
    return {
        str(e.data["key"]): Answer(tuple(e.data["texts"]), tuple(e.data["reasons"]))
        for e in events
        if e.kind == "reference"
    }


def judge(events: list[Event], known: Mapping[str, Answer]) -> Verdict:
    """Check one part of a history.

    An ending by the request's own deadline is no failure if the client set one that could pass: `may_expire`.

    Args:
        events: of this part; references in it are added to `known`.
        known: answers of undisturbed runs.
    """
    answers = {**known, **references(events)}
    baseline = next((e for e in events if e.kind == "baseline"), None)
    found = invariants.one_ending(events) + invariants.no_gap_no_repeat(events) + invariants.same_text(events, answers)
    if baseline is not None:
        idle = {name: Idle() for name in baseline.data["engines"]}
        found += invariants.work_stops(events, idle) + invariants.bounded(events, baseline.data["caps"])
    for rest in (e for e in events if e.kind == "rest"):
        found += [Violation("work_stops", "", f"after the storm: {what}") for what in rest.data["busy"]]
        found += [Violation("handlers", "", what) for what in rest.data["errors"]]
    ends = {e.request: e.data["error"] for e in reversed(events) if e.kind == "terminal"}
    sent = {e.request: e.data for e in events if e.kind == "sent"}
    left = {e.request for e in events if e.kind == "left"}
    accepted = {e.request for e in events if e.kind == "accepted"}
    refused = {r for r, how in sent.items() if how.get("may_be_refused") and r not in accepted and ends.get(r)}
    failed = [r for r, how in sent.items() if r not in left | refused and _failed(ends, r, bool(how.get("may_expire")))]
    return Verdict(
        [e for e in events if e.kind == "fault"], found, len(sent),
        sum(r in ends and ends[r] is None for r in sent), len(failed), len(refused),
        [f"{r}: {ends.get(r, 'never ended')}" for r in failed],
    )  # fmt: skip


def _failed(ends: Mapping[str, Any], request: str, may_expire: bool) -> bool:
    if request not in ends:
        return True
    error = ends[request]
    return error is not None and not (may_expire and error.get("code") == "deadline_exceeded")


def figures(verdict: Verdict) -> dict[str, Any]:
    """Return what a verdict comes to in numbers."""
    found = verdict.violations
    effective = [e for e in verdict.faults if e.data.get("effective")]
    stalls = sorted(float(e.data["stall_s"]) * 1000 for e in effective if e.data.get("stall_s"))
    return {
        "faults_performed": len(verdict.faults),
        "faults_effective": len(effective),
        "kills_of_decode": sum(e.data["fault"] == "kill" and e.data["victim"].startswith("decode") for e in effective),
        "requests": verdict.requests,
        "texts_compared": verdict.compared,
        "failed": verdict.failed,
        "refused": verdict.refused,
        "gaps": sum(v.invariant == "gap" or " gap:" in v.detail for v in found),
        "repeats": sum(v.invariant == "repeat" or " repeat:" in v.detail for v in found),
        "differing": sum(v.invariant == "same_text" for v in found),
        "violations": len(found),
        "longest_stall_ms": {
            "p50": round(stalls[(len(stalls) - 1) // 2], 1) if stalls else None,
            "p99": round(stalls[int((len(stalls) - 1) * 0.99)], 1) if stalls else None,
            "max": round(stalls[-1], 1) if stalls else None,
        },
    }


def by_scenario(verdict: Verdict) -> dict[str, dict[str, Any]]:
    """Return the faults of each scenario: performed, effective, stalls."""
    names = dict.fromkeys(str(e.data["scenario"]) for e in verdict.faults if "scenario" in e.data)
    out = {}
    for name in names:
        part = figures(Verdict([e for e in verdict.faults if e.data.get("scenario") == name]))
        out[name] = {k: part[k] for k in ("faults_performed", "faults_effective", "longest_stall_ms")}
    return out
