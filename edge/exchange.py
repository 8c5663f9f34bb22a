"""The bus side of the edge: submits requests, receives their frames, acknowledges, cancels, and ends what is late."""

from __future__ import annotations

import asyncio
from typing import Any

from edge.goodput import Goodput
from edge.inflight import CREDIT, Inflight, Verdict
from edge.metrics import EdgeMetrics
from edge.submission import ACCEPT_BY_S, CANCEL_LIMIT_S, Cancelling, Submission
from runtime.actor import Context
from schemas.errors import Cancelled, DeadlineExceeded, HeadraceError, Overloaded, TooLarge, Unavailable
from schemas.items import ACKS, Ack, acks_body
from schemas.messages import CancelAck, Close, Submit, SubmitCancel
from schemas.openai import ParsedRequest
from schemas.record import Fence, ReplyTo
from schemas.subjects import Ref
from schemas.tenants import DEFAULT_TENANT

DEADLINE_GRACE_S = 0.7  # R4: everybody before the edge has had its chance to end the request
ACK_EVERY_S = 0.1  # well below the time after which senders repeat
NEAR_OPEN = 4  # with fewer requests open, this node's own admission is asked; with more, the work is spread
MAX_OPEN = 4096
MAX_CANCELLING = 16_384


class OpenRequest:
    """One HTTP request on its way: its state on the bus, and a wake-up for whoever answers it."""

    def __init__(
        self, request_id: str, parsed: ParsedRequest, body: dict[str, Any], *, now: float, deadline: float
    ) -> None:
        self.id = request_id
        self.parsed = parsed
        self.body = body
        self.inflight = Inflight(request_id, parsed.num_choices)
        self.submission = Submission(now)
        self.received_at = now
        self.ends_at = deadline
        self.deadline_wall = 0.0
        self.created = 0
        self.seed = 0
        self.request_class = "interactive"
        self.tenant = DEFAULT_TENANT
        self.traceparent = ""
        self.sender: Ref | None = None
        self.last_item_at: dict[int, float] = {}
        self.acked = [0] * parsed.num_choices
        self.acked_window = CREDIT
        self.acked_at = now
        self.left = False
        self.alone = False  # no other request was open here in all its time
        self.first_at = 0.0
        self.last_at = 0.0
        self.num_items = 0
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Let `wait` return."""
        self._wake.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until something has come, the request has ended, or the client has left; False after `timeout_s`."""
        if not self._wake.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return False
        self._wake.clear()
        return True


class Exchange:
    """All open requests of one edge."""

    def __init__(
        self, context: Context, metrics: EdgeMetrics, *, max_open: int = MAX_OPEN, goodput: Goodput | None = None
    ) -> None:
        self._context = context
        self._goodput = goodput if goodput is not None else Goodput(context.telemetry)
        self._metrics = metrics
        self._max_open = max_open
        self._open: dict[str, OpenRequest] = {}
        self._cancelling: dict[str, Cancelling] = {}
        self._acks: dict[Ref, dict[str, Ack]] = {}
        self._flush_scheduled = False
        self._turn = 0

    # --- questions -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unaccepted(self) -> int:
        """Open requests that nobody has accepted yet."""
        return sum(r.inflight.accepted is None for r in self._open.values())

    @property
    def oldest_age_s(self) -> float:
        """Age of the oldest open request."""
        now = self._context.clock.now()
        return max((now - r.received_at for r in self._open.values()), default=0.0)

    # --- from HTTP -------------------------------------------------------------------------------------

    def open(
        self,
        parsed: ParsedRequest,
        body: dict[str, Any],
        *,
        received_at: float,
        deadline_s: float,
        request_class: str,
        traceparent: str,
        tenant: str = DEFAULT_TENANT,
    ) -> OpenRequest:
        """Submit a request.

        Seed and creation time are fixed here, so that every later try of the same request repeats them.

        Raises:
            Overloaded: if too many requests are open.
            Unavailable: if no admission actor is up.
            DeadlineExceeded: if the deadline has passed already.
            TooLarge: if the request does not fit into a message.
        """
        if len(self._open) >= self._max_open:
            self._goodput.refused(request_class, self._context.clock.now())
            raise Overloaded(f"{self._max_open} requests are open here already", code="too_many_requests")
        clock = self._context.clock
        now = clock.now()
        left_s = deadline_s - (now - received_at)
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before it was submitted")
        request = OpenRequest(clock.random_hex(12), parsed, body, now=now, deadline=now + left_s + DEADLINE_GRACE_S)
        request.received_at = received_at
        request.deadline_wall = clock.wall() + left_s
        request.created = int(clock.wall())
        request.seed = parsed.seed if parsed.seed is not None else int(clock.random_hex(8), 16) >> 1
        request.request_class, request.traceparent = request_class, traceparent
        request.tenant = tenant
        if not self._submit(request):
            raise Unavailable("no admission actor is running")
        request.alone = not self._open
        if len(self._open) == 1:
            next(iter(self._open.values())).alone = False
        self._open[request.id] = request
        wall = clock.wall()
        context = self._context
        context.telemetry.hop(
            "hop.edge", traceparent, wall - (clock.now() - received_at), wall, request_id=request.id, api=parsed.api
        )
        return request

    def close(self, request: OpenRequest, *, reason: str = "cancel") -> None:
        """Forget a request whose answer is over for its client; what still runs for it is cancelled."""
        if self._open.pop(request.id, None) is None:
            return
        inflight = request.inflight
        self._judge(request)
        inflight.end(Cancelled(f"closed by the edge: {reason}"))
        if inflight.ended_here:
            self._cancel(request, reason)

    def _judge(self, request: OpenRequest) -> None:
        inflight, now = request.inflight, self._context.clock.now()
        if request.left or not inflight.ended:
            return  # its client did not want to know
        if inflight.error is not None:
            early = isinstance(inflight.error, Overloaded)
            (self._goodput.refused if early else self._goodput.failed)(request.request_class, now)
        elif request.first_at:
            gaps = request.num_items / request.parsed.num_choices - 1.0
            itl_s = (request.last_at - request.first_at) / gaps if gaps >= 1.0 else None
            self._goodput.ended(
                request.request_class, request.first_at - request.received_at, itl_s, now, alone=request.alone
            )

    def taken(self, request: OpenRequest) -> None:
        """A slow reader has taken what waited for it: give its credit back at once."""
        if not request.inflight.ended and request.acked_window < CREDIT // 2 and request.sender is not None:
            self._ack_progress(request, self._context.clock.now())

    def end_all(self, error: HeadraceError) -> None:
        """End every open request with an error."""
        for request in self._open.values():
            request.inflight.end(error)
            request.wake()

    # --- from the bus ----------------------------------------------------------------------------------

    def on_frames(self, frames: list[Any], sender: Ref) -> None:
        """Take frames of many requests; acknowledgements leave together at the end of this loop turn."""
        now = self._context.clock.now()
        for frame in frames:
            try:
                self._on_frame(frame, sender, now)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError) as exc:
                self._metrics.malformed.inc()
                self._context.telemetry.log.warning("malformed frame", sender=str(sender), error=repr(exc))

    def _on_frame(self, frame: dict[str, Any], sender: Ref, now: float) -> None:
        request_id = frame["id"]
        request = self._open.get(request_id)
        if request is None:
            self._ack(sender, Ack(str(request_id), Fence(*frame["fence"]), "done", [], 0))
            return
        inflight = request.inflight
        known = inflight.accepted
        received = inflight.receive(frame)
        if received.verdict is Verdict.FENCED:
            assert inflight.fence is not None
            self._metrics.fenced.inc()
            self._ack(sender, Ack(request.id, inflight.fence, "fenced", [], 0))
            return
        accepted = inflight.accepted
        if accepted is not None and accepted is not known:
            request.submission.accepted(accepted.term)
        if received.fresh:
            self._observe(request, received.fresh, now)
        if received.verdict is Verdict.DONE:
            self._ack(sender, Ack(request.id, Fence(*frame["fence"]), "done", [], 0))
        else:
            # Another sender does not know what is here, and one that repeats itself has missed it.
            ignorant = sender != request.sender or ("items" in frame and not received.fresh)
            request.sender = sender
            behind = max((n - a for n, a in zip(inflight.next, request.acked, strict=False)), default=0)
            # The rest is acknowledged by `tick`: often enough, and not once per token.
            if ignorant or accepted is not known or behind >= CREDIT // 4 or "terminal" in frame or "finish" in frame:
                self._ack_progress(request, now)
        if inflight.ended or inflight.has_events or accepted is not known:
            request.wake()

    def _observe(self, request: OpenRequest, fresh: tuple[tuple[int, int], ...], now: float) -> None:
        if not request.last_item_at:
            self._metrics.ttft.observe(now - request.received_at)
            request.first_at = now
        request.last_at = now
        request.num_items += sum(count for _, count in fresh)
        for choice, count in fresh:
            before = request.last_item_at.get(choice)
            if before is not None:
                self._metrics.items(count, now - before)
            request.last_item_at[choice] = now

    def on_cancel_ack(self, message: CancelAck, sender: Ref | None) -> None:
        """An owner has seen a cancel."""
        cancelling = self._cancelling.get(message.request_id)
        if cancelling is not None and sender is not None:
            cancelling.pending.discard(sender)
            if not cancelling.pending:
                del self._cancelling[message.request_id]

    def member_down(self, ref: Ref) -> None:
        """An actor is gone: whoever had asked it asks another."""
        now = self._context.clock.now()
        for request in list(self._open.values()):
            owner = request.inflight.accepted.owner if request.inflight.accepted is not None else None
            if not request.inflight.ended and request.submission.lost(ref, owner, now):
                self._resubmit(request)
        for request_id, cancelling in list(self._cancelling.items()):
            cancelling.pending.discard(ref)
            if not cancelling.pending:
                del self._cancelling[request_id]

    # --- time ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Retry what nobody accepted, acknowledge progress, end what is late, repeat cancels."""
        context = self._context
        now, well = context.clock.now(), context.bus_ok
        for request in list(self._open.values()):
            inflight, submission = request.inflight, request.submission
            if inflight.ended:
                continue
            if now >= request.ends_at:
                inflight.end(DeadlineExceeded("the request's deadline passed"))
                request.wake()
            elif inflight.accepted is None and submission.given_up(now):
                inflight.end(Unavailable("no admission actor took the request in time"))
                request.wake()
            elif submission.due(now):
                if well:
                    self._resubmit(request)
                else:
                    submission.postpone(now)
            if request.sender is not None and now - request.acked_at >= ACK_EVERY_S and self._news(request):
                self._ack_progress(request, now)
        for request_id, cancelling in list(self._cancelling.items()):
            if cancelling.over(now):
                del self._cancelling[request_id]
            elif cancelling.due(now):
                for ref in cancelling.pending:
                    context.send(ref, SubmitCancel(request_id=request_id))

    # --- inside ----------------------------------------------------------------------------------------

    def _submit(self, request: OpenRequest) -> bool:
        """Ask an admission actor; False if there is none."""
        context = self._context
        members = context.membership.members("admission")
        near = frozenset(m.ref for m in members if m.private)
        self._turn += 1
        accepted = request.inflight.accepted
        target = request.submission.choose(
            [m.ref for m in members], self._turn, accepted.backup if accepted is not None else None,
            near=near, busy=len(self._open) >= NEAR_OPEN,
        )  # fmt: skip
        if target is None:
            return False
        now = context.clock.now()
        request.submission.sent(target, now)
        context.send(
            target,
            Submit(
                request_id=request.id,
                api=request.parsed.api,
                body=request.body,
                tenant=request.tenant,
                request_class=request.request_class,
                reply=ReplyTo(subject=context.ref.subject, mode="mailbox"),
                deadline=request.deadline_wall,
                accept_by=context.clock.wall() + ACCEPT_BY_S,
                term=request.submission.term,
                edge_epoch=context.ref.epoch,
                traceparent=request.traceparent,
                seed=request.seed,
                created=request.created,
                outputs=request.inflight.outputs,
            ),
        )
        context.hurry()
        return True

    def _resubmit(self, request: OpenRequest) -> None:
        try:
            if self._submit(request):
                self._metrics.resubmitted.inc()
        except TooLarge as exc:
            # The bus takes less than it did at the first try.
            request.inflight.end(exc)
            request.wake()

    def _cancel(self, request: OpenRequest, reason: str) -> None:
        context, inflight = self._context, request.inflight
        now = context.clock.now()
        fence = inflight.fence
        owner = inflight.accepted.owner if inflight.accepted is not None else None
        if request.sender is not None and fence is not None and request.sender != owner:
            context.send(request.sender, Close(request_id=request.id, fence=fence, reason=reason))
            self._ack(request.sender, Ack(request.id, fence, "done", [], 0))
        targets = {r for r in (*request.submission.asked, *((owner,) if owner else ())) if context.membership.is_up(r)}
        for ref in targets:
            context.send(ref, SubmitCancel(request_id=request.id, reason=reason))
        if targets and len(self._cancelling) < MAX_CANCELLING:
            self._cancelling[request.id] = Cancelling(targets, now, now + CANCEL_LIMIT_S)
            self._cancelling[request.id].due(now)

    def _news(self, request: OpenRequest) -> bool:
        inflight = request.inflight
        return inflight.next != request.acked or (
            inflight.window != request.acked_window and (request.acked_window < CREDIT // 2 or inflight.window == 0)
        )

    def _ack_progress(self, request: OpenRequest, now: float) -> None:
        inflight = request.inflight
        assert request.sender is not None and inflight.fence is not None
        request.acked, request.acked_window, request.acked_at = inflight.next, inflight.window, now
        self._ack(request.sender, Ack(request.id, inflight.fence, "ok", request.acked, request.acked_window))

    def _ack(self, sender: Ref, ack: Ack) -> None:
        """Put an acknowledgement among those that leave at the end of this loop turn."""
        self._acks.setdefault(sender, {})[ack.request_id] = ack
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        batches, self._acks = self._acks, {}
        for sender, acks in batches.items():
            self._context.send_hot(sender, ACKS, acks_body(list(acks.values())))
