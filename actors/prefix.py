"""Stored prefixes: before a prompt is computed its longest stored prefix is fetched; afterwards its blocks are stored.

The device tier is the engine's own pool; the host tier is the `kv` actor's, which is not asked for what the index of
its blocks (`actors.kv_index`) does not know. A host may have several of these: a prompt is stored in its home among
them (`kvstore.homes`) and read from whichever has most of it. Any failure, and any answer that takes too long, is a
miss: the prompt is computed. Nothing of this ever delays a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from actors.kv_index import KvIndex
from actors.load_choice import Loading, Offer, may_pay_far, plan_load
from actors.remote_cost import Way
from actors.ttft import Costs, LoadCost
from actors.work import Work, salt_of
from actors.write_pace import WritePace
from engine.core import Candidate, EngineCore
from engine.sequence import Key, Sequence
from kvstore.block import BLOCK_TOKENS, sequence_hashes
from kvstore.homes import fullest, home_key, ranked
from schemas import messages as m
from schemas.record import Fence
from schemas.subjects import Ref
from schemas.tenants import owner_of

if TYPE_CHECKING:
    from actors.engine_host import EngineActor

LOOKUP_LIMIT_S = 0.06
LOADING_LIMIT_S = 2.0  # for a store that says that it reads from its disk
COPY_LIMIT_S = 1.0
PROBE_LIMIT_S = 0.1  # of a copy that is made against the estimate
PROBE_BLOCKS = 64  # that a disk reads to have its speed measured
MIN_BLOCKS = 2  # shorter prefixes are computed faster than they are asked for
HASHED_HERE = 8192  # tokens: half a millisecond on the loop; the way to the engine's thread and back takes longer
WRITE_BATCH = 64
WRITE_ANSWER_S = 1.0
JOB_RESEND_S = 1.0
NOBODY = Fence(0, "", 0)
NO_STORE = Ref("kv", "none", "0")  # never heard of


@dataclass(slots=True)
class _Load:
    work: Work
    sequences: list[Sequence]
    hashes: list[bytes]
    parents: list[bytes]
    until: float
    kv: Ref
    expected: list[int] = field(default_factory=list)  # checksums
    blocks: list[int] = field(default_factory=list)
    copying: bool = False
    began: float = 0.0
    slow: bool = False  # the store went to its disk
    resident: int = 0  # blocks before `hashes`, which the engine's pool has
    probe: bool = False  # it may well be later than computing: nobody waits for it for long
    chosen: int = 0  # blocks that were found worth loading before the store was asked; 0: nobody knew of any

    @property
    def key(self) -> Key:
        return self.sequences[0].key

    @property
    def tokens(self) -> int:
        return self.sequences[0].num_tokens


class _Missing(NamedTuple):
    """What of a prompt the engine's pool lacks, and what decides the prompt's home."""

    hashes: list[bytes]
    parents: list[bytes]
    key: bytes


class _Part(NamedTuple):
    """Blocks to be stored in one store."""

    kv: Ref
    candidates: list[Candidate]
    refs: list[m.BlockRef]


@dataclass(slots=True)
class _Write:
    candidates: list[Candidate]
    refs: list[m.BlockRef]
    kv: Ref
    until: float  # for the tier's answer; then for the next repeat of the job
    transfer: Ref | None = None
    job: m.TransferJob | None = None


class PrefixStore:
    """Loads and write-backs of one engine."""

    def __init__(self, engine: EngineActor) -> None:
        self._engine = engine
        self._loads: dict[str, _Load] = {}
        self._write: tuple[str, _Write] | None = None
        self._collecting = False
        self._pace = WritePace()
        self._parts: deque[_Part] = deque()  # of the last batch, not offered yet; never more than `WRITE_BATCH` blocks
        self._introduced: set[Ref] = set()
        self._offering = True  # some store takes what is new
        self._several = False  # whether this host ever had more than one store
        self._number = 0
        telemetry = engine.context.telemetry
        self._loaded = telemetry.counter("kv_blocks_loaded_total", "Blocks loaded from the host tier")
        self._missed = telemetry.counter("kv_lookups_failed_total", "Lookups that ended as a miss by failure", ("why",))
        self._damaged = telemetry.counter("kv_blocks_damaged_total", "Stored blocks whose copy was not what was stored")
        self._stored = telemetry.counter("kv_blocks_stored_total", "Blocks stored in the host tier")
        self._skipped = telemetry.counter("kv_lookups_skipped_total", "Lookups not made: the index knew of no block")
        self._dearer = telemetry.counter("kv_blocks_computed_total", "Stored blocks not loaded: to compute was sooner")
        self._loads_at = self._disk_at = -math.inf  # when the last load began
        self.index = KvIndex(engine.context)

    @property
    def idle(self) -> bool:
        """Whether no load is under way; unfinished write-backs may be lost."""
        return not self._loads

    # --- loading --------------------------------------------------------------------------------

    def begin(self, work: Work, sequences: list[Sequence]) -> None:
        """Give a request's sequences to the engine, after its prompt's stored prefix where that is worth it."""
        stores, pool = self._engine.neighbours("kv"), self._engine.pool
        short = not sequences or sequences[0].num_tokens <= MIN_BLOCKS * BLOCK_TOKENS
        if not stores or pool is None or short or len(work.record.prompt_ids) != 1:
            self._add(work, sequences)
            return
        tokens, root = sequences[0].tokens, self._engine.root(salt_of(work.record))
        prompt_len = len(sequences[0].prompt_ids)

        def missing() -> _Missing:
            hashes = sequence_hashes(tokens[: len(tokens) - 1], prompt_len, root=root, warm=work.record.warm)
            have = pool.peek(hashes)[0]
            return _Missing(hashes[have:], [root, *hashes][have : len(hashes)], home_key(hashes, prompt_len))

        if len(tokens) <= HASHED_HERE:
            # The engine's thread may change the pool meanwhile: what it has is a hint, as it is once the answer comes.
            self._ask(work, sequences, stores, missing())
        else:
            self._engine.call(lambda _: missing(), lambda got, error: self._ask(work, sequences, stores, got))

    def _ask(self, work: Work, sequences: list[Sequence], stores: list[Ref], got: _Missing | None) -> None:
        if self._engine.works.get(work.request_id) is not work:
            return
        if got is None or len(got.hashes) < MIN_BLOCKS:
            self._add(work, sequences)
            return
        hashes, parents, key = got
        kv = stores[0] if len(stores) == 1 else fullest(ranked(stores, key), lambda s: self._has(s, hashes), MIN_BLOCKS)
        now = self._engine.clock.now()
        load = _Load(work, sequences, hashes, parents, now + LOOKUP_LIMIT_S, kv, began=now)
        load.resident = (load.tokens - 1) // BLOCK_TOKENS - len(hashes)
        if not self._worth_asking(load):
            self._add(work, sequences)
            return
        ticket = f"{work.request_id}.load.{work.fence.label}"
        self._loads[ticket] = load
        lookup = m.KvLookup(
            ticket=ticket,
            hashes=load.hashes,
            parents=load.parents[: len(load.hashes)],
            reply=self._engine.ref,
            block_s=self._block_s(),
            owner=owner_of(work.record.tenant),
        )
        self._engine.context.send(kv, lookup)

    def _has(self, kv: Ref, hashes: list[bytes]) -> int:
        """How many of the first blocks a store is known to have."""
        return self.index.prefix(kv, hashes) if self.index.complete(kv) else 0

    def _worth_asking(self, load: _Load) -> bool:
        """Whether to ask the store, as far as the index tells; nothing that its disk is too slow for is asked for."""
        kv = load.kv
        if not self.index.complete(kv):
            return True
        # Complete up to events on their way: what it does not know yet is computed, as if it had been stored later.
        total = self.index.prefix(kv, load.hashes)
        speed = self._disk_speed(kv)
        memory = total if speed <= 0.0 or not total else self.index.stored([kv], ["host"], load.hashes)
        if self._far_may_pay(load, memory, total, speed):
            return True  # the store knows what is worth fetching
        if total < MIN_BLOCKS:
            self._skipped.inc()
            return False
        load.chosen = self._choose(load, memory, total, speed)
        if load.chosen < total:  # else the store may have more by now
            load.hashes = load.hashes[: load.chosen]
        return load.chosen > 0

    def _choose(self, load: _Load, memory: int, total: int, disk_speed: float = 0.0, *, asked: bool = False) -> int:
        """Return how many of the stored blocks to load: `total` are stored, the first `memory` of them in memory."""
        now = self._engine.clock.now()
        if self._engine.always_load:
            return total
        chosen = plan_load(
            self._offer_of(load, memory, total),
            self._costs(disk_speed, asked=asked),
            queued_s=self._queued_s(),
            since_load_s=now - self._loads_at,
            since_disk_s=now - self._disk_at,
        )
        take = chosen.end // BLOCK_TOKENS - load.resident
        take = take if take >= MIN_BLOCKS else 0
        self._dearer.inc(total - take)
        if take > 0:
            self._loads_at, load.probe = now, chosen.probe
        if take > memory:
            self._disk_at = now
        self._measure_disk(load, memory, chosen, now)
        return take

    def _measure_disk(self, load: _Load, memory: int, chosen: Loading, now: float) -> None:
        """Let the store read a little from its disk, though nobody waits for it: it tells how fast that went."""
        if chosen.read_to > 0:
            self._disk_at = now
            last = min(chosen.read_to // BLOCK_TOKENS - load.resident, memory + PROBE_BLOCKS)
            hint = m.KvPrefetch(hashes=load.hashes[memory:last], parents=load.parents[memory:last])
            self._engine.context.send(load.kv, hint)

    def _offer_of(self, load: _Load, memory: int, total: int) -> Offer:
        return Offer(load.tokens, *(BLOCK_TOKENS * (load.resident + blocks) for blocks in (0, memory, total)))

    def _costs(self, disk_speed: float, *, asked: bool = False) -> Costs:
        """What prefills and loads take here; once the store has answered, only the copy is still to be paid."""
        prefill, loading = self._engine.report.costs
        near = LoadCost(1.0, 1.0 / max(loading.per_token_s, 1e-12), 0.0 if asked else loading.fixed_s)
        return Costs(prefill, near, disk=LoadCost(self._token_nbytes, disk_speed) if disk_speed > 0.0 else None)

    def _queued_s(self) -> float:
        thread = self._engine.thread
        queued = 0 if thread is None else int(thread.load.get("queued_tokens", 0))
        return queued * self._engine.report.per_token_s

    @property
    def _token_nbytes(self) -> float:
        pool = self._engine.pool
        return 0.0 if pool is None else pool.block_nbytes / BLOCK_TOKENS

    def _disk_speed(self, kv: Ref) -> float:
        """Bytes per second of the store's disk, 0 without one."""
        member = self._engine.context.membership.get(kv)
        return 0.0 if member is None else float(member.load.get("disk_bytes_per_s", 0.0))

    def _far_may_pay(self, load: _Load, memory: int, total: int, disk_speed: float) -> bool:
        """Whether other hosts may have something of a prompt that comes sooner than it is computed."""
        member = self._engine.context.membership.get(load.kv)
        known = 0 if member is None else int(member.load.get("elsewhere", 0))
        if member is None or known <= 0 or self._engine.always_load:
            return known > 0
        ways = [Way(*map(float, told)) for told in member.load.get("ways", {}).values()]
        size = self._token_nbytes
        if not ways:
            return False  # all of them are left alone for now
        fetches = (LoadCost(size, way.bytes_per_s, way.setup_s) for way in ways)
        far = min(fetches, key=lambda cost: cost.seconds(load.tokens))
        offer, costs = self._offer_of(load, memory, total), self._costs(disk_speed)
        return may_pay_far(offer, costs, far, BLOCK_TOKENS * known, queued_s=self._queued_s())

    def _block_s(self) -> float:
        """What a block of a prompt costs here, as the last steps tell: a fetch must be sooner."""
        thread = self._engine.thread
        return 0.0 if thread is None else BLOCK_TOKENS * float(thread.statistics.get("step_token_s", 0.0))

    def _add(self, work: Work, sequences: list[Sequence]) -> None:
        def add(core: EngineCore) -> None:
            for sequence in sequences:
                core.add(sequence)

        self._engine.call(add, lambda _, error: self._engine.added(work, error))

    def on_loading(self, msg: m.KvLoading) -> None:
        """The store reads more of the prefix from its disk: wait for it, within reason."""
        load = self._loads.get(msg.ticket)
        if load is not None and not load.copying:
            load.slow = True
            if load.probe:
                return  # what was in memory is not any more: the prompt is computed
            load.until = self._engine.clock.now() + min(msg.wait_s + LOOKUP_LIMIT_S, LOADING_LIMIT_S)

    def on_found(self, msg: m.KvFound) -> None:
        """The store's answer: copy what it has, compute the rest."""
        load = self._loads.get(msg.ticket)
        if load is None or load.copying:
            if load is None and msg.blocks:
                self._missed.labels("late").inc()
            return
        transfer = self._engine.neighbour("transfer")
        if not msg.blocks:
            del self._loads[msg.ticket]  # there is no lease to give back
            self._add(load.work, load.sequences)
            return
        count = len(msg.blocks)
        if (count < load.chosen or load.chosen == 0) and not self._choose(load, count, count, asked=True):
            del self._loads[msg.ticket]
            self._engine.context.send(load.kv, m.KvRelease(ticket=msg.ticket))
            self._add(load.work, load.sequences)
            return
        if msg.pool is None or transfer is None or not len(msg.blocks) == len(msg.checksums) <= len(load.hashes):
            self._give_up(msg.ticket, load)
            return
        load.expected, load.copying, load.until = msg.checksums, True, self._engine.clock.now()
        load.until += PROBE_LIMIT_S if load.probe else COPY_LIMIT_S
        load.hashes = load.hashes[: len(msg.blocks)]
        sequences, key, count = load.sequences, load.key, len(msg.blocks)

        def add(core: EngineCore) -> tuple[list[int], list[m.BlockRef]] | None:
            for sequence in sequences:
                core.add(sequence)
            blocks = core.begin_load(key, count)
            return None if blocks is None else (blocks, core.pool.refs(blocks))

        self._engine.call(add, lambda got, error: self._copy(msg, load, transfer, got, error))

    def _copy(
        self,
        msg: m.KvFound,
        load: _Load,
        transfer: Ref,
        got: tuple[list[int], list[m.BlockRef]] | None,
        error: BaseException | None,
    ) -> None:
        engine = self._engine
        if error is not None or got is None or engine.pool is None or msg.pool is None:
            self._loads.pop(msg.ticket, None)
            engine.context.send(load.kv, m.KvRelease(ticket=msg.ticket))
            engine.added(load.work, error)
            return
        load.blocks = got[0]
        if msg.ticket not in self._loads:
            return  # closed or given up meanwhile, which took the blocks back: by now they may be lent to another try
        engine.destination.expect_job(msg.ticket, transfer)
        job = m.TransferJob(
            request_id=load.work.request_id,
            fence=load.work.fence,
            deadline=load.work.record.deadline,
            traceparent=load.work.record.traceparent,
            job=msg.ticket,
            part=0,
            source=engine.ref,
            dest=engine.ref,
            source_pool=msg.pool,
            dest_pool=engine.pool.handle(),
            source_blocks=msg.blocks,
            dest_blocks=got[1],
            expected=msg.checksums,
        )
        engine.context.send(transfer, job)

    def on_transfer_done(self, msg: m.TransferDone) -> bool:
        """A load or a write-back has been copied; false if the job is none of these."""
        load = self._loads.pop(msg.job, None)
        if load is not None:
            self._engine.destination.settled(msg.job)
            self._loaded_or_not(msg, load)
            return True
        if self._write is not None and self._write[0] == msg.job:
            self._engine.destination.settled(msg.job)
            ok = msg.error is None
            self._end_write(ok, msg.checksums)
            return True
        return False

    def _loaded_or_not(self, msg: m.TransferDone, load: _Load) -> None:
        key, blocks, hashes = load.key, load.blocks, load.hashes
        if msg.error is not None:
            self._missed.labels(str(msg.error.get("code"))).inc()
            hashes = hashes[: self._report(msg, load)]
        # After the report: what is looked at stays where it is until then.
        self._engine.context.send(load.kv, m.KvRelease(ticket=msg.job))
        if not hashes:
            self._engine.call(lambda core: core.abandon_load(key))
            return
        self._loaded.inc(len(hashes))
        if not load.slow and msg.error is None:
            self._engine.report.loaded(len(blocks), self._engine.clock.now() - load.began)
        self._engine.call(lambda core: core.load_prefix(key, blocks, hashes))

    def _report(self, msg: m.TransferDone, load: _Load) -> int:
        """Tell the store which blocks are not what it has stored; returns how many come before the first of them."""
        if len(msg.checksums) != len(load.expected):
            return 0  # there is no whole copy
        bad = [i for i, found in enumerate(msg.checksums) if found != load.expected[i]]
        self._damaged.inc(len(bad))
        self._engine.context.send(load.kv, m.KvDamaged(hashes=[load.hashes[i] for i in bad]))
        return bad[0] if bad else 0

    def _give_up(self, ticket: str, load: _Load) -> None:
        """Compute the prompt instead."""
        del self._loads[ticket]
        engine = self._engine
        engine.context.send(load.kv, m.KvRelease(ticket=ticket))
        if not load.copying:
            self._add(load.work, load.sequences)
            return
        key = load.key
        engine.call(lambda core: core.abandon_load(key, writer=ticket))
        engine.destination.abort_job(ticket, load.work.request_id, load.work.fence)

    def forget(self, work: Work) -> None:
        """The request is closed: its load is void."""
        for ticket, load in list(self._loads.items()):
            if load.work is work:
                del self._loads[ticket]
                self._engine.context.send(load.kv, m.KvRelease(ticket=ticket))
                if load.blocks:
                    key = load.key
                    self._engine.call(
                        lambda core, k=key, t=ticket: core.abandon_load(k, writer=t)  # type: ignore[misc]
                    )
                    self._engine.destination.abort_job(ticket, work.request_id, work.fence)

    # --- storing --------------------------------------------------------------------------------

    def computed(self, ended: Iterable[Work], *, begun: bool = False, hurry: bool = False) -> None:
        """What prompts left may be stored: at a tick, so as not to compete with the way out of their first ids.

        Args:
            ended: whose sequences ended or were handed on.
            begun: whether prompts are complete whose answers have only begun.
            hurry: whether somebody is to find soon what was computed.
        """
        now = self._engine.clock.now()
        if begun:
            self._pace.computed(now)
        for work in ended:
            self._pace.ended(sum(len(ids) // BLOCK_TOKENS for ids in work.record.prompt_ids), now)
        if hurry:
            self._pace.hurry(now)

    def _introduce(self) -> None:
        """Show a new store the layout of the blocks here, so that it is prepared before the first lookup."""
        stores, pool = set(self._engine.neighbours("kv")), self._engine.pool
        if pool is None or stores == self._introduced:
            return
        for kv in stores - self._introduced:
            ticket = f"{self._engine.ref.id}.{self._engine.ref.epoch}.hello"
            hello = m.KvReserve(ticket=ticket, hashes=[], parents=[], pool=pool.handle(), reply=self._engine.ref)
            self._engine.context.send(kv, hello)
        self._introduced = stores
        if len(stores) > 1 and not self._several:
            self._several = True
            self._engine.call(_offer_all)

    def _frozen(self, kv: Ref) -> bool:
        """Whether a store takes nothing new into its memory."""
        member = self._engine.context.membership.get(kv)
        return member is not None and bool(member.load.get("frozen"))

    def _look_at_freezes(self) -> None:
        """While no store takes anything the engine collects nothing; what it computes then is not offered later."""
        stores = self._engine.neighbours("kv")
        offering = not stores or not all(map(self._frozen, stores))
        if offering != self._offering:
            self._offering = offering
            self._engine.call(lambda core: setattr(core, "offering", offering))

    def write_back(self) -> None:
        """Store what was computed, one batch at a time."""
        if self._write is not None or self._collecting:
            return
        if self._parts:
            self._offer_part()
            return
        if self._engine.neighbour("kv") is None:
            return
        self._collecting = True

        def collect(core: EngineCore) -> tuple[list[Candidate], list[m.BlockRef]]:
            candidates = core.stored_candidates(WRITE_BATCH)
            return candidates, core.pool.refs([c.block for c in candidates])

        self._engine.call(collect, lambda got, _: self._offer(got))

    def _offer(self, got: tuple[list[Candidate], list[m.BlockRef]] | None) -> None:
        self._collecting = False
        if got is None or not got[0]:
            return
        parts: dict[Ref, _Part] = {}
        homes: dict[bytes, Ref] = {}
        stores = self._engine.neighbours("kv")
        for candidate, ref in zip(*got, strict=True):
            if candidate.key not in homes:
                homes[candidate.key] = ranked(stores, candidate.key)[0] if stores else NO_STORE
            part = parts.setdefault(homes[candidate.key], _Part(homes[candidate.key], [], []))
            part.candidates.append(candidate)
            part.refs.append(ref)
        self._parts.extend(parts.values())
        self._offer_part()

    def _offer_part(self) -> None:
        engine = self._engine
        kv, candidates, refs = self._parts.popleft()
        # Where there are several stores all blocks of a prompt come, for its home may lack what another store has.
        known = self._has(kv, [c.hash for c in candidates]) if self._several else 0
        if not engine.context.membership.is_up(kv) or engine.pool is None or self._frozen(kv):
            known = len(candidates)
        if known:
            self._written([c.block for c in candidates[:known]])
            candidates, refs = candidates[known:], refs[known:]
        if not candidates or engine.pool is None:
            return
        self._number += 1
        ticket = f"{engine.ref.id}.{engine.ref.epoch}.store.{self._number}"
        self._write = (ticket, _Write(candidates, refs, kv, engine.clock.now() + WRITE_ANSWER_S))
        reserve = m.KvReserve(
            ticket=ticket,
            hashes=[c.hash for c in candidates],
            parents=[c.parent for c in candidates],
            owners=[owner_of(c.tenant) for c in candidates],
            pool=engine.pool.handle(),
            reply=engine.ref,
        )
        engine.context.send(kv, reserve)

    def on_reserved(self, msg: m.KvReserved) -> None:
        """The tier lends staging blocks for some of the batch."""
        if self._write is None or self._write[0] != msg.ticket or self._write[1].transfer is not None:
            return
        write, engine = self._write[1], self._engine
        transfer = engine.neighbour("transfer")
        if not msg.blocks or msg.pool is None or transfer is None or engine.pool is None:
            self._end_write(False, [])
            return
        write.transfer = transfer
        write.until = engine.clock.now() + JOB_RESEND_S
        engine.destination.expect_job(msg.ticket, transfer)
        write.job = m.TransferJob(
            request_id=msg.ticket,
            fence=NOBODY,
            job=msg.ticket,
            part=0,
            source=engine.ref,
            dest=write.kv,
            source_pool=engine.pool.handle(),
            dest_pool=msg.pool,
            source_blocks=[write.refs[i] for i in msg.positions],
            dest_blocks=msg.blocks,
        )
        engine.context.send(transfer, write.job)

    def _end_write(self, ok: bool, checksums: list[int]) -> None:
        assert self._write is not None
        ticket, write = self._write
        self._write = None
        if ok:
            self._stored.inc(len(checksums))
            self.index.expect(write.kv, [c.hash for c in write.candidates])
        self._engine.context.send(write.kv, m.KvCommit(ticket=ticket, ok=ok, checksums=checksums))
        self._written([c.block for c in write.candidates])

    def _written(self, blocks: list[int]) -> None:
        """These are stored, or never will be: the engine may have them back, and the next ones are offered."""
        self._engine.call(lambda core: core.written(blocks), lambda _, __: self.write_back())

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """What takes too long is a miss; what was computed is stored."""
        self.index.tick(now)
        self._introduce()
        self._look_at_freezes()
        if self._pace.due(now, busy=bool(self._engine.works)):
            self.write_back()
        for ticket, load in list(self._loads.items()):
            if now >= load.until:
                self._missed.labels("slow").inc()
                self._give_up(ticket, load)
        if self._write is not None and now >= self._write[1].until:
            write = self._write[1]
            if write.transfer is None or write.job is None:
                self._end_write(False, [])
                return
            # With a copy under way the blocks stay as they are until its end, or the transfer actor's, is known.
            write.until = now + JOB_RESEND_S
            self._engine.context.send(write.transfer, write.job)

    def member_down(self, ref: Ref, reason: str) -> None:
        """A dead transfer actor copies nothing more, a silent one may; and what a lost store has is out of reach."""
        self.index.member_down(ref)
        if reason != "silent" and self._write is not None and self._write[1].transfer == ref:
            self._end_write(False, [])


def _offer_all(core: EngineCore) -> None:
    core.offer_all = True
