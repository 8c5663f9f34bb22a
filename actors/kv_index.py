"""A node's copy of what stores hold: hints, so that nobody is asked in vain.

An engine follows the stores of its host, a store those of the other hosts; whoever places prompts follows all of them
and the engines' pools.

Joining a tier is: listen to its events, ask for a dump, apply the events that are newer. A missing number, shown by the
next event or by a heartbeat, is healed by asking for a dump again; until then the tier is not `complete`, and whoever
wants to know must ask its owner. What an owner stored is forgotten when it is gone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.changes import Change, unpack
from kvstore.index import BlockIndex, Event
from kvstore.runs import StoredRuns
from runtime.actor import Context
from runtime.bus import BusMessage
from schemas import messages as m
from schemas.codec import DecodeError, decode
from schemas.subjects import KV_EVENTS, Ref, kv_events

_log = logging.getLogger("headrace.kv")

ASK_AGAIN_S = 0.5
BEHIND_S = 0.5  # a heartbeat overtakes events by less
EXPECTED_S = 2.0
MAX_EXPECTED = 4096
MAX_TIERS = 64
FOLLOWED = ("kv", "prefill", "decode", "both")


@dataclass(slots=True)
class _Tier:
    owner: Ref
    kind: str
    ticket: str = ""  # of the dump that is under way
    ask_at: float = 0.0
    runs: StoredRuns | None = None
    have: int = 0  # places of the dump so far
    number: int = -1  # that the dump shows
    behind: tuple[int, float] | None = None  # a number that a heartbeat told, and until when it may be on its way


class KvIndex:
    """Follows every tier of every store on this host, or with `others` of every store on all other hosts.

    With `everywhere` it follows those of all stores and engines.

    Bounded: `capacity` blocks per tier, beyond which the oldest chains lose their tails (missed hints); `max_tiers`
    tiers, beyond which a tier is not followed (its owner is asked as if there were no index).
    """

    def __init__(
        self,
        context: Context,
        *,
        capacity: int = 1_000_000,
        max_tiers: int = MAX_TIERS,
        others: bool = False,
        everywhere: bool = False,
    ) -> None:
        self._context, self._others, self._everywhere = context, others, everywhere
        self._max_tiers = max_tiers
        self._heard: dict[str, bool] = {}  # hosts: whether their events are listened to already
        self._index = BlockIndex(capacity)
        self._tiers: dict[str, _Tier] = {}
        self._expected: OrderedDict[tuple[Ref, bytes], float] = OrderedDict()
        self._asked = self._malformed = 0

    async def start(self) -> None:
        """Listen to events; dumps are asked for at the ticks that follow."""
        if self._everywhere:
            await self._context.subscribe(KV_EVENTS, self._on_events)
        elif not self._others:
            await self._listen(self._context.host)

    async def _listen(self, host: str) -> None:
        await self._context.subscribe(kv_events(host), self._on_events)
        self._heard[host] = True

    # --- questions ------------------------------------------------------------------------------

    def complete(self, store: Ref) -> bool:
        """Whether all tiers of this store are known, up to events on their way."""
        kinds = self._announced(store)
        return kinds is not None and all(self._index.ready(_name(store, kind)) for kind in kinds)

    def stores(self) -> list[Ref]:
        """Return the stores that are followed, complete or not."""
        return list(dict.fromkeys(tier.owner for tier in self._tiers.values()))

    def __len__(self) -> int:
        """How many hints there are."""
        return int(self._index.statistics()["hashes"])

    def prefix(self, store: Ref, hashes: Sequence[bytes]) -> int:
        """Return how many of the first hashes this store has, in any of its tiers, or is about to have."""
        names = [name for name, tier in self._tiers.items() if tier.owner == store]
        length, known = 0, -1
        while known != length < len(hashes):
            known = length
            length += self._index.joint_prefix(names, hashes[length:])
            while length < len(hashes) and (store, hashes[length]) in self._expected:
                length += 1
        return length

    def stored(self, owners: Sequence[Ref], kinds: Sequence[str], hashes: Sequence[bytes]) -> int:
        """Return how many of the first hashes these owners have between them, in tiers of these kinds."""
        return self._index.joint_prefix([_name(owner, kind) for owner in owners for kind in kinds], hashes)

    def known(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the first hashes somebody has, be it one block here and the next one there."""
        return self._index.joint_prefix(list(self._tiers), hashes)

    def expect(self, store: Ref, hashes: Sequence[bytes]) -> None:
        """These blocks were given to the store: count on them until its event comes, for `EXPECTED_S` at most."""
        until = self._context.clock.now() + EXPECTED_S
        for digest in hashes:
            self._expected[store, digest] = until
            self._expected.move_to_end((store, digest))
        while len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        return {
            **self._index.statistics(),
            "expected": len(self._expected),
            "dumps_asked_total": self._asked,
            "malformed_total": self._malformed,
        }

    # --- following ------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Follow whoever is there, ask again where an answer is missing, forget whoever is gone."""
        membership = self._context.membership
        for member in self._followed():
            for kind, number in (self._announced(member.ref) or {}).items():
                self._watch(member.ref, kind, number, now)
        for owner in {tier.owner for tier in self._tiers.values()}:
            if not membership.is_up(owner):
                self.member_down(owner)
        while self._expected and next(iter(self._expected.values())) <= now:
            self._expected.popitem(last=False)

    def _followed(self) -> list[Any]:
        """Return the members whose events are listened to; other hosts' subjects are subscribed to as they appear."""
        membership, states = self._context.membership, ("ready", "draining")
        if self._everywhere:
            return [member for kind in FOLLOWED for member in membership.members(kind, states=states)]
        out = []
        for member in membership.members("kv", states=states):
            if (member.host == self._context.host) == self._others:
                continue
            if member.host not in self._heard and len(self._heard) < MAX_TIERS:
                self._heard[member.host] = False
                # What comes before the subscription is in the dump, which is asked for afterwards.
                self._context.spawn(self._listen(member.host), name=f"follow the store of {member.host}")
            if self._heard.get(member.host):
                out.append(member)
        return out

    def member_down(self, ref: Ref) -> None:
        """A store is gone, or so silent that it may be; if it speaks again it is followed anew."""
        for name in [name for name, tier in self._tiers.items() if tier.owner == ref]:
            del self._tiers[name]
            self._index.drop_source(name)

    def on_dump(self, msg: m.KvDump, sender: Ref | None) -> None:
        """Take a page of a dump, and ask for the next one."""
        tier = next((t for t in self._tiers.values() if t.ticket and t.ticket == msg.ticket), None)
        if tier is None or sender != tier.owner:
            return
        if msg.start == 0 and msg.number != tier.number:
            tier.runs, tier.have, tier.number = StoredRuns(self._index.capacity), 0, msg.number
        if tier.runs is None or msg.number != tier.number or msg.start != tier.have:
            return  # a page that was repeated
        changes = self._unpacked(msg.ops, msg.hashes, msg.parents)
        if changes is None or (not changes and tier.have < msg.total):
            return
        for _, digest, parent in changes:
            tier.runs.add(digest, parent)
        tier.have += len(changes)
        now = self._context.clock.now()
        if tier.have < msg.total:
            self._ask(tier, now)
            return
        runs, tier.runs, tier.ticket = tier.runs, None, ""
        if not self._index.install(_name(tier.owner, tier.kind), msg.number, runs, tier=tier.kind):
            tier.ask_at = now + ASK_AGAIN_S

    def _on_events(self, message: BusMessage) -> None:
        try:
            events, sender = decode(message.payload)
        except DecodeError as exc:
            self._reject(exc)
            return
        if not isinstance(events, m.KvEvents) or sender is None:
            return
        name = _name(sender, events.tier)
        if name not in self._tiers:
            return  # the dump will tell that is not asked for yet
        changes = self._unpacked(events.ops, events.hashes, events.parents)
        if changes is None:
            return  # a gap will show
        if events.first > (self._index.number(name) or 0) + 1:
            self._index.lose(name)  # also where there is no change: a tier has come that already holds something
        for number, (op, digest, parent) in enumerate(changes, events.first):
            self._index.apply(Event(name, number, op, digest, parent))
        tier, now = self._tiers[name], self._context.clock.now()
        if not self._index.ready(name) and not tier.ticket and now >= tier.ask_at:
            self._ask(tier, now)

    def _watch(self, owner: Ref, kind: str, number: int, now: float) -> None:
        name = _name(owner, kind)
        if name not in self._tiers and len(self._tiers) >= self._max_tiers:
            return
        tier = self._tiers.setdefault(name, _Tier(owner, kind))
        known = self._index.number(name)
        if known is not None:
            if tier.behind is None or known >= tier.behind[0]:
                tier.behind = (number, now + BEHIND_S) if known < number else None
            elif now >= tier.behind[1]:
                tier.behind = None
                self._index.lose(name)
                known = None
        if known is None and now >= tier.ask_at:
            self._ask(tier, now)

    def _ask(self, tier: _Tier, now: float) -> None:
        ref = self._context.ref
        if not tier.ticket:
            self._asked += 1
            tier.ticket = f"{ref.id}.{ref.epoch}.dump.{self._asked}"
            tier.runs, tier.have, tier.number = None, 0, -1
        tier.ask_at = now + ASK_AGAIN_S
        query = m.KvDumpQuery(ticket=tier.ticket, tier=tier.kind, start=tier.have, reply=ref)
        self._context.send(tier.owner, query)

    def _announced(self, store: Ref) -> dict[str, int] | None:
        """The store's tiers and the numbers of their last changes, as its heartbeat says; nothing if it says none."""
        member = self._context.membership.get(store)
        said: Any = None if member is None or not member.up else member.load.get("tiers")
        if not isinstance(said, dict) or not all(isinstance(n, int) for n in said.values()):
            return None
        return said

    def _unpacked(self, ops: bytes, hashes: bytes, parents: bytes) -> list[Change] | None:
        try:
            return unpack(ops, hashes, parents)
        except ValueError as exc:
            self._reject(exc)
            return None

    def _reject(self, error: Exception) -> None:
        self._malformed += 1
        if self._malformed == 1:
            _log.warning("malformed events of a store: %s", error)


def _name(store: Ref, kind: str) -> str:
    return f"{store.epoch}/{kind}"
