"""An engine as an actor: the step loop in a thread of its own, items to detokenizers, and one verb to end work.

What is common to all roles is here: dispatch, items and their acknowledgement, redirect, close. The source side of a
hand-off is in `actors.prefill`, the destination side in `actors.decode`, stored prefixes in `actors.prefix`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from actors import last_word
from actors.decode import Destination
from actors.engine_report import EngineReport
from actors.heirs import ORPHAN_RESEND_S, heir
from actors.migration import Migration
from actors.prefill import Source
from actors.prefix import PrefixStore
from actors.waste import Waste
from actors.watchdog import Watchdog
from actors.work import CLASSES, Work, make_parts, salt_text
from engine.core import EngineCore, StepResult
from engine.failures import error_of
from engine.live import Spent
from engine.loop import EngineThread
from engine.plan import Note, Runner
from engine.scheduler import Scheduler
from engine.sequence import Key
from engine.speculation.drafter import Drafter
from engine.speculation.speculator import MAX_DRAFT
from kvstore.block import BLOCK_TOKENS, chain_hashes, root_hash
from kvstore.pool import BlockPool
from runtime.actor import Actor, Context
from runtime.step_note import StepNote
from schemas import messages as m
from schemas.errors import Cancelled, HeadraceError, InternalError, Overloaded, ReplayMismatch, Unavailable
from schemas.items import ACKS, ITEMS, ItemBatch, items_body, parse_acks
from schemas.record import Fence
from schemas.subjects import Ref

T = TypeVar("T")

REMEMBERED = 4096
ERROR_RESEND_S = 0.3
STEP_LIMIT_S = 120.0
MAX_WORKS = 16_384  # requests; four times what may wait in an engine, which refuses first
SCHEMA_VERSION = 1


def root_fields(runner: Runner) -> list[Any]:
    """Return what every hash chain of a runner's blocks begins with; a tenant's part follows.

    Its fingerprint names model, tokenizer and numerics, its layout the KV's type and form; the rest is rank and number
    of tensor-parallel parts, adapter and its revision.
    """
    return [SCHEMA_VERSION, runner.fingerprint, runner.layout, 0, 1, None, None]


class EngineActor(Actor):
    """Hosts one engine.

    Args:
        role: `prefill`, `decode` or `both`; any engine can do everything, the role tells placement what to ask.
        make_runner: called in the engine's thread; loads the model.
        make_drafter: called there too, with the runner; returns what guesses ids ahead, if anything.
        step_limit_s: with work and without a step for so long the engine counts as failed, or sooner (`Watchdog`).
        directory, prefix: where the pool's file lies and how its name begins.
        always_load: load what the store has of a prompt also where computing it is sooner.
        tenant_weights: shares of tenants where several wait.
        pace_s: by class, the longest mean time between a running sequence's tokens.
    """

    tells_ease: ClassVar[bool] = True  # placement would pass over it for a quarter of a second

    def __init__(
        self,
        context: Context,
        *,
        role: str,
        make_runner: Callable[[], Runner],
        directory: Path,
        prefix: str,
        num_blocks: int,
        token_budget: int,
        max_running: int,
        parking_tokens: int = 0,
        make_drafter: Callable[[Runner], Drafter | None] | None = None,
        max_draft: int = MAX_DRAFT,
        step_limit_s: float = STEP_LIMIT_S,
        always_load: bool = False,
        tenant_weights: Mapping[str, float] | None = None,
        pace_s: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(context)
        self._watchdog = Watchdog(step_limit_s)
        self.role = role
        self.always_load = always_load
        self.tenant_weights = dict(tenant_weights or {})
        self._pace_s = {CLASSES.index(name): seconds for name, seconds in (pace_s or {}).items()}
        self.waste = Waste(context.telemetry)
        self._make_runner = make_runner
        self._directory = directory
        self._pool_name = f"{prefix.removeprefix('headrace-')}{role}-{context.ref.id}"
        self._num_blocks = num_blocks
        self._token_budget = token_budget
        self._max_running = max_running
        self._parking_tokens = parking_tokens
        self._make_drafter = make_drafter
        self._max_draft = max_draft
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread: EngineThread | None = None
        self.pool: BlockPool | None = None
        self.works: dict[str, Work] = {}
        self._ending: Counter[str] = Counter()  # requests of which the engine has yet to drop an earlier try
        self._floors: OrderedDict[str, Fence] = OrderedDict()  # the lowest fence that may still begin
        self._root_fields: list[Any] = []  # of every tenant's hash chain
        self.source = Source(self)
        self.destination = Destination(self)
        self.migration = Migration(self)
        self.report = EngineReport(context)
        self.prefix = PrefixStore(self)
        telemetry = context.telemetry
        self._steps = telemetry.counter("engine_steps_total", "Forward passes")
        self._tokens = telemetry.counter("engine_tokens_total", "Tokens computed")
        self._step_seconds = telemetry.histogram(
            "engine_step_seconds", "Time of one forward pass",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2),
        )  # fmt: skip
        self._failed = telemetry.counter("engine_sequences_failed_total", "Sequences that an engine gave up")
        self._shed = telemetry.counter("engine_requests_shed_total", "Requests refused because their turn came late")
        self._resent = telemetry.counter("engine_items_resent_total", "Item batches repeated unacknowledged")

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model, make the pool, run one real step; only then is the engine ready."""
        self._loop = asyncio.get_running_loop()
        await self.prefix.index.start()
        core = await self._loop.run_in_executor(None, self._build)
        self.thread = EngineThread(core, self._deliver, self._crashed, name=f"engine-{self.ref.id}")
        self.thread.start()
        self.state = "ready"

    def _build(self) -> EngineCore:
        runner = self._make_runner()
        self.pool = BlockPool.create(
            self._directory,
            self._pool_name,
            self._num_blocks,
            runner.block_nbytes,
            runner.layout,
            self.ref.epoch,
            self.context.host,
        )
        self.pool.log_changes()
        self._root_fields = root_fields(runner)
        core = EngineCore(
            runner,
            self.pool,
            Scheduler(BLOCK_TOKENS, self._token_budget, self._max_running, self._token_budget),
            root=self.root,
            now=self.clock.now,
            wall=self.clock.wall,
            parking_tokens=self._parking_tokens,
            drafter=None if self._make_drafter is None else self._make_drafter(runner),
            max_draft=self._max_draft,
            tenant_weights=self.tenant_weights,
            pace_s=self._pace_s,
            note=self._note(),
        )
        runner.warm_up()
        return core

    def _note(self) -> Note | None:
        """Return where the engine notes what it is about to compute; None where nobody would read it."""
        return StepNote.inherited()

    def root(self, salt: str) -> bytes:
        """Return the start of the hash chain of one tenant's blocks in this engine."""
        return root_hash(*self._root_fields, salt)

    async def stop(self) -> None:
        """End the thread and remove the pool."""
        thread, pool = self.thread, self.pool
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, thread.stop)
        if pool is not None:
            pool.close()

    def _crashed(self, message: str) -> None:
        self.state, self.reason = "failed", message

    @property
    def idle(self) -> bool:
        """Whether no request depends on this engine."""
        return not self.works and self.prefix.idle

    @property
    def steps(self) -> int:
        """Forward passes so far; read by the heartbeat thread."""
        return self.thread.steps if self.thread is not None else 0

    def load(self) -> dict[str, Any]:
        """The engine's own snapshot, and which requests it holds."""
        if self.thread is None:
            return {"running": 0, "waiting": 0}
        counted = [name for name, work in self.works.items() if work.counted]
        # The newest: senders ask whether what they have just sent is counted.
        held = {"requests": list(self.works)[:64], "counted": counted[-64:]}
        names = {"root": self._root_fields, "block_nbytes": self.pool.block_nbytes if self.pool is not None else 0}
        return {**self.thread.load, "steps": self.thread.steps, **held, **names, **self.report.load()}

    def statistics(self) -> dict[str, float]:
        """The engine's counters."""
        out = dict(self.thread.statistics) if self.thread is not None else {}
        index = {f"kv_index_{name}": value for name, value in self.prefix.index.statistics().items()}
        return {**out, **index, **self.report.statistics(), "requests": len(self.works)}

    def call(
        self, fn: Callable[[EngineCore], T], then: Callable[[T | None, BaseException | None], None] | None = None
    ) -> None:
        """Run `fn` on the engine between steps, then `then(result, error)` on this loop.

        Without `then` the outcome changes nothing: aborting twice, say, is no fault.
        """
        assert self.thread is not None and self._loop is not None
        loop = self._loop
        if then is None:
            self.thread.call(fn)
            return

        def done(future: Future[T]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            result = None if error is not None else future.result()
            loop.call_soon_threadsafe(self._guard, lambda: then(result, error))

        self.thread.call(fn).add_done_callback(done)

    def _guard(self, fn: Callable[[], None]) -> None:
        try:
            fn()
        except Exception:  # a fault in one request's bookkeeping must not stop the engine's other requests
            self.context.telemetry.log.exception("engine callback failed")

    # --- control --------------------------------------------------------------------------------

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        """Dispatch, redirect and close here; hand-offs and stored prefixes in their own modules."""
        match message:
            case m.Dispatch():
                self._dispatch(message)
            case m.Redirect():
                self._redirect(message)
            case m.Close():
                below = message.reason == "fenced"
                self.close(
                    message.request_id, message.fence, message.reply or sender, below=below, reason=message.reason
                )
            case m.Closed():
                self._closed(message)
            case m.Reserve():
                self.destination.on_reserve(message)
            case m.Transferred():
                self.destination.on_transferred(message)
            case m.Reserved():
                if not self.migration.on_reserved(message):
                    self.source.on_reserved(message)
            case m.Activated():
                if not self.migration.on_activated(message):
                    self.source.on_activated(message)
            case m.Migrate():
                self.migration.begin(message)
            case m.Moved():
                self.destination.on_moved(message)
            case m.TransferDone():
                self.source.served(message.job)
                if not self.prefix.on_transfer_done(message) and not self.migration.on_transfer_done(message):
                    self.on_transfer_done(message)
            case m.ChainQuery():
                root = self.root(salt_text(message.tenant, message.cache_salt))
                hashes = chain_hashes(message.prompt_ids, root=root) if self.pool is not None else []
                self.context.send(message.reply, m.Chain(ticket=message.ticket, hashes=hashes))
            case m.KvFound():
                self.prefix.on_found(message)
            case m.KvLoading():
                self.prefix.on_loading(message)
            case m.KvReserved():
                self.prefix.on_reserved(message)
            case m.KvDump():
                self.prefix.index.on_dump(message, sender)
            case m.KvDumpQuery():
                self.report.on_query(message)
            case _:
                self.context.telemetry.log.warning("unexpected message", type=type(message).__name__)

    @property
    def full(self) -> bool:
        """Whether no more requests can be held."""
        return len(self.works) >= MAX_WORKS

    def admit_fence(self, request_id: str, fence: Fence) -> bool:
        """Whether work under this fence may begin or goes on; what was held under a lower one is dropped."""
        if fence < self._floors.get(request_id, fence):
            return False
        held = self.works.get(request_id)
        if held is not None and held.fence > fence:
            return False
        if held is not None and held.fence < fence:
            self.close(request_id, fence, None, below=True, reason="fenced")
        return True

    def _dispatch(self, msg: m.Dispatch) -> None:
        answer = {"request_id": msg.request_id, "fence": msg.fence}
        if self.thread is None or self.state != "ready":
            draining = Unavailable("this engine takes no new work", code="draining")
            self.context.send(msg.reply, m.Dispatched(**answer, error=draining.info()))
            return
        if not self.admit_fence(msg.request_id, msg.fence):
            error = Cancelled("the request was closed here, or is held under a higher fence")
            self.context.send(msg.reply, m.Dispatched(**answer, error=error.info()))
            return
        if msg.request_id in self.works:
            self.context.send(msg.reply, m.Dispatched(**answer))
            return
        if self.full:
            full = Unavailable("this engine holds as many requests as it may", code="engine_full")
            self.context.send(msg.reply, m.Dispatched(**answer, error=full.info()))
            return
        outputs = [list(o) for o in msg.outputs] or [[] for _ in range(msg.record.num_choices)]
        work = Work(
            record=msg.record,
            fence=msg.fence,
            detok=msg.detokenize,
            owner=msg.reply,
            role="local" if msg.decode is None else "source",
            ids=outputs,
            decode=msg.decode,
            began=self.clock.wall(),
            late_at=msg.late_at,
        )
        self.works[msg.request_id] = work
        now = self.clock.now()
        if msg.decode is None:
            live = [c for c in range(len(outputs)) if c not in msg.finished]
            sequences = [work.sequence(c, outputs[c], now) for c in live]
        else:
            parts = make_parts(msg.record, outputs, msg.finished)
            work.parts = {p.number: p for p in parts}
            work.num_parts = len(parts)
            heads = [(p.choices[0], len(p.choices)) for p in parts]
            sequences = [work.sequence(c, outputs[c], now, num_first=count) for c, count in heads]
            self.source.reserve(work)
        self.prefix.begin(work, sequences)
        self.context.send(msg.reply, m.Dispatched(**answer))

    def added(self, work: Work, error: BaseException | None) -> None:
        """The engine has taken a request's sequences, or refused one."""
        work.counted = error is None
        if error is not None and self.works.get(work.request_id) is work:
            if not isinstance(error, HeadraceError):
                self.context.telemetry.log.error("a sequence was not taken", error=repr(error))
                error = InternalError("the engine could not take the request")
            self.fail(work, error)

    def fail(self, work: Work, error: HeadraceError) -> None:
        """Give a request up, once; the owner is told until it closes it."""
        if work.error is not None:
            return  # what its abort brought about: to abort it again would bring it about for ever
        work.error, work.error_at = error, self.clock.now()
        self._failed.inc()
        self._abort(work)
        self._send_error(work)

    def _abort(
        self, work: Work, then: Callable[[object, object], None] | None = None, reason: str = "error"
    ) -> None:
        """Drop a request's sequences and loads; blocks that the transfer actor may still touch wait for its word."""
        self.prefix.forget(work)
        self.migration.forget(work)
        writers: dict[Key, str] = {}
        for part in work.parts.values():
            if self.source.writing(work, part) or self.destination.writing(work, part):
                writers[part.key] = work.job(part)
                self.destination.abort_transfer(work, part)
        keys, request_id = work.keys(), work.request_id

        def abort(core: EngineCore) -> Spent:
            spent = Spent()
            for key in keys:
                spent = spent.plus(core.spent(key))
                core.abort(key, writer=writers.get(key))
            return spent

        def ended(result: Spent | None, error: object) -> None:
            if result is not None:
                self.waste.closed(result, reason)
            self._ending[request_id] -= 1
            if not self._ending[request_id]:
                del self._ending[request_id]
            if then is not None:
                then(result, error)

        self._ending[request_id] += 1
        self.call(abort, ended)

    def _send_error(self, work: Work) -> None:
        assert work.error is not None
        head = {"request_id": work.request_id, "fence": work.fence}
        self.context.send(work.owner, m.EngineError(**head, error=work.error.info()))

    def _redirect(self, msg: m.Redirect) -> None:
        work = self.works.get(msg.request_id)
        known = work is not None and work.started and msg.fence >= work.fence and work.error is None
        if known:
            assert work is not None
            if msg.fence != work.fence:
                self.migration.forget(work)  # its owner has taken the offer back
            work.redirect(msg.detokenize, msg.fence)
            work.owner = msg.reply
            self.emit([work])
        head = {"request_id": msg.request_id, "fence": msg.fence}
        self.context.send(msg.reply, m.Redirected(**head, known=known))

    def close(
        self, request_id: str, fence: Fence, reply: Ref | None, *, below: bool = False, reason: str = "finish"
    ) -> None:
        """End a request here, whatever its phase; idempotent. Blocks that a transfer may touch are quarantined.

        Args:
            below: end only what runs under a lower fence; work under this one may come, or be here already.
            reason: as in `Close`; what was computed in vain is counted by it.
        """
        work = self.works.get(request_id)
        if work is not None and work.fence > fence:
            return  # from somebody who no longer commands it
        floor = fence if below else fence.next()
        self._floors[request_id] = max(floor, self._floors.get(request_id, floor))
        self._floors.move_to_end(request_id)
        while len(self._floors) > REMEMBERED:
            self._floors.popitem(last=False)
        if work is not None and below and work.fence == fence:
            work = None

        def answer(_: object = None, __: object = None) -> None:
            if reply is not None:
                self.context.send(reply, m.Closed(request_id=request_id, fence=fence))

        if work is None:
            answer()
            return
        del self.works[request_id]
        if self.migration.handed_over(request_id, fence):
            reason = "finish"  # it goes on at another engine with what was computed here
        if work.role == "source" and work.decode is not None:
            # Its owner may be gone, and the destination would wait for these blocks until the deadline.
            over = m.Close(request_id=request_id, fence=work.fence, reason="source")
            self.context.send(work.decode, over)
        if work.role != "source" and work.began:
            self.context.telemetry.hop(
                "hop.decode", work.record.traceparent, work.began, self.clock.wall(), request_id=request_id
            )
        self.waste.closed(work.spent_on_ended(), reason, brought=work.brought)
        self._abort(work, answer, reason)

    def _closed(self, msg: m.Closed) -> None:
        work = self.works.get(msg.request_id)
        if work is not None and work.error is not None and msg.fence >= work.fence:
            self.close(msg.request_id, msg.fence, None)

    def on_transfer_done(self, msg: m.TransferDone) -> None:
        """No write of this job can follow: whatever waited for it is free."""
        if self.destination.settled(msg.job):
            job = msg.job
            self.call(lambda core: core.absolve(job))
        self.source.on_transfer_done(msg)

    # --- steps ----------------------------------------------------------------------------------

    def _deliver(self, result: StepResult) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._guard, lambda: self._on_step(result))

    def _work_of(self, key: Key) -> Work | None:
        """The work that a step's result is about.

        A step that runs while its request is closed and dispatched anew tells of the earlier try, whose blocks and ids
        must not be taken for those of the new one: both have the same keys. The engine's words come in order, so what
        it says before it has dropped the earlier try is about that one.
        """
        return None if key.request_id in self._ending else self.works.get(key.request_id)

    def _on_step(self, result: StepResult) -> None:
        if result.num_tokens:
            self._steps.inc()
            self._tokens.inc(result.num_tokens)
            self._step_seconds.observe(result.duration_s)
        self.report.computed(result.prefills)
        if any(result.expired):
            self.waste.add(result.expired, "expired")
        touched: dict[str, Work] = {}
        for key, tokens in result.cached.items():
            work = self._work_of(key)
            if work is not None and key.choice % work.record.n == 0:
                work.found(key.choice, tokens)
        for key, reason in result.ended:
            work = self._work_of(key)
            if work is not None and reason in ("stop", "length"):
                work.ends[key.choice] = reason
        for item in result.items:
            work = self._work_of(item.key)
            if work is None:
                continue
            if work.append(item):
                touched[work.request_id] = work
            elif work.error is None:
                self.fail(work, ReplayMismatch(f"choice {item.choice} came with item {item.index} out of turn"))
        for key, retry_after_s in result.late:
            work = self._work_of(key)
            if work is not None:
                self._shed.inc()
                message = "its turn came too late for the first token that its class is promised"
                self.fail(work, Overloaded(message, code="overloaded", retry_after_s=retry_after_s))
        for key, message in result.failed:
            work = self._work_of(key)
            if work is not None and work.error is None:
                self.fail(work, error_of(message))
        for key, sampled in result.held:
            work = self._work_of(key)
            if work is not None:
                self.source.on_held(work, key, sampled, result.held_blocks[key])
        self.emit(touched.values())
        self.destination.retry()
        warm = any(work.record.warm for work in touched.values())
        over = {key.request_id for key, _ in (*result.held, *result.ended)}
        self.prefix.computed(filter(None, map(self.works.get, over)), begun=bool(result.cached), hurry=warm)

    def emit(self, works: Any) -> None:
        """Send new items: one message per detokenizer."""
        now = self.clock.now()
        boxes: dict[Ref, list[ItemBatch]] = {}
        for work in works:
            if work.error is None:
                for batch in work.take(now):
                    boxes.setdefault(work.detok, []).append(batch)
        for detok, batches in boxes.items():
            self.context.send_hot(detok, ITEMS, items_body(batches))
        if boxes:
            self.context.hurry()  # before the engine's thread, which goes on, asks for the interpreter again

    def receive_hot(self, kind: str, body: list[Any], sender: Ref | None) -> None:
        """Detokenizers acknowledge."""
        if kind != ACKS:
            return
        for ack in parse_acks(body):
            work = self.works.get(ack.request_id)
            if work is None or sender != work.detok:
                continue
            if ack.status == "done":
                self.close(ack.request_id, max(ack.fence, work.fence), None)
            elif ack.status == "fenced" and ack.fence > work.fence:
                # Whoever commands it now may choose this engine again.
                self.close(ack.request_id, ack.fence, None, below=True, reason="fenced")
            elif ack.status == "ok":
                keys = [Key(work.request_id, c) for c in work.acknowledge(ack.next, self.clock.now())]
                if keys:
                    self.call(lambda core, keys=keys: [core.abort(k) for k in keys])  # type: ignore[misc]

    # --- time -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Repeat what is unanswered."""
        if self.thread is None:
            return
        now = self.clock.now()
        self._watch(now)
        resend = []
        for work in list(self.works.values()):
            if work.error is not None:
                if now - work.error_at >= ERROR_RESEND_S:
                    work.error_at = now
                    self._send_error(work)
            elif work.started and work.rewind(now):
                self._resent.inc()
                resend.append(work)
        self.emit(resend)
        wall = self.clock.wall()
        for work in list(self.works.values()):
            if now >= work.orphan_at:
                if work.orphaned:
                    self._report_orphan(work, now)
                elif self._exited(work.owner):  # it came with a dead owner's last words
                    work.orphan(now)
                elif work.forgotten(self.context.membership.is_up(work.detok), now):
                    self._report_orphan(work, now)
                else:
                    work.orphan_at = now + ORPHAN_RESEND_S
            # The detokenizer ends a stream at its deadline and closes it here; this is for when it could not.
            if last_word.is_due(work, self.context.membership.is_up(work.detok), wall):
                last_word.say(self.context, work)
            if wall > work.record.deadline + 1.0:
                self.close(work.request_id, work.fence, None, reason="expire")
        self.source.tick(now)
        self.destination.tick(now)
        self.migration.tick(now)
        self.prefix.tick(now)
        if self.pool is not None:
            self.report.tick(self.pool, now)

    def _watch(self, now: float) -> None:
        """A loop that is wedged is said to have failed: its heartbeats alone would go on for ever (R7)."""
        assert self.thread is not None
        load = self.thread.load
        busy = bool(load.get("running") or load.get("waiting"))
        longest_s = self.thread.statistics.get("step_longest_s", 0.0)
        if self._watchdog.look(self.thread.steps, busy, now, longest_s) and self.state in ("ready", "draining"):
            self._crashed(f"no step for {self._watchdog.stuck_s:.0f} s with {load.get('running', 0)} running")

    def member_down(self, ref: Ref, reason: str) -> None:
        """A transfer actor's confirmed exit ends all its writes; work whose owner is gone is reported."""
        if ref.kind == "transfer" and reason in ("exit", "superseded"):
            for job in self.destination.writer_gone(ref):
                self.call(lambda core, job=job: core.absolve(job))  # type: ignore[misc]
        self.prefix.member_down(ref, reason)
        self.source.transfer_down(ref)
        self.migration.member_down(ref)
        if ref.kind == "admission":
            for work in self.works.values():
                if work.owner == ref:
                    work.orphan(self.clock.now())

    def member_changed(self, ref: Ref, state: str) -> None:
        """An owner that was only silent commands again what nobody has claimed meanwhile (R7)."""
        if ref.kind == "admission":
            for work in self.works.values():
                if work.owner == ref:
                    work.orphaned = False

    def _report_orphan(self, work: Work, now: float) -> None:
        """Tell an admission actor that what is here has no owner; `Redirect` or `Close` is the answer."""
        members = [e.ref for e in self.context.membership.members("admission")]
        to = heir(work.record, work.owner, members, work.orphan_tries) if work.orphaned else work.owner
        work.orphan_at, work.orphan_tries = now + ORPHAN_RESEND_S, work.orphan_tries + 1
        if to is not None:
            orphan = m.Orphan(
                request_id=work.request_id, fence=work.fence, deadline=work.record.deadline,
                traceparent=work.record.traceparent, source=self.ref if work.started else None,
                record=work.record.model_copy(update={"owner": work.owner}),
            )  # fmt: skip
            self.context.send(to, orphan)

    def _exited(self, ref: Ref) -> bool:
        member = self.context.membership.get(ref)
        return member is not None and member.exited

    def neighbour(self, kind: str, host: str = "") -> Ref | None:
        """An actor of a kind on this host, or on the one that is named, if one is ready."""
        return next(iter(self.neighbours(kind, host)), None)

    def neighbours(self, kind: str, host: str = "") -> list[Ref]:
        """All actors of a kind that are ready on this host, or on the one that is named."""
        where = host or self.context.host
        return [one.ref for one in self.context.membership.members(kind) if one.host == where and not one.silent]
