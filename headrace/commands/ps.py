"""`headrace ps`: the actors that speak on the bus right now, the processes that do not run, and why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace import bus_access
from runtime.bus import BusMessage
from runtime.clock import SystemClock
from schemas import codec, subjects
from schemas.messages import ChildReport, Heartbeat, SupervisorReport
from schemas.settings import Settings

LISTEN_S = 0.6  # two heartbeats and some
STATE_COLOURS = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "backoff": "yellow",
    "failed": "red",
    "crash_loop": "red",
}


async def gather(
    settings: Settings, listen_s: float = LISTEN_S
) -> tuple[list[Heartbeat], list[tuple[int, ChildReport]]]:
    """Listen for `listen_s`.

    Returns:
        The latest heartbeat of every actor, sorted by kind and id; and each supervisor's process id with each child of
        its own.

    Raises:
        BusUnavailable: if the bus does not answer.
    """
    clock = SystemClock()
    latest: dict[subjects.Ref, Heartbeat] = {}
    reports: dict[int, SupervisorReport] = {}

    def heard(message: BusMessage) -> None:
        try:
            beat, _ = codec.decode(message.payload)
        except codec.DecodeError:
            return
        if isinstance(beat, Heartbeat):
            latest[beat.ref] = beat
        elif isinstance(beat, SupervisorReport):
            reports[beat.pid] = beat

    bus = await bus_access.connect(settings, clock=clock, name="headrace-ps", wait_s=3.0)
    try:
        await bus.subscribe(subjects.HEARTBEATS, heard)
        await bus.subscribe(subjects.SUPERVISORS, heard)
        await clock.sleep(listen_s)
    finally:
        await bus.close()
    children = [(pid, child) for pid, report in sorted(reports.items()) for child in report.children]
    return [latest[ref] for ref in sorted(latest)], children


def row(beat: Heartbeat) -> dict[str, Any]:
    """Return the row that `ps` shows for an actor; all of its load snapshot is under `load`."""
    return {
        "kind": beat.ref.kind,
        "id": beat.ref.id,
        "node": beat.node,
        "host": beat.host,
        "pid": beat.pid,
        "epoch": beat.ref.epoch,
        "state": beat.state,
        "reason": beat.reason,
        "private": beat.private,
        "running": beat.load.get("running", 0),
        "waiting": beat.load.get("waiting", 0),
        "load": beat.load,
    }


def silent_row(child: ChildReport) -> dict[str, Any]:
    """Return the row of a process that does not run: it has no actors now."""
    empty: dict[str, Any] = {"kind": "", "id": "", "node": child.name, "host": "", "pid": child.pid, "epoch": ""}
    empty |= {"private": False, "running": 0, "waiting": 0, "load": {}}
    return {**empty, "state": child.state, "reason": why(child)}


def why(child: ChildReport) -> str:
    """Say how a child ended last and when it starts again, or nothing if it never ended."""
    parts = []
    if child.exit_code is not None:
        parts.append(f"last exit {child.exit_code}" + (f", {child.reason}" if child.reason else ""))
    elif child.reason:
        parts.append(child.reason)
    if child.restarts:
        parts.append(f"started again {child.restarts} times" if child.restarts > 1 else "started again once")
    if child.next_start_s is not None:
        parts.append(f"next start in {child.next_start_s:.1f} s")
    return "; ".join(parts)


def merge(beats: Iterable[Heartbeat], children: Iterable[tuple[int, ChildReport]]) -> list[dict[str, Any]]:
    """Return the rows of all actors, with what their supervisors know, and of processes that do not speak."""
    known = list(children)
    by_process = {(child.name, child.pid): child for _, child in known}
    rows = []
    spoken = set()
    for beat in beats:
        child = by_process.get((beat.node, beat.pid))
        spoken.add((beat.node, beat.pid))
        rows.append({**row(beat), "history": why(child) if child is not None else ""})
    # The bus server and other children without actors never speak; while they run there is nothing to say of them.
    for _, child in known:
        if (child.name, child.pid) not in spoken and child.state != "running":
            rows.append({**silent_row(child), "history": why(child)})
    return rows


def show(settings: Settings, *, as_json: bool) -> None:
    """Print one row per actor."""
    rows = merge(*asyncio.run(gather(settings)))
    if as_json:
        print(json.dumps(rows))
        return
    columns = ("kind", "id", "pid", "epoch", "state", "running", "waiting", "load", "history")
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for entry in rows:
        said = entry["reason"] if entry["kind"] else ""  # of a process that is gone the history says it
        said = said or ("for its node alone" if entry["private"] else "")
        state = entry["state"] + (f" ({said})" if said else "")
        colour = STATE_COLOURS.get(entry["state"], "white")
        table.add_row(
            entry["kind"] or "-",
            entry["id"] or entry["node"],
            str(entry["pid"] or "-"),
            entry["epoch"][:8],
            f"[{colour}]{state}[/{colour}]",
            str(entry["running"]),
            str(entry["waiting"]),
            brief_load(entry["load"]),
            entry["history"],
        )
    Console().print(table)


def brief_load(load: dict[str, Any]) -> str:
    """Return what a load snapshot says about memory and progress, in a few words; `--json` has all of it."""
    parts = []
    if load.get("total_blocks"):
        parts.append(f"{load.get('blocks_in_use', 0)}/{load['total_blocks']} blocks")
    for name in ("queued_tokens", "steps"):
        if load.get(name):
            parts.append(f"{load[name]} {name.replace('_', ' ')}")
    return ", ".join(parts)
