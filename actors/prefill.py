"""The prefill hop, source side of a hand-off: reserve at the destination, compute, ship, and free once it has started.

`Reserve` goes out when the prompt begins, so that the answer is there when it is computed. Blocks stay pinned until
`Activated`: only then does the other engine have them for sure. Everything unanswered is repeated.

A destination on another host fetches: its transfer actor gets the job, and the one here serves the blocks meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.work import Part, Work
from engine.live import HeldBlocks
from engine.plan import Sampled
from engine.sequence import Key
from schemas import messages as m
from schemas.errors import Unavailable, from_info
from schemas.subjects import Ref

if TYPE_CHECKING:
    from actors.engine_host import EngineActor

RESERVE_RESEND_S = 0.3
JOB_RESEND_S = 0.5
SERVE_S = 10.0  # renewed with each repeat of the job
MAX_SERVED = 4096


class Source:
    """Hand-offs that leave this engine."""

    def __init__(self, engine: EngineActor) -> None:
        self._engine = engine
        self._served: dict[str, Ref] = {}  # jobs to other hosts, and who serves their blocks here

    def reserve(self, work: Work) -> None:
        """Ask the destination for blocks, for every part that has none."""
        engine = self._engine
        assert work.decode is not None
        for part in work.parts.values():
            if part.reserved is None:
                part.next_send = engine.clock.now() + RESERVE_RESEND_S
                engine.context.send(work.decode, self._reserve_message(work, part))

    def _reserve_message(self, work: Work, part: Part) -> m.Reserve:
        return m.Reserve(
            request_id=work.request_id,
            fence=work.fence,
            deadline=work.record.deadline,
            traceparent=work.record.traceparent,
            record=work.record,
            part=part.number,
            parts=work.num_parts,
            num_tokens=part.num_tokens,
            choices=part.choices,
            outputs=[work.ids[c] for c in part.choices],
            detokenize=work.detok,
            source=self._engine.ref,
            rest=work.rest() if part.number == 0 else [],
        )

    def on_reserved(self, msg: m.Reserved) -> None:
        """The destination has blocks, or never will."""
        work = self._engine.works.get(msg.request_id)
        if work is None or work.fence != msg.fence or work.role != "source":
            return
        part = work.parts.get(msg.part)
        if part is None or part.reserved is not None:
            return
        if msg.error is not None:
            self._engine.fail(work, from_info(msg.error))
            return
        part.reserved = msg
        self._ship(work, part)

    def on_held(self, work: Work, key: Key, sampled: list[Sampled], blocks: HeldBlocks) -> None:
        """A prompt is computed and its first ids are chosen."""
        engine = self._engine
        for part in work.parts.values():
            if part.key == key:
                part.held, part.held_blocks = sampled, blocks
                work.found(part.choices[0], blocks.num_cached)
                engine.context.telemetry.hop(
                    "hop.prefill",
                    work.record.traceparent,
                    work.began,
                    engine.clock.wall(),
                    request_id=work.request_id,
                    num_tokens=blocks.num_tokens,
                    cached_tokens=blocks.num_cached,
                )
                self._ship(work, part)

    def _ship(self, work: Work, part: Part) -> None:
        engine = self._engine
        if part.held is None or part.held_blocks is None or part.reserved is None or part.activated:
            return
        part.next_send = engine.clock.now() + JOB_RESEND_S
        if part.transfer is not None and not engine.context.membership.is_up(part.transfer):
            # It may have moved the blocks already, and the destination may use them: another actor, which does not
            # know, would write over what was added since. A new try gets new blocks.
            engine.fail(work, Unavailable("the transfer actor of this hand-off is gone", code="transfer_lost"))
            return
        pool = part.reserved.pool
        transfer = part.transfer or (engine.neighbour("transfer", pool.host) if pool is not None else None)
        if transfer is None or pool is None or engine.pool is None or work.decode is None:
            return  # repeated by `tick`
        if pool.host != engine.context.host:
            self.serve(work.job(part), part.held_blocks.refs)
        part.transfer = transfer
        engine.destination.expect_job(work.job(part), transfer)
        job = m.TransferJob(
            request_id=work.request_id,
            fence=work.fence,
            deadline=work.record.deadline,
            traceparent=work.record.traceparent,
            job=work.job(part),
            part=part.number,
            source=engine.ref,
            dest=work.decode,
            source_pool=engine.pool.handle(),
            dest_pool=pool,
            source_blocks=part.held_blocks.refs,
            dest_blocks=part.reserved.blocks,
            first=[[s.id, None] for s in part.held],
            num_tokens=part.held_blocks.num_tokens,
            cached_tokens=work.cached[part.choices[0] // work.record.n],
        )
        engine.context.send(transfer, job)

    def serve(self, job: str, refs: list[m.BlockRef]) -> None:
        """Have the transfer actor of this host serve a hand-off's blocks to that of the destination's host."""
        engine = self._engine
        here = engine.neighbour("transfer")
        if here is None or engine.pool is None:
            return  # the job fails, or is repeated
        self._served[job] = here
        while len(self._served) > MAX_SERVED:
            del self._served[next(iter(self._served))]
        grant = m.TransferGrant(ticket=job, pool=engine.pool.handle(), blocks=refs, lease_s=SERVE_S)
        engine.context.send(here, grant)

    def served(self, job: str) -> None:
        """A job is over: its blocks are served no longer."""
        here = self._served.pop(job, None)
        if here is not None:
            self._engine.context.send(here, m.TransferGrant(ticket=job))

    def on_transfer_done(self, msg: m.TransferDone) -> None:
        """The copy is over. A failed one ends this try; the owner places the request again."""
        work = self._engine.works.get(msg.request_id)
        if work is None or work.role != "source" or msg.error is None or msg.fence != work.fence:
            return
        self._engine.fail(work, from_info(msg.error))

    def on_activated(self, msg: m.Activated) -> None:
        """The destination has started a part: its blocks here become cached, and with the last one the work is done."""
        engine = self._engine
        work = engine.works.get(msg.request_id)
        if work is None or work.role != "source" or msg.fence != work.fence:
            return
        part = work.parts.get(msg.part)
        if part is None or part.activated:
            return
        if msg.error is not None:
            engine.fail(work, from_info(msg.error))
            return
        part.activated = True
        key = part.key
        engine.call(lambda core: core.release(key))
        if all(p.activated for p in work.parts.values()):
            engine.works.pop(work.request_id, None)

    def writing(self, work: Work, part: Part) -> bool:
        """Whether the transfer actor may still read this part's blocks here."""
        return work.role == "source" and part.transfer is not None and not part.activated

    def transfer_down(self, transfer: Ref) -> None:
        """Look at its hand-offs at the next tick."""
        for work in self._engine.works.values():
            for part in work.parts.values():
                if part.transfer == transfer:
                    part.next_send = 0.0

    def tick(self, now: float) -> None:
        """Repeat reservations and jobs."""
        for work in list(self._engine.works.values()):
            if work.role != "source" or work.error is not None:
                continue
            for part in work.parts.values():
                if now < part.next_send or part.activated:
                    continue
                if part.reserved is None:
                    part.next_send = now + RESERVE_RESEND_S
                    assert work.decode is not None
                    self._engine.context.send(work.decode, self._reserve_message(work, part))
                else:
                    self._ship(work, part)
