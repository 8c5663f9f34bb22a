"""`headrace kv`: what the stores on the bus hold, for whom, and what it is good for."""

from __future__ import annotations

import asyncio
import datetime
import json
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace import bus_access
from runtime.bus import BusMessage
from runtime.clock import Clock, SystemClock
from runtime.nats_bus import NatsBus
from schemas import codec, subjects
from schemas.messages import Heartbeat, KvStatus, KvStatusQuery, Message
from schemas.settings import Settings

LISTEN_S = 0.6  # two heartbeats and some
ANSWER_S = 1.0
TOP = 10
ENGINES = ("prefill", "decode", "both")


@dataclass(slots=True)
class Seen:
    """The latest heartbeat of each actor, and what stores answered."""

    beats: dict[subjects.Ref, Heartbeat] = field(default_factory=dict)
    answers: dict[str, Message] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[Heartbeat]:
        """Return the actors of these kinds, sorted by kind and id."""
        return [self.beats[ref] for ref in sorted(self.beats) if ref.kind in kinds]


async def listen(bus: NatsBus, clock: Clock, listen_s: float = LISTEN_S) -> tuple[Seen, subjects.Ref]:
    """Hear who is there; returns that, and the address by which answers come and are collected."""
    seen, me = Seen(), subjects.Ref("tool", "kv", clock.random_hex(8))

    def heard(message: BusMessage) -> None:
        try:
            body, _ = codec.decode(message.payload)
        except codec.DecodeError:
            return
        if isinstance(body, Heartbeat):
            seen.beats[body.ref] = body
        elif (ticket := getattr(body, "ticket", None)) is not None:
            seen.answers[str(ticket)] = body

    await bus.subscribe(subjects.HEARTBEATS, heard)
    await bus.subscribe(me.subject, heard)
    await clock.sleep(listen_s)
    return seen, me


async def answered(seen: Seen, tickets: list[str], clock: Clock, limit_s: float) -> None:
    """Wait until all of these are answered, or the time is over."""
    end = clock.now() + limit_s
    while clock.now() < end and not all(ticket in seen.answers for ticket in tickets):
        await clock.sleep(0.01)


async def gather(settings: Settings, *, top: int = TOP) -> dict[str, Any]:
    """Return what `--json` prints.

    Raises:
        BusUnavailable: if the bus does not answer.
    """
    clock = SystemClock()
    bus = await bus_access.connect(settings, clock=clock, name="headrace-kv", wait_s=3.0)
    try:
        seen, me = await listen(bus, clock)
        stores = {f"{beat.ref.id}.{beat.ref.epoch}": beat for beat in seen.of("kv")}
        for ticket, beat in stores.items():
            bus.publish(beat.ref.subject, codec.encode(KvStatusQuery(ticket=ticket, reply=me, top=top)))
        await answered(seen, list(stores), clock, ANSWER_S)
    finally:
        await bus.close()
    return {
        "stores": [_store(beat, seen.answers.get(ticket)) for ticket, beat in stores.items()],
        "engines": [_engine(beat) for beat in seen.of(*ENGINES)],
    }


def _store(beat: Heartbeat, status: Message | None) -> dict[str, Any]:
    head = {"id": beat.ref.id, "epoch": beat.ref.epoch, "host": beat.host, "node": beat.node, "state": beat.state}
    if not isinstance(status, KvStatus):
        return {**head, "answered": False}
    rest = status.model_dump(exclude={"ticket", "host"})
    for row in rest["prefixes"]:
        row |= {"head": row["head"].hex(), "owner": row["owner"].hex()}
    for row in rest["tenants"]:
        row["owner"] = row["owner"].hex()
    for row in rest["pins"]:
        row |= {"head": row["head"].hex(), "owner": row["owner"].hex()}
    for row in rest["tiers"]:
        row["hit_rate"] = _rate(row["hits"], row["hits"] + row["misses"])
    return {**head, "answered": True, "hit_rate": _rate(status.found, status.lookups), **rest}


def _engine(beat: Heartbeat) -> dict[str, Any]:
    names = ("total_blocks", "blocks_in_use", "blocks_cached", "prompt_tokens", "cached_tokens")
    numbers = {name: int(beat.load.get(name, 0)) for name in names}
    rate = _rate(numbers["cached_tokens"], numbers["prompt_tokens"])
    return {"kind": beat.ref.kind, "id": beat.ref.id, "host": beat.host, **numbers, "hit_rate": rate}


def _rate(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def show(settings: Settings, *, as_json: bool, top: int = TOP) -> int:
    """Print it; returns 1 if no store speaks, or one of them does not answer."""
    found = asyncio.run(gather(settings, top=top))
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0 if found["stores"] and all(store["answered"] for store in found["stores"]) else 1


def _print(found: dict[str, Any]) -> None:
    console = wide_console()
    tiers = _table("tier", "of", "bytes", "capacity", "blocks", "hit rate", "hits", "evicted", "health")
    for e in found["engines"]:
        blocks = f"{e['blocks_in_use'] + e['blocks_cached']}/{e['total_blocks']}"
        tiers.add_row("device", f"{e['id']} on {e['host']}", "", "", blocks, _percent(e["hit_rate"]),
                      f"{e['cached_tokens']} tokens", "", "")  # fmt: skip
    for store in found["stores"]:
        name = f"{store['id']} on {store['host']}"
        if not store["answered"]:
            tiers.add_row("", name, "", "", "", "", "", "", "[red]no answer[/red]")
            continue
        for t in store["tiers"]:
            health = f"[red]{t['unhealthy']}[/red]" if t["unhealthy"] else "ok"
            if t["frozen"]:
                health += ", frozen"
            tiers.add_row(t["kind"], name, _bytes(t["nbytes"]), _bytes(t["max_nbytes"]), str(t["blocks"]),
                          _percent(t["hit_rate"]), f"{t['hits']} blocks", str(t["evicted"]), health)  # fmt: skip
    console.print(tiers)
    for store in found["stores"]:
        if not store["answered"]:
            continue
        console.print(f"\n{store['id']}: {store['lookups']} lookups, {store['found']} found something", highlight=False)
        if store["prefixes"]:
            prefixes = _table("prefix", "tokens", "hits", "last", "tenant")
            for p in store["prefixes"]:
                last = datetime.datetime.fromtimestamp(p["last"]).strftime("%Y-%m-%d %H:%M:%S")
                prefixes.add_row(p["head"][:16], str(p["tokens"]), str(p["hits"]), last, p["owner"])
            console.print(prefixes)
        if store["tenants"]:
            tenants = _table("tenant", "tier", "bytes", "limit")
            for t in store["tenants"]:
                tenants.add_row(t["owner"] or "others", t["tier"], _bytes(t["nbytes"]),
                                _bytes(t["limit"]) if t["limit"] else "none")  # fmt: skip
            console.print(tenants)
        if store["pins"]:
            console.print(f"pinned prefixes: {len(store['pins'])} (headrace kv pins)", highlight=False)


def wide_console() -> Console:
    """Return a console that cuts nothing off where no terminal says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, header_style="bold", pad_edge=False)


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1%}"


def _bytes(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
