"""How a store tells others what it has: numbered changes on `kv.events.<host>`, and a dump for whoever joins."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from kvstore.changes import Change, pack
from kvstore.index import Dump, Event, EventLog, Op
from runtime.actor import Context
from schemas import messages as m
from schemas.codec import encode
from schemas.errors import TooLarge
from schemas.subjects import kv_events

CHANGES_PER_MESSAGE = 256  # a millisecond of the follower's loop
CHANGES_PER_TURN = 2048  # beyond it the next tick goes on: what is not told yet is only not found yet
BLOCKS_PER_PAGE = 1024  # of a dump: they are cheaper than changes
MAX_DUMPS = 8
DUMP_KEPT_S = 5.0


class Tier(Protocol):
    """What a tier shows to the announcer. Its numbers never go back while its actor lives."""

    @property
    def events(self) -> EventLog:
        """Its numbered changes."""
        ...

    def dump(self) -> Dump:
        """Return everything that it stores, in an order that keeps chains together."""
        ...


@dataclass(slots=True)
class _Snapshot:
    dump: Dump
    until: float


class Announcer:
    """The events and dumps of one store's tiers. A dump that is asked for no longer is kept for some seconds.

    Beyond `MAX_DUMPS` of them the oldest goes: its asker gets a new one from the start.
    """

    def __init__(self, context: Context, *tiers: str, subject: str = "") -> None:
        """Speak for tiers of these kinds, all empty until they are attached, on the host's subject or another."""
        self._context = context
        self._tiers: dict[str, Tier | None] = dict.fromkeys(tiers)
        self._dumps: OrderedDict[str, _Snapshot] = OrderedDict()
        self._fits = BLOCKS_PER_PAGE  # as many changes as the bus has carried in a message so far
        self._subject = subject or kv_events(context.host)
        self._counts = {"events": 0, "messages": 0, "dumps": 0}

    def attach(self, kind: str, tier: Tier) -> None:
        """A tier of this kind exists now. What it already holds is for dumps: followers are told of the gap alone."""
        tier.events.collect()
        self._tiers[kind] = tier
        self._send_changes(kind, tier.events.number + 1, [])

    def numbers(self) -> dict[str, int]:
        """Return the number of each tier's last change: it rides in heartbeats, so that the last loss shows too."""
        return {kind: tier.events.number if tier is not None else 0 for kind, tier in self._tiers.items()}

    def announce(self) -> None:
        """Tell what has changed since the last call."""
        left = CHANGES_PER_TURN
        for kind, tier in self._tiers.items():
            while tier is not None and len(tier.events) and left > 0:
                events = tier.events.collect(min(CHANGES_PER_MESSAGE, self._fits, left))
                left -= len(events)
                self._publish(kind, events)

    def _send_changes(self, kind: str, first: int, events: list[Event]) -> None:
        packed = pack((event.op, event.hash, event.parent) for event in events)
        message = m.KvEvents(tier=kind, first=first, ops=packed.ops, hashes=packed.hashes, parents=packed.parents)
        self._context.publish(self._subject, encode(message, self._context.ref))

    def _publish(self, kind: str, events: list[Event]) -> None:
        try:
            self._send_changes(kind, events[0].number, events)
        except TooLarge:
            if len(events) == 1:
                raise
            half = len(events) // 2
            self._fits = min(self._fits, half)
            self._publish(kind, events[:half])
            self._publish(kind, events[half:])
            return
        self._counts["events"] += len(events)
        self._counts["messages"] += 1

    def on_query(self, msg: m.KvDumpQuery) -> None:
        """Send a page of a dump; a ticket that is not known gets a new dump, from its start."""
        if msg.tier not in self._tiers:
            return
        now = self._context.clock.now()
        snapshot, start = self._dumps.get(msg.ticket), msg.start
        if snapshot is None or start > len(snapshot.dump.hashes):
            snapshot, start = _Snapshot(self._dump(msg.tier), now), 0
            self._counts["dumps"] += 1
            self._dumps[msg.ticket] = snapshot
            while len(self._dumps) > MAX_DUMPS:
                self._dumps.popitem(last=False)
        snapshot.until = now + DUMP_KEPT_S
        self._send_page(msg, snapshot.dump, start)

    def _dump(self, kind: str) -> Dump:
        tier = self._tiers[kind]
        return Dump("", 0, ()) if tier is None else tier.dump()

    def _send_page(self, msg: m.KvDumpQuery, dump: Dump, start: int) -> None:
        packed = pack(_page(dump, start, self._fits))
        page = m.KvDump(
            ticket=msg.ticket, tier=msg.tier, number=dump.number, start=start, total=len(dump.hashes),
            ops=packed.ops, hashes=packed.hashes, parents=packed.parents,
        )  # fmt: skip
        try:
            self._context.send(msg.reply, page)
        except TooLarge:
            if self._fits == 1:
                raise
            self._fits //= 2
            self._send_page(msg, dump, start)

    def tick(self, now: float) -> None:
        """Tell what is left over, and forget dumps that nobody asks for."""
        self.announce()
        for ticket in [ticket for ticket, snapshot in self._dumps.items() if snapshot.until <= now]:
            del self._dumps[ticket]

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        return {"dumps": len(self._dumps), **{f"announced_{name}_total": n for name, n in self._counts.items()}}


def _page(dump: Dump, start: int, count: int) -> list[Change]:
    stop = min(start + count, len(dump.hashes))
    parents = dump.parents[start:stop] if dump.parents else [b""] * (stop - start)
    return [(Op.ADD, digest, parent) for digest, parent in zip(dump.hashes[start:stop], parents, strict=True)]
