"""The decode hop, destination side of a hand-off: lend blocks, start when they have arrived, quarantine when in doubt.

Reservations that do not fit wait: back-pressure, not an error. Among tenants whoever has the least running here goes
first, and of one tenant what came first. The end of a lease never frees
memory that the transfer actor can still write (R10): such blocks wait for its word, or for its confirmed exit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.work import Part, Work
from engine.core import EngineCore
from engine.sequence import Key
from kvstore.block import num_blocks_for
from schemas import messages as m
from schemas.errors import Cancelled, HeadraceError, InternalError, Unavailable
from schemas.record import Fence
from schemas.subjects import Ref

if TYPE_CHECKING:
    from actors.engine_host import EngineActor

ABORT_RESEND_S = 0.2
WHOLE = -1  # in place of a part's number: all parts of a request that moved


@dataclass(slots=True)
class _Abort:
    """A job that must be confirmed over before its blocks are free."""

    message: m.TransferAbort
    transfer: Ref | None
    next_send: float


def in_turn(tenants: Listing[str], running: Mapping[str, int], weights: Mapping[str, float]) -> list[tuple[float, int]]:
    """Return the first of each tenant in the order in which their reservations are tried, with what they have. Pure.

    Args:
        tenants: of those that wait, in order of arrival.
        running: requests of each tenant that run here.
        weights: of tenants; absent ones have 1.
    """
    firsts = {tenant: at for at, tenant in reversed(list(enumerate(tenants)))}
    return sorted((running.get(name, 0) / weights.get(name, 1.0), at) for name, at in firsts.items())


class Destination:
    """Hand-offs that arrive at this engine."""

    def __init__(self, engine: EngineActor) -> None:
        self._engine = engine
        self._queue: list[tuple[Work, Part]] = []
        self._asking: set[str] = set()  # tenants of which a part is asked for
        self._full: tuple[int, float] | None = None  # the step before which there was no room, and for whose turn
        self._aborts: dict[str, _Abort] = {}
        self._transfers: dict[str, Ref] = {}  # who performs a job, where that is known

    # --- reservations ---------------------------------------------------------------------------

    def on_reserve(self, msg: m.Reserve) -> None:
        """Lend blocks for a part, now or as soon as there is room."""
        engine = self._engine
        head = {"request_id": msg.request_id, "fence": msg.fence, "part": msg.part}
        if engine.thread is None or engine.state not in ("ready", "draining"):
            return  # repeated by the source
        if engine.state == "draining" and msg.request_id not in engine.works:
            error = Unavailable("this engine is draining", code="draining")
            engine.context.send(msg.source, m.Reserved(**head, error=error.info()))
            return
        if not engine.admit_fence(msg.request_id, msg.fence):
            closed = Cancelled("the request was closed here, or is held under a higher fence")
            engine.context.send(msg.source, m.Reserved(**head, error=closed.info()))
            return
        if msg.request_id not in engine.works and engine.full:
            error = Unavailable("this engine holds as many requests as it may", code="engine_full")
            engine.context.send(msg.source, m.Reserved(**head, error=error.info()))
            return
        work = engine.works.get(msg.request_id)
        if work is None:
            ids: list[list[int]] = [[] for _ in range(msg.record.num_choices)]
            work = Work(
                record=msg.record,
                fence=msg.fence,
                detok=msg.detokenize,
                owner=msg.record.owner,
                role="destination",
                ids=ids,
                num_parts=msg.parts,
            )
            engine.works[msg.request_id] = work
        if work.role != "destination":
            return
        part = work.parts.get(msg.part)
        if part is None:
            part = Part(msg.part, list(msg.choices), Key(msg.request_id, msg.choices[0]), msg.num_tokens)
            work.parts[msg.part] = part
            for choice, outputs in [*zip(msg.choices, msg.outputs, strict=True), *msg.rest]:
                work.ids[choice] = list(outputs)
                work.given[choice] = len(outputs)
            self._queue.append((work, part))
        part.source = msg.source
        if part.refs is not None:
            self._answer(work, part)
        self.retry()

    def retry(self) -> None:
        """Give blocks to those whose turn it is: the first part of each tenant asks, in turn."""
        if not self._queue:
            return
        self._queue = [entry for entry in self._queue if not self._over(*entry)]
        tenants = [work.record.tenant for work, _ in self._queue]
        if self._asking.issuperset(tenants):
            return
        running: Counter[str] = Counter()
        if len(set(tenants)) > 1:
            running.update(work.record.tenant for work in self._engine.works.values() if work.started)
        for turn, at in in_turn(tenants, running, self._engine.tenant_weights):
            if tenants[at] not in self._asking:
                self._ask(*self._queue[at], turn)

    def _ask(self, work: Work, part: Part, turn: float) -> None:
        tenant, thread = work.record.tenant, self._engine.thread
        assert thread is not None
        self._asking.add(tenant)

        def ask(core: EngineCore) -> tuple[list[int], list[m.BlockRef]] | None:
            step = thread.steps
            if self._full is not None and self._full[0] == step and self._full[1] < turn:
                return None  # somebody whose turn comes first waits for more room than there is
            blocks = core.reserve(part.key, part.num_tokens, len(part.choices), tenant=tenant)
            if blocks is None:
                self._full = step, turn
            return None if blocks is None else (blocks, core.pool.refs(blocks))

        self._engine.call(ask, lambda got, error: self._reserved(work, part, got, error))

    def _leave(self, part: Part) -> None:
        self._queue = [entry for entry in self._queue if entry[1] is not part]

    def _gone(self, work: Work, part: Part) -> bool:
        return self._engine.works.get(work.request_id) is not work or part.number not in work.parts

    def _over(self, work: Work, part: Part) -> bool:
        """Whether a part has to wait no longer: it has its blocks, is gone, or comes too late to be of use."""
        late = self._engine.clock.wall() > work.record.deadline > 0
        return part.refs is not None or late or self._gone(work, part)

    def _reserved(
        self, work: Work, part: Part, got: tuple[list[int], list[m.BlockRef]] | None, error: BaseException | None
    ) -> None:
        self._asking.discard(work.record.tenant)
        if self._gone(work, part):
            if got is not None and part.key.request_id not in self._engine.works:
                key = part.key
                self._engine.call(lambda core: core.abort(key))
            self.retry()
            return
        if error is not None:
            self._leave(part)
            head = {"request_id": work.request_id, "fence": work.fence, "part": part.number}
            known = error if isinstance(error, HeadraceError) else InternalError("the reservation failed")
            if part.source is not None:
                self._engine.context.send(part.source, m.Reserved(**head, error=known.info()))
        elif got is not None:
            self._leave(part)
            part.blocks, part.refs = got
            self._answer(work, part)
        else:
            return  # no room: asked again after the next step, or by `tick`
        self.retry()

    def _answer(self, work: Work, part: Part) -> None:
        engine = self._engine
        assert part.refs is not None and engine.pool is not None and part.source is not None
        reserved = m.Reserved(
            request_id=work.request_id,
            fence=work.fence,
            deadline=work.record.deadline,
            part=part.number,
            pool=engine.pool.handle(),
            blocks=part.refs,
        )
        engine.context.send(part.source, reserved)

    # --- arrivals -------------------------------------------------------------------------------

    def on_transferred(self, msg: m.Transferred) -> None:
        """A part's KV is here and verified: its sequences run from the next step on."""
        engine = self._engine
        head = {"request_id": msg.request_id, "fence": msg.fence, "part": msg.part}
        work = engine.works.get(msg.request_id)
        part = work.parts.get(msg.part) if work is not None else None
        if work is None or part is None or work.role != "destination" or msg.fence != work.fence:
            return  # closed or fenced here; its source is told by the owner
        if part.activated:
            engine.context.send(msg.source, m.Activated(**head))
            return
        if part.pending or part.blocks is None:
            return
        part.pending = True
        now, blocks = engine.clock.now(), part.blocks
        firsts = [int(f[0]) for f in msg.first]
        sequences = [
            work.sequence(choice, [*work.ids[choice], first], now)
            for choice, first in zip(part.choices, firsts, strict=True)
        ]
        num_tokens = msg.num_tokens

        def done(_: None, error: BaseException | None) -> None:
            part.pending = False
            if self._gone(work, part):
                return
            if error is not None:
                known = error if isinstance(error, HeadraceError) else InternalError("the hand-off failed")
                engine.context.telemetry.log.error("activation failed", request_id=msg.request_id, error=repr(error))
                engine.fail(work, known)
                return
            part.activated = True
            work.began = work.began or engine.clock.wall()
            engine.context.send(msg.source, m.Activated(**head))
            if work.started:
                started = m.Dispatched(request_id=work.request_id, fence=work.fence, started=True)
                engine.context.send(work.owner, started)
            engine.emit([work])

        # The ids are in place before the first step can add to them, and leave before the step that runs now is over.
        for choice, first in zip(part.choices, firsts, strict=True):
            work.ids[choice].append(first)
            work.given[choice] = len(work.ids[choice])
        work.found(part.choices[0], msg.cached_tokens)
        engine.emit([work])
        engine.call(lambda core: core.activate(sequences, blocks, num_tokens), done)

    def on_moved(self, msg: m.Moved) -> None:
        """A running request comes from another engine with all its blocks: it goes on here from the next step on."""
        engine = self._engine
        work = engine.works.get(msg.request_id)
        if work is None or work.role != "destination" or msg.fence != work.fence:
            return  # closed or fenced here; the source gives up by itself
        activated = m.Activated(request_id=msg.request_id, fence=msg.fence, part=WHOLE)
        if work.started:
            engine.context.send(msg.source, activated)
            return
        parts = [work.parts[number] for number in sorted(work.parts)]
        lent = [part.blocks for part in parts if part.blocks is not None and not part.pending]
        if len(lent) != work.num_parts or len(msg.num_tokens) != len(parts):
            return
        now = engine.clock.now()
        work.ids = [list(ids) for ids in msg.outputs]
        work.given = [len(ids) for ids in work.ids]  # the source computed them
        work.ends = {int(choice): str(reason) for choice, reason in msg.ends}
        work.acked, work.sent, work.unwanted = list(msg.acked), list(msg.acked), set(msg.unwanted)
        moves = []
        for part, blocks, num_tokens in zip(parts, lent, msg.num_tokens, strict=True):
            part.pending = True
            choice = part.choices[0]
            sequence = work.sequence(choice, work.ids[choice], now)
            moves.append((sequence, blocks[: num_blocks_for(num_tokens)], num_tokens))

        def activate(core: EngineCore) -> None:
            for sequence, blocks, num_tokens in moves:
                core.activate([sequence], blocks, num_tokens)

        def done(_: None, error: BaseException | None) -> None:
            if engine.works.get(work.request_id) is not work:
                return
            if error is not None:
                known = error if isinstance(error, HeadraceError) else InternalError("the move failed")
                engine.context.telemetry.log.error("a move failed", request_id=msg.request_id, error=repr(error))
                engine.fail(work, known)
                return
            for part in parts:
                part.pending, part.activated = False, True
            work.began = work.began or engine.clock.wall()
            engine.context.send(msg.source, activated)
            started = m.Dispatched(request_id=work.request_id, fence=work.fence, started=True)
            engine.context.send(work.owner, started)
            engine.emit([work])

        engine.call(activate, done)

    # --- endings --------------------------------------------------------------------------------

    def writing(self, work: Work, part: Part) -> bool:
        """Whether the transfer actor may still write into this part's blocks here."""
        return work.role == "destination" and part.refs is not None and not part.activated

    def expect_job(self, job: str, transfer: Ref) -> None:
        """Remember who performs a job of this engine's."""
        self._transfers[job] = transfer

    def abort_transfer(self, work: Work, part: Part) -> None:
        """Ask that a job be given up; repeated until it is confirmed."""
        self.abort_job(work.job(part), work.request_id, work.fence)

    def abort_job(self, job: str, request_id: str, fence: Fence) -> None:
        """Ask that a job be given up by name; `settled` and `writer_gone` say when it is over."""
        engine = self._engine
        transfer = self._transfers.get(job) or engine.neighbour("transfer")
        message = m.TransferAbort(request_id=request_id, fence=fence, job=job)
        self._aborts[job] = _Abort(message, transfer, engine.clock.now() + ABORT_RESEND_S)
        if transfer is not None:
            engine.context.send(transfer, message)

    def settled(self, job: str) -> bool:
        """A job is over; true if blocks have waited for that."""
        self._transfers.pop(job, None)
        return self._aborts.pop(job, None) is not None

    def writer_gone(self, transfer: Ref) -> list[str]:
        """A transfer actor has exited for sure; returns the jobs that can write no more."""
        jobs = [job for job, abort in self._aborts.items() if abort.transfer == transfer]
        for job in jobs:
            del self._aborts[job]
        self._transfers = {job: ref for job, ref in self._transfers.items() if ref != transfer}
        return jobs

    def tick(self, now: float) -> None:
        """Repeat aborts; look for room again."""
        for job, abort in self._aborts.items():
            if now >= abort.next_send:
                abort.next_send = now + ABORT_RESEND_S
                if abort.transfer is None:
                    abort.transfer = self._engine.neighbour("transfer")
                if abort.transfer is not None:
                    self._engine.context.send(abort.transfer, self._aborts[job].message)
        self.retry()
