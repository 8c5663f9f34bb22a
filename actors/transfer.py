"""The transfer hop: moves blocks between pools and verifies them. One per host; a job is a transaction.

Pools of this host are mapped; a source on another one is fetched from (`actors.transfer_peers`), by the transfer actor
of the host that the blocks go to.

A repeated job is answered again, not done again. After `TransferAbort` is answered no write of that job can follow,
also if the job itself arrives later.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

from actors.transfer_peers import PeerConfig, Peers, num_arrived
from kvstore.errors import KvError, TransferCorrupt
from kvstore.exports import copy_exported, open_pool
from runtime.actor import Actor, Context
from runtime.background import background_pool
from schemas import messages as m
from schemas.errors import Cancelled, HeadraceError, Unavailable
from schemas.subjects import Ref

MAX_JOBS = 1024
REMEMBERED = 4096


@dataclass(slots=True)
class _Running:
    job: m.TransferJob
    until: float = float("inf")  # monotonic; nobody wants it later
    stop: bool = False
    aborted_by: list[Ref] = field(default_factory=list)


class TransferActor(Actor):
    """Copies in worker threads, so that the loop never waits for memory."""

    kind: ClassVar[str] = "transfer"

    def __init__(
        self, context: Context, *, threads: int = 1, peers: PeerConfig | None = None, verify: bool = True
    ) -> None:
        super().__init__(context)
        self._peers = Peers(context, peers or PeerConfig("off"))
        self._verify = verify  # false for tests that must then find wrong bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="transfer")
        self._behind = background_pool("transfer-behind")  # what is stored: no prompt waits for it, nor behind it
        self._running: dict[str, _Running] = {}
        self._over: OrderedDict[str, tuple[m.TransferDone, m.Transferred | None]] = OrderedDict()
        self._dests: dict[str, Ref] = {}
        telemetry = context.telemetry
        self._bytes = telemetry.counter("transfer_bytes_total", "Bytes copied and verified")
        self._jobs = telemetry.counter("transfer_jobs_total", "Jobs by how they ended", ("outcome",))
        self._packed = telemetry.counter("transfer_packed_blocks_total", "Blocks packed for a store, or unpacked")
        self._seconds = telemetry.histogram(
            "transfer_seconds", "Time to copy and verify one job",
            buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.02, 0.1, 0.5),
        )  # fmt: skip

    async def stop(self) -> None:
        """End the worker threads after the job in progress."""
        for running in self._running.values():
            running.stop = True
        for pool in (self._pool, self._behind):
            pool.shutdown(wait=True, cancel_futures=True)
        await asyncio.get_running_loop().run_in_executor(None, self._peers.stop)

    @property
    def idle(self) -> bool:
        """Whether no job is in progress."""
        return not self._running

    def load(self) -> dict[str, Any]:
        """Jobs in progress."""
        requests = [r.job.request_id for r in self._running.values()][:64]
        load: dict[str, Any] = {"running": len(self._running), "waiting": 0, "requests": requests}
        return {**load, "listens": self._peers.address} if self._peers.address else load

    def statistics(self) -> dict[str, float]:
        """What goes to and comes from other hosts."""
        return self._peers.statistics()

    def tick(self) -> None:
        """Listen for other hosts when it is time to."""
        self._peers.tick(self.clock.now())

    def member_down(self, ref: Ref, reason: str) -> None:
        """What it lent is served no longer, and nothing is fetched from it."""
        self._peers.member_down(ref, reason)

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        """Take a job, or give one up."""
        match message:
            case m.TransferJob():
                self._start(message)
            case m.TransferAbort():
                if sender is not None:
                    self._abort(message, sender)
            case m.TransferGrant():
                self._peers.on_grant(message)
            case m.PeerQuery():
                self._peers.on_query(message)
            case m.PeerKey():
                self._peers.on_key(message, sender)
            case _:
                self.context.telemetry.log.warning("unexpected message", type=type(message).__name__)

    def _start(self, job: m.TransferJob) -> None:
        stem = stem_of(job.job)
        if job.job not in self._over and stem != job.job and stem in self._over:
            error = Cancelled("the move that this is a part of was aborted").info()
            head = {"request_id": job.request_id, "fence": job.fence, "job": job.job, "part": job.part}
            self._remember(job.job, m.TransferDone(**head, error=error), None)
        if job.job in self._over:
            self._answer(job.job, [job.source])
            return
        if job.job in self._running or len(self._running) >= MAX_JOBS:
            return  # repeated by its source
        left_s = job.deadline - self.clock.wall() if job.deadline else float("inf")
        running = _Running(job, until=self.clock.now() + left_s)
        self._running[job.job] = running
        self.context.spawn(self._run(running), name=f"transfer {job.job}")

    def _abort(self, msg: m.TransferAbort, sender: Ref) -> None:
        # A move copies in several jobs, `<name>/<number>`; who lends the blocks knows the name alone.
        pieces = [r for name, r in self._running.items() if name != msg.job and stem_of(name) == msg.job]
        for piece in pieces:
            piece.stop = True
        running = self._running.get(msg.job)
        if running is not None:
            running.stop = True
            running.aborted_by.append(sender)
            return  # answered when the copy has really ended
        if msg.job not in self._over:
            error = Cancelled("aborted before it began").info()
            done = m.TransferDone(request_id=msg.request_id, fence=msg.fence, job=msg.job, part=0, error=error)
            self._remember(msg.job, done, None)
        if not pieces:  # else a repeat of the abort is answered, once their copies have really ended
            self.context.send(sender, self._over[msg.job][0])

    async def _run(self, running: _Running) -> None:
        job = running.job

        def unwanted() -> bool:
            return running.stop or self.clock.now() >= running.until

        began, wall = self.clock.now(), self.clock.wall()
        error: HeadraceError | None = None
        checksums: list[int] = []
        here = job.source_pool.host == self.context.host
        try:
            if here:
                pool = self._behind if job.dest.kind == "kv" else self._pool
                checksums = await asyncio.get_running_loop().run_in_executor(pool, _copy, running, unwanted)
            else:
                checksums = await self._peers.fetch(job, unwanted)
        except (KvError, OSError, ValueError) as exc:
            code = "corrupt_block" if isinstance(exc, TransferCorrupt) and not here else "transfer_failed"
            error = Unavailable(f"blocks could not be moved: {exc}", code=code)
            if isinstance(exc, KvError) and not here and job.expected:
                checksums = list(exc.arrived)
        elapsed = self.clock.now() - began
        if self._verify and job.expected and not error and checksums != job.expected:
            error = Unavailable("a stored block is not what was stored", code="corrupt_block")
        came = len(job.source_blocks) if error is None else 0 if here else num_arrived(checksums)
        nbytes = came * job.source_pool.block_nbytes
        head = {
            "request_id": job.request_id,
            "fence": job.fence,
            "deadline": job.deadline,
            "traceparent": job.traceparent,
            "job": job.job,
            "part": job.part,
        }
        done = m.TransferDone(
            **head,
            error=error.info() if error else None,
            checksums=checksums,  # of a copy that was made, also if it is not what was expected, or only a part
            nbytes=nbytes,
            elapsed_s=elapsed,
        )
        moved = None
        if job.first and error is None:
            moved = m.Transferred(
                **head, source=job.source, first=job.first, num_tokens=job.num_tokens, cached_tokens=job.cached_tokens
            )
        del self._running[job.job]
        self._remember(job.job, done, moved, job.dest)
        self._bytes.inc(nbytes)
        if error is None and job.source_pool.layout != job.dest_pool.layout:
            self._packed.inc(len(job.source_blocks))
        self._seconds.observe(elapsed)
        self._jobs.labels(error.code or "error" if error else "ok").inc()
        if job.traceparent:
            self.context.telemetry.hop(
                "hop.transfer", job.traceparent, wall, wall + elapsed, request_id=job.request_id, nbytes=nbytes
            )
        self._answer(job.job, [job.source, *running.aborted_by])

    def _remember(self, job: str, done: m.TransferDone, moved: m.Transferred | None, dest: Ref | None = None) -> None:
        self._over[job] = (done, moved)
        if dest is not None:
            self._dests[job] = dest
        while len(self._over) > REMEMBERED:
            old, _ = self._over.popitem(last=False)
            self._dests.pop(old, None)

    def _answer(self, job: str, to: list[Ref]) -> None:
        done, moved = self._over[job]
        dest = self._dests.get(job)
        if moved is not None and dest is not None:
            self.context.send(dest, moved)
        for ref in dict.fromkeys(to):
            self.context.send(ref, done)


def _copy(running: _Running, unwanted: Callable[[], bool]) -> list[int]:
    job = running.job
    source, dest = open_pool(job.source_pool), open_pool(job.dest_pool)
    return copy_exported(source, job.source_blocks, dest, job.dest_blocks, should_stop=unwanted)


def stem_of(job: str) -> str:
    """Return the name that the pieces of one move share; other jobs are their own."""
    return job.partition("/")[0]
