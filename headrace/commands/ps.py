"""`headrace ps`: the actors that speak on the bus right now."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace import bus_access
from runtime.bus import BusMessage
from runtime.clock import SystemClock
from schemas import codec, subjects
from schemas.messages import Heartbeat
from schemas.settings import Settings

LISTEN_S = 0.6  # two heartbeats and some
STATE_COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow", "failed": "red"}


async def gather(settings: Settings, listen_s: float = LISTEN_S) -> list[Heartbeat]:
    """Return the latest heartbeat of every actor heard in `listen_s`, sorted by kind and id.

    Raises:
        BusUnavailable: if the bus does not answer.
    """
    clock = SystemClock()
    latest: dict[subjects.Ref, Heartbeat] = {}

    def heard(message: BusMessage) -> None:
        try:
            beat, _ = codec.decode(message.payload)
        except codec.DecodeError:
            return
        if isinstance(beat, Heartbeat):
            latest[beat.ref] = beat

    bus = await bus_access.connect(settings, clock=clock, name="headrace-ps", wait_s=3.0)
    try:
        await bus.subscribe(subjects.HEARTBEATS, heard)
        await clock.sleep(listen_s)
    finally:
        await bus.close()
    return [latest[ref] for ref in sorted(latest)]


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
        "running": beat.load.get("running", 0),
        "waiting": beat.load.get("waiting", 0),
        "load": beat.load,
    }


def show(settings: Settings, *, as_json: bool) -> None:
    """Print one row per actor."""
    rows = [row(beat) for beat in asyncio.run(gather(settings))]
    if as_json:
        print(json.dumps(rows))
        return
    columns = ("kind", "id", "pid", "epoch", "state", "running", "waiting", "load")
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for entry in rows:
        state = entry["state"] + (f" ({entry['reason']})" if entry["reason"] else "")
        colour = STATE_COLOURS.get(entry["state"], "white")
        table.add_row(
            entry["kind"],
            entry["id"],
            str(entry["pid"]),
            entry["epoch"][:8],
            f"[{colour}]{state}[/{colour}]",
            str(entry["running"]),
            str(entry["waiting"]),
            brief_load(entry["load"]),
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
