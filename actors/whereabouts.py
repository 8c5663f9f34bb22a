"""What is stored of a prompt, and where: the hints by which a request is placed.

An admission actor follows the stores and engine pools of all hosts (`actors.kv_index`). A prompt is hashed two blocks
at first, and further only as long as somebody has all that was hashed: a prompt that nobody has seen costs a few
microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from actors.engine_report import DEVICE
from actors.kv_index import KvIndex
from actors.placement import Stored
from actors.remote_cost import Way, worth
from actors.work import salt_of
from kvstore.block import BLOCK_TOKENS, chain_hashes, root_hash
from kvstore.homes import KEY_BLOCKS, fullest, home_key, ranked
from runtime.actor import Context
from schemas import messages as m
from schemas.record import Record
from schemas.subjects import Ref
from schemas.tenants import owner_of

FIRST_BLOCKS = 2  # engines ask no store for less
MOST_BLOCKS = 1024  # that are hashed of a prompt: a millisecond; what follows counts as not stored
BLOCKS_PER_TIER = 200_000  # hints of each store and pool; about 40 MB
MAX_TIERS = 256
FETCH_S = 0.5  # of what takes a store longer to fetch it fetches less
PREFETCH_BLOCKS = 512  # named in one message
MAX_ASKED = 64  # prompts that wait to be counted; the oldest is not counted


class Located(Protocol):
    """What is asked of a member."""

    @property
    def ref(self) -> Ref: ...
    @property
    def host(self) -> str: ...
    @property
    def load(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt's block hashes, at least as far as anybody has them, under what the engines of `key` begin them with."""

    key: tuple[Any, ...]
    root: bytes
    hashes: list[bytes]
    known: int  # how many of them somebody has
    owner: bytes  # whose prompt it is
    home: bytes = b""  # what decides in which store of a host it belongs

    def cut(self, blocks: int) -> Chain:
        """Return its first blocks."""
        return replace(self, hashes=self.hashes[:blocks], known=min(self.known, blocks))


class Whereabouts:
    """Follows all tiers, and answers for one prompt at a time."""

    def __init__(self, context: Context) -> None:
        """Follow nobody until `start`."""
        self._context = context
        self.index = KvIndex(context, capacity=BLOCKS_PER_TIER, max_tiers=MAX_TIERS, everywhere=True)
        self.asked: deque[Chain] = deque(maxlen=MAX_ASKED)  # of late, where there are several stores

    def find(self, record: Record, engines: Sequence[Located]) -> dict[Ref, Stored]:
        """Return for each engine what it need not compute of a request's prompt; engines that have nothing are absent.

        A request of several prompts counts as unknown: engines look for stored prefixes of single prompts only.
        """
        if len(record.prompt_ids) != 1 or len(record.prompt_ids[0]) <= FIRST_BLOCKS * BLOCK_TOKENS:
            return {}
        chains: dict[tuple[Any, ...], Chain | None] = {}
        begun: dict[tuple[Any, ...], dict[str, int]] = {}  # what a store of each host has of a chain
        stores = self.stores()
        least = KEY_BLOCKS if any(len(refs) > 1 for refs in stores.values()) else FIRST_BLOCKS
        found = {}
        for engine in engines:
            key = tuple(engine.load.get("root", ()))
            if key not in chains:
                chain = chains[key] = self._chain(key, record, least)
                if chain is not None and len(stores) > 1:
                    begun[key] = self._begun(stores, chain)
                    self.asked.append(chain)
            chain = chains[key]
            if chain is not None:
                stored = self._of(engine, stores, begun.get(key), chain)
                if stored.total or stored.far:
                    found[engine.ref] = stored
        return found

    def of_chain(self, chain: Chain, engines: Sequence[Located]) -> dict[Ref, Stored]:
        """Return what each engine that begins its hashes like this chain need not compute of it."""
        stores = self.stores()
        begun = self._begun(stores, chain)
        return {e.ref: self._of(e, stores, begun, chain) for e in engines if tuple(e.load.get("root", ())) == chain.key}

    def held(self, stores: Sequence[Ref], chain: Chain) -> int:
        """Return the most blocks of a chain that one of these stores has."""
        return max((self._held(store, chain.hashes) for store in stores), default=0)

    def _begun(self, stores: Mapping[str, Sequence[Ref]], chain: Chain) -> dict[str, int]:
        return {host: self.held(refs, chain) for host, refs in stores.items()}

    def _of(
        self, engine: Located, stores: Mapping[str, Sequence[Ref]], begun: Mapping[str, int] | None, chain: Chain
    ) -> Stored:
        resident = self.index.stored([engine.ref], [DEVICE], chain.hashes)
        stored = self._at(resident, self._store(stores.get(engine.host, ()), chain, resident), chain)
        return stored if begun is None else self._farther(engine, begun, stored)

    def disk_speeds(self, engines: Sequence[Located], stored: Mapping[Ref, Stored]) -> dict[Ref, float]:
        """Return the seconds that a token takes from the disk that has some of the prompt, for each engine."""
        out = {}
        for engine in engines:
            what = stored.get(engine.ref)
            if what is not None and what.total > what.memory:
                member = self._context.membership.get(what.store) if what.store is not None else None
                speed = float(member.load.get("disk_bytes_per_s", 0.0)) if member is not None else 0.0
                nbytes = float(engine.load.get("block_nbytes", 0)) / BLOCK_TOKENS
                out[engine.ref] = nbytes / speed if speed > 0.0 else 0.0
        return out

    def on_disk(self, record: Record, ref: Ref, stored: Stored | None) -> tuple[Ref, m.KvPrefetch] | None:
        """Return a hint for a store of an engine's host, if it has to go to its disk for this prompt."""
        engine = self._context.membership.get(ref)
        if stored is None or engine is None or stored.total <= stored.memory:
            return None
        store = stored.store
        chain = self._chain(tuple(engine.load.get("root", ())), record)
        if store is None or chain is None:
            return None
        first = stored.resident // BLOCK_TOKENS
        last = min(stored.total // BLOCK_TOKENS, first + PREFETCH_BLOCKS)
        parents = [chain.root, *chain.hashes]
        return store, m.KvPrefetch(hashes=chain.hashes[first:last], parents=parents[first:last])

    def _chain(self, key: tuple[Any, ...], record: Record, least: int = FIRST_BLOCKS) -> Chain | None:
        """Return the hashes of a prompt, at least as far as anybody has them; None if nobody has the first."""
        ids = record.prompt_ids[0]
        most = min(MOST_BLOCKS, (len(ids) - 1) // BLOCK_TOKENS)  # the last token is always computed
        if not key:
            return None
        root = root_hash(*key, salt_of(record))
        hashes: list[bytes] = []
        count = min(least, most)
        while True:
            start = len(hashes) * BLOCK_TOKENS
            begun = hashes[-1] if hashes else root
            hashes += chain_hashes(ids[start : count * BLOCK_TOKENS], root=root, start=begun)
            known = self.index.known(hashes)
            if known < len(hashes) or count >= most:
                home = home_key(hashes, len(ids))
                return Chain(key, root, hashes, known, owner_of(record.tenant), home) if known else None
            count = min(2 * count, most)

    def _held(self, store: Ref, hashes: Sequence[bytes]) -> int:
        return self.index.stored([store], ["host", "disk"], hashes)

    def _store(self, stores: Sequence[Ref], chain: Chain, resident: int) -> Ref | None:
        """Return the store that an engine would ask for what follows its own blocks."""
        if len(stores) < 2:
            return stores[0] if stores else None
        rest = chain.hashes[resident:]
        return fullest(ranked(stores, chain.home), lambda store: self._held(store, rest), FIRST_BLOCKS)

    def _at(self, resident: int, store: Ref | None, chain: Chain) -> Stored:
        """What an engine has itself, and what a store of its host goes on with, first in memory, then on disk too."""
        memory = total = resident
        rest = chain.hashes[resident:]
        if store is not None and rest:
            total += self._held(store, rest)
            memory += self.index.stored([store], ["host"], rest)
            if total - resident < FIRST_BLOCKS:
                memory = total = resident  # the engine will not ask
        return Stored(resident * BLOCK_TOKENS, memory * BLOCK_TOKENS, total * BLOCK_TOKENS, store=store)

    def _farther(self, engine: Located, begun: Mapping[str, int], stored: Stored) -> Stored:
        """Add what the store that an engine asks would fetch, from where that is soonest; its own disk goes first."""
        store = self._context.membership.get(stored.store) if stored.store is not None else None
        ways = store.load.get("ways") if store is not None else None
        if not isinstance(ways, dict) or stored.total > stored.memory:
            return stored
        held, nbytes = stored.total // BLOCK_TOKENS, int(engine.load.get("block_nbytes", 0))
        costs = engine.load.get("prefill_cost") or (0.0, 0.0)
        block_s = BLOCK_TOKENS * float(costs[1])
        best, least = stored, 0.0
        for host, told in ways.items():
            if host == engine.host or begun.get(host, 0) <= held or nbytes <= 0:
                continue
            way = Way(*map(float, told))
            count = worth(begun[host] - held, nbytes, way, block_s, FETCH_S)
            takes = way.seconds(count * nbytes)
            saved = count * block_s - takes
            if count and (best is stored or saved > least):
                far = stored.total + count * BLOCK_TOKENS
                best, least = replace(stored, far=far, far_s=takes), saved
        return best

    def stores(self) -> dict[str, list[Ref]]:
        """Return the stores that the engines of each host may ask."""
        out: dict[str, list[Ref]] = {}
        for member in self._context.membership.members("kv"):
            if not member.silent:
                out.setdefault(member.host, []).append(member.ref)
        return out
