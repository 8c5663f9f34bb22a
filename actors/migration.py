"""A running request moves to another engine: the source's side. The destination's is `Destination.on_moved`.

While its sequences go on decoding here, their full blocks are copied, which do not change any more; what was added
meanwhile is copied in further rounds. When little is left the sequences are taken out of the steps, the last blocks
follow, and `Moved` hands over the ids. The two engines run it under different fences, so whatever is lost or late, the
detokenizer takes the ids of one of them. Until `Moved` is sent any failure leaves the request where it is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from actors.work import Part, Work
from engine.core import Progress
from engine.sequence import Key
from kvstore.block import num_blocks_for
from schemas import messages as m
from schemas.record import Fence
from schemas.subjects import Ref

if TYPE_CHECKING:
    from actors.engine_host import EngineActor

WHOLE = -1
SLACK_TOKENS = 64  # what may be decoded between the reservation and the switch; beyond it the move is given up
SWITCH_BLOCKS = 4  # so few blocks, of all sequences, are copied while they wait: less than a step takes
MAX_ROUNDS = 6
FINISH_TOKENS = 8  # who needs no more than that is done before it has moved
RESERVE_RESEND_S = 0.3
STAGE_LIMIT_S = 5.0  # for a prompt to be computed, room to be found, a round to be copied
MOVED_RESEND_S = 0.1
MOVED_LIMIT_S = 1.0  # the other engine's answer; it is up, and needs one pass of its loop
REMEMBERED = 1024
MAX_MOVES = 64

Outcome = Literal["moved", "kept", "unfit", "doubtful"]


@dataclass(slots=True)
class _Sequence:
    """One choice on its way."""

    part: Part
    copied: dict[int, m.BlockRef] = field(default_factory=dict)  # by place in the sequence: what lies there already
    sending: dict[int, m.BlockRef] = field(default_factory=dict)
    num_tokens: int = 0  # computed, at the switch


@dataclass(slots=True)
class _Move:
    work: Work
    to: Ref
    fence: Fence  # of the destination
    owner: Ref
    sequences: dict[Key, _Sequence]
    until: float
    stage: Literal["waiting", "reserving", "copying", "switching", "moved"] = "waiting"
    round: int = 0
    jobs: dict[str, m.TransferJob] = field(default_factory=dict)
    asking: bool = False  # a question is with the engine
    began: float = 0.0
    paused_at: float = 0.0
    steps: int = 0
    message: m.Moved | None = None
    next_send: float = 0.0


class Migration:
    """Requests that leave this engine while they run."""

    def __init__(self, engine: EngineActor) -> None:
        self._engine = engine
        self._moves: dict[str, _Move] = {}
        self._outcomes: OrderedDict[str, tuple[Fence, Outcome]] = OrderedDict()
        telemetry = engine.context.telemetry
        self._ended = telemetry.counter("migrations_total", "Moves of running requests off this engine", ("outcome",))
        self._blocks = telemetry.counter("migration_blocks_total", "Blocks copied for moves", ("when",))
        self._pause = telemetry.histogram(
            "migration_pause_seconds", "Time in which a moving request was in no engine's steps",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._moves)

    # --- what the owner asks --------------------------------------------------------------------

    def begin(self, msg: m.Migrate) -> None:
        """Start a move, or say how it ended."""
        move = self._moves.get(msg.request_id)
        if move is not None and move.fence == msg.next:
            if not self._engine.context.membership.is_up(move.to):
                self._give_up(move, "doubtful" if move.stage == "moved" else "unfit")
            return
        known = self._outcomes.get(msg.request_id)
        if known is not None and known[0] == msg.next:
            self._answer(msg.reply, msg.request_id, msg.fence, *known)
            return
        if move is not None:
            self._give_up(move, "kept", silent=True)
        work = self._engine.works.get(msg.request_id)
        fit = work is not None and work.fence == msg.fence and work.started and work.error is None
        if work is None or not fit or self._engine.thread is None or len(self._moves) >= MAX_MOVES:
            self._end(msg.reply, msg.request_id, msg.fence, msg.next, "unfit")
            return
        live = [c for c in range(len(work.ids)) if c not in work.ends and c not in work.unwanted]
        left = [work.record.sampling.max_tokens - len(work.ids[c]) for c in live]
        if all(tokens <= FINISH_TOKENS for tokens in left):
            self._end(msg.reply, msg.request_id, msg.fence, msg.next, "kept")
            return
        sequences = {}
        for number, choice in enumerate(live):
            key = Key(msg.request_id, choice)
            sequences[key] = _Sequence(Part(number, [choice], key, 0))
        now = self._engine.clock.now()
        move = _Move(work, msg.to, msg.next, msg.reply, sequences, now + STAGE_LIMIT_S, began=now)
        self._moves[msg.request_id] = move
        self._look(move)

    # --- room, and rounds of copies -------------------------------------------------------------

    def _look(self, move: _Move) -> None:
        """See how far the sequences are, and do what comes next."""
        if move.asking:
            return
        move.asking = True
        keys = list(move.sequences)

        def then(found: dict[Key, Progress] | None, error: BaseException | None) -> None:
            move.asking = False
            if self._moves.get(move.work.request_id) is not move:
                return
            if found is None or len(found) != len(keys):
                self._give_up(move, "kept" if found is not None else "unfit")  # one has just ended, the rest goes on
            elif move.stage == "waiting":
                self._ask_for_room(move, found)
            elif move.stage == "copying":
                self._next_round(move, found)

        self._engine.call(lambda core: core.progress(keys), then)

    def _ask_for_room(self, move: _Move, found: dict[Key, Progress]) -> None:
        if any(not one.decoding and not one.num_computed for one in found.values()):
            self._give_up(move, "unfit")  # it waits for its turn: nothing is lost if it waits elsewhere
            return
        if not all(one.decoding for one in found.values()):
            return  # a prompt is being computed: looked at again by `tick`
        for key, one in found.items():
            move.sequences[key].part.num_tokens = one.num_tokens + SLACK_TOKENS
        move.stage, move.until = "reserving", self._engine.clock.now() + STAGE_LIMIT_S
        self._reserve(move)

    def _reserve(self, move: _Move) -> None:
        work, engine = move.work, self._engine
        move.next_send = engine.clock.now() + RESERVE_RESEND_S
        for sequence in move.sequences.values():
            part = sequence.part
            if part.reserved is not None:
                continue
            message = m.Reserve(
                request_id=work.request_id,
                fence=move.fence,
                deadline=work.record.deadline,
                traceparent=work.record.traceparent,
                record=work.record.model_copy(update={"owner": move.owner}),  # who commands it now
                part=part.number,
                parts=len(move.sequences),
                num_tokens=part.num_tokens,
                choices=part.choices,
                outputs=[work.ids[c] for c in part.choices],
                detokenize=work.detok,
                source=engine.ref,
            )
            engine.context.send(move.to, message)

    def on_reserved(self, msg: m.Reserved) -> bool:
        """The destination has room, or never will; false if this is about no move."""
        move = self._moves.get(msg.request_id)
        if move is None or move.fence != msg.fence:
            return False
        if msg.error is not None or msg.pool is None:
            self._give_up(move, "unfit")
            return True
        for sequence in move.sequences.values():
            if sequence.part.number == msg.part and sequence.part.reserved is None:
                sequence.part.reserved = msg
        if move.stage == "reserving" and all(s.part.reserved is not None for s in move.sequences.values()):
            move.stage, move.until = "copying", self._engine.clock.now() + STAGE_LIMIT_S
            self._look(move)
        return True

    def _next_round(self, move: _Move, found: dict[Key, Progress]) -> None:
        """Copy full blocks while the sequences go on, or switch when that leaves little to copy."""
        missing = {key: _missing(move.sequences[key], one.refs) for key, one in found.items()}
        if sum(map(len, missing.values())) <= SWITCH_BLOCKS or move.round >= MAX_ROUNDS:
            self._switch(move)
        else:
            self._copy(move, missing, "running")

    def _switch(self, move: _Move) -> None:
        """Take the sequences out of the steps and copy the rest."""
        move.stage, move.until = "switching", self._engine.clock.now() + STAGE_LIMIT_S
        move.paused_at = self._engine.clock.now()
        keys = list(move.sequences)

        def then(found: dict[Key, Progress] | None, error: BaseException | None) -> None:
            if self._moves.get(move.work.request_id) is not move:
                return  # given up meanwhile, and resumed then
            if found is None or len(found) != len(keys):
                self._give_up(move, "unfit" if found is None else "kept")
                return
            missing = {}
            for key, one in found.items():
                sequence = move.sequences[key]
                reserved = sequence.part.reserved
                sequence.num_tokens = one.num_computed
                if reserved is None or num_blocks_for(one.num_computed) > len(reserved.blocks):
                    self._give_up(move, "unfit")
                    return
                missing[key] = _missing(sequence, one.refs)
            if any(missing.values()):
                self._copy(move, missing, "paused")
            else:
                self._hand_over(move)

        self._engine.call(lambda core: core.suspend(keys), then)

    def _copy(self, move: _Move, missing: dict[Key, dict[int, m.BlockRef]], when: str) -> None:
        engine, work = self._engine, move.work
        move.round += 1
        move.jobs.clear()
        move.next_send = engine.clock.now() + RESERVE_RESEND_S
        for key, places in missing.items():
            sequence = move.sequences[key]
            reserved = sequence.part.reserved
            sequence.sending = places
            if not places:
                continue
            assert reserved is not None and reserved.pool is not None and engine.pool is not None
            transfer = engine.neighbour("transfer", reserved.pool.host)
            if transfer is None or max(places) >= len(reserved.blocks):
                self._give_up(move, "unfit")
                return
            name = f"{work.request_id}.{sequence.part.number}.{move.fence.label}/{move.round}"
            job = m.TransferJob(
                request_id=work.request_id,
                fence=move.fence,
                deadline=work.record.deadline,
                traceparent=work.record.traceparent,
                job=name,
                part=sequence.part.number,
                source=engine.ref,
                dest=move.to,
                source_pool=engine.pool.handle(),
                dest_pool=reserved.pool,
                source_blocks=list(places.values()),
                dest_blocks=[reserved.blocks[place] for place in places],
            )
            sequence.part.transfer = transfer
            move.jobs[name] = job
            if reserved.pool.host != engine.context.host:
                engine.source.serve(name, job.source_blocks)
            engine.context.send(transfer, job)
            self._blocks.labels(when).inc(len(places))

    def on_transfer_done(self, msg: m.TransferDone) -> bool:
        """A piece has been copied; false if it is of no move."""
        move = self._moves.get(msg.request_id)
        if move is None or msg.job not in move.jobs:
            return "/" in msg.job  # of a move that is over
        if msg.error is not None:
            self._give_up(move, "unfit")
            return True
        del move.jobs[msg.job]
        if not move.jobs:
            for sequence in move.sequences.values():
                sequence.copied |= sequence.sending
                sequence.sending = {}
            if move.stage == "copying":
                self._look(move)
            elif move.stage == "switching":
                self._hand_over(move)
        return True

    # --- the switch -----------------------------------------------------------------------------

    def _hand_over(self, move: _Move) -> None:
        """Everything lies at the destination: it goes on."""
        work, now = move.work, self._engine.clock.now()
        move.stage, move.until = "moved", now + MOVED_LIMIT_S
        move.message = m.Moved(
            request_id=work.request_id,
            fence=move.fence,
            deadline=work.record.deadline,
            traceparent=work.record.traceparent,
            source=self._engine.ref,
            outputs=work.ids,
            acked=work.acked,
            num_tokens=[s.num_tokens for s in sorted(move.sequences.values(), key=lambda s: s.part.number)],
            ends=[[choice, reason] for choice, reason in work.ends.items()],
            unwanted=sorted(work.unwanted),
        )
        move.next_send = now + MOVED_RESEND_S
        self._engine.context.send(move.to, move.message)

    def on_activated(self, msg: m.Activated) -> bool:
        """The destination goes on: nothing is left here. False if this is about no move."""
        if msg.part != WHOLE:
            return False
        if self.handed_over(msg.request_id, msg.fence):
            self._engine.close(msg.request_id, msg.fence, None, below=True)
        return True

    def handed_over(self, request_id: str, fence: Fence) -> bool:
        """Whether this is the fence under which a request goes on elsewhere; its move is done then.

        The destination says so, or the owner, whose `Close` may come before the destination's word is repeated.
        """
        move = self._moves.get(request_id)
        if move is None or move.stage != "moved" or move.fence != fence:
            return False
        del self._moves[request_id]
        self._pause.observe(self._engine.clock.now() - move.paused_at)
        self._end(move.owner, request_id, move.work.fence, move.fence, "moved")
        return True

    # --- endings --------------------------------------------------------------------------------

    def forget(self, work: Work) -> None:
        """The request is closed or commanded anew here: its move is void."""
        move = self._moves.get(work.request_id)
        if move is not None and move.work is work:
            self._give_up(move, "kept")

    def _give_up(self, move: _Move, outcome: Outcome, *, silent: bool = False) -> None:
        """Leave the request here, where it goes on; the destination drops what it has of it."""
        request_id, keys = move.work.request_id, list(move.sequences)
        del self._moves[request_id]
        if move.stage in ("switching", "moved"):
            self._engine.call(lambda core: core.resume(keys))
        if move.stage != "waiting":
            close = m.Close(request_id=request_id, fence=move.fence, reason="source")
            self._engine.context.send(move.to, close)
        if silent:
            self._ended.labels(outcome).inc()
        else:
            self._end(move.owner, request_id, move.work.fence, move.fence, outcome)

    def _end(self, owner: Ref, request_id: str, fence: Fence, next_: Fence, outcome: Outcome) -> None:
        self._ended.labels(outcome).inc()
        self._outcomes[request_id] = (next_, outcome)
        self._outcomes.move_to_end(request_id)
        while len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)
        self._answer(owner, request_id, fence, next_, outcome)

    def _answer(self, owner: Ref, request_id: str, fence: Fence, next_: Fence, outcome: Outcome) -> None:
        message = m.Migrated(request_id=request_id, fence=fence, next=next_, outcome=outcome)
        self._engine.context.send(owner, message)

    def member_down(self, ref: Ref) -> None:
        """The destination, or who copies to it, is gone."""
        for move in list(self._moves.values()):
            if ref == move.to or any(s.part.transfer == ref for s in move.sequences.values() if move.jobs):
                self._give_up(move, "doubtful" if move.stage == "moved" else "unfit")

    def tick(self, now: float) -> None:
        """Repeat what is unanswered, and give up what takes too long."""
        for move in list(self._moves.values()):
            if now >= move.until:
                self._give_up(move, "doubtful" if move.stage == "moved" else "unfit")
            elif move.stage == "waiting":
                self._look(move)
            elif now < move.next_send:
                continue
            elif move.stage == "reserving":
                self._reserve(move)
            elif move.stage == "moved" and move.message is not None:
                move.next_send = now + MOVED_RESEND_S
                self._engine.context.send(move.to, move.message)
            else:
                move.next_send = now + RESERVE_RESEND_S
                for job in move.jobs.values():
                    transfer = self._engine.neighbour("transfer", job.dest_pool.host)
                    if transfer is not None:
                        self._engine.context.send(transfer, job)


def _missing(sequence: _Sequence, refs: list[m.BlockRef]) -> dict[int, m.BlockRef]:
    """Return the blocks that do not lie at the destination, by their place.

    One that still has the generation under which it was copied was held all the time, and full blocks do not change;
    after a preemption all have new generations and are copied again. A last block that was copied half full is not in
    the ledger: only full ones are copied before the switch.
    """
    return {place: ref for place, ref in enumerate(refs) if sequence.copied.get(place) != ref}
