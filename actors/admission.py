"""The admission hop: it validates, owns the request until its terminal frame, places it, and places it again.

All decisions are `Ownership`'s and `placement`'s; this actor performs them. Edges send `Submit` to its mailbox; native
clients publish an OpenAI body to `requests.<api>` with a reply subject, which a queue group of admission actors shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import orjson

from actors import ownership as own
from actors import replies
from actors.in_flight import InFlight
from actors.keeping import above
from actors.pinning import Pinning
from actors.placement import SEQUENCE_TOKENS, Engines, Placement, least_loaded, place
from actors.placement_metrics import PlacementMetrics
from actors.poison import Strikes, told
from actors.rebalance import Rebalancer
from actors.records import Records
from actors.refusal import CLASSES, Asked, Sent, least_ttft_s, predicted_ttft_s, refusal, standing, tokens_behind
from actors.replication import Replication
from actors.whereabouts import Whereabouts
from runtime.actor import Actor, Context
from runtime.bus import BusMessage
from runtime.membership import SKEWED
from schemas import messages as m
from schemas import subjects
from schemas.errors import DeadlineExceeded, HeadraceError, Overloaded, Poisoned, TooLarge, Unavailable
from schemas.items import ACKS, frame, parse_acks
from schemas.openai import ParsedRequest, parse_request
from schemas.openai_sampling import chosen_ids
from schemas.record import Fence, Record, ReplyTo
from schemas.subjects import Ref
from schemas.tenants import tenant_of

NATIVE_APIS = ("chat", "completion")
EARLY_S = 0.25  # a heartbeat's time, and less than it takes an edge to ask another admission actor
MAX_EARLY = 256
MAX_TERMINALS = 16_384  # written from here and not acknowledged; of more than that each is written once
TERMINAL_RESEND_S = 0.3
TERMINAL_TRIES = 4
WHOLE_BELOW_TOKENS = 512  # two steps of the default budget: what comes next waits for no more than that


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Settings of admission.

    `whole_below`: prompts of fewer tokens may run whole on a decode engine (`actors.placement`).
    `warm_classes`: of requests whose KV is stored while they run; the field `warm_failover` of a request comes first.
    `rebalance`: whether running requests move from full engines to idle ones.
    `tenant_header`: header of native requests that names the tenant; empty: all have the same one.
    `slo_ttft_s`: by class, the time to the first token; a request of which more is expected is refused.
    `tenant_weights`: shares of tenants where several wait, as at the engines; absent ones have 1.
    """

    models: tuple[str, ...]
    default_deadline_s: float = 600.0
    whole_below: int = WHOLE_BELOW_TOKENS
    tenant_header: str = ""
    warm_classes: frozenset[str] = frozenset()
    rebalance: bool = True
    slo_ttft_s: Mapping[str, float] = field(default_factory=dict)
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _OwnTerminal:
    """A terminal frame written from here, repeated until it is acknowledged."""

    reply: ReplyTo
    frame: dict[str, Any]
    next_send: float
    tries: int = 1


class AdmissionActor(Actor):
    """Owns requests; see `actors.ownership`."""

    kind: ClassVar[str] = "admission"

    def __init__(self, context: Context, *, config: AdmissionConfig) -> None:
        super().__init__(context)
        self.config = config
        self._strikes = Strikes()
        self._table = own.Ownership(
            self.ref,
            is_up=context.membership.is_up,
            choose_engines=self._choose_engines,
            choose_detokenizer=self._choose_detokenizer,
            context_limit=self.context_limit,
            choose_target=self._choose_target,
            refuse=self._refuse_early,
            promised_s=self._promised_s,
            survivors=lambda: any(self._members(kind) for kind in ("decode", "both", "prefill")),
        )
        self._records = Records(context, self._table, self._perform, self._accept, self._strikes.of)
        self._sent = Sent()
        self._in_flight = InFlight()
        self._rebalancer = Rebalancer() if config.rebalance else None
        self._terminals: dict[str, _OwnTerminal] = {}
        self._pinning = Pinning(context, config.models)
        self._where = Whereabouts(context)
        self._replication = Replication(context, self._where)
        self._placed = PlacementMetrics(context.telemetry)
        self._early: dict[str, tuple[m.Submit, float]] = {}  # no engine is known yet; kept until then
        telemetry = context.telemetry
        self._requests = telemetry.counter("requests_total", "Requests by how they ended", ("outcome",))
        self._failovers = telemetry.counter("failovers_total", "Requests moved off a lost actor", ("kind", "reason"))
        self._moves = telemetry.counter("moves_total", "Running requests moved between engines", ("reason", "outcome"))
        for kind in ("prefill", "decode", "both", "detokenize", "admission"):
            self._failovers.labels(kind, "exit")  # on the page as zero before the first one
        self._struck = telemetry.counter("request_strikes_total", "Crashes of engines in a step of an owned request")
        self._poisoned = telemetry.counter("requests_poisoned_total", "Requests refused because engines crash of them")
        self._prompt = telemetry.counter("prompt_tokens_total", "Prompt tokens of ended requests")
        self._generation = telemetry.counter("generation_tokens_total", "Output tokens of ended requests")
        self._e2e = telemetry.histogram(
            "e2e_request_latency_seconds", "Acceptance to end", buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 600)
        )

    async def start(self) -> None:
        """Join the queue group of native requests, unless this is the admission of one node alone."""
        for api in () if self.context.private else NATIVE_APIS:
            await self.context.subscribe(subjects.requests(api), self._on_native, queue=subjects.QUEUE_ADMISSION)
        await self.context.subscribe(subjects.acks_of(self.ref), self._on_native_ack)
        await self._where.index.start()
        self.state = "ready"

    @property
    def idle(self) -> bool:
        """Whether every owned request has ended."""
        return len(self._table) == 0 and not self._terminals and not self._early and not self._pinning

    def load(self) -> dict[str, Any]:
        """Open requests."""
        return {"running": self._table.num_open, "waiting": 0, "requests": self._table.ids(64)}

    def statistics(self) -> dict[str, float]:
        """Open requests and the age of the oldest."""
        return {
            "requests_open": self._table.num_open,
            "oldest_request_age_seconds": self._table.oldest_age_s(self.clock.now()),
            **self._records.statistics(),
            **{f"kv_index_{name}": value for name, value in self._where.index.statistics().items()},
            **self._replication.statistics(),
        }

    def context_limit(self) -> int:
        """Tokens that prompt and answer may have together: what the smallest live engine can hold; 0 if none is."""
        limits = [int(e.load.get("max_context", 0)) for kind in ("decode", "both") for e in self._members(kind)]
        limits = limits or [int(e.load.get("max_context", 0)) for e in self._members("prefill")]
        return min((n for n in limits if n > 0), default=0)

    # --- ways in --------------------------------------------------------------------------------

    def _on_native(self, message: BusMessage) -> None:
        if not message.reply:
            self.context.telemetry.log.warning("a request without a reply subject was dropped", subject=message.subject)
            return
        headers = {k.lower(): v for k, v in (message.headers or {}).items()}
        content_type = headers.get("content-type", "application/json").partition(";")[0].strip()
        encoding: Literal["json", "msgpack"] = "msgpack" if content_type.endswith("msgpack") else "json"
        reply = ReplyTo(subject=message.reply, mode="inbox", encoding=encoding)
        request_id = self.clock.random_hex(12)
        fence = Fence(0, f"{self.ref.id}.{self.ref.epoch}", 0)
        try:
            body = replies.read(message.payload, encoding)
            tenant = tenant_of(headers, self.config.tenant_header)
        except HeadraceError as exc:
            self._write_terminal(request_id, reply, fence, exc)
            self._requests.labels(exc.code or "error").inc()
            return
        now, wall = self.clock.now(), self.clock.wall()
        submit = m.Submit(
            request_id=request_id,
            api=message.subject.split(".")[1],
            body=body,
            tenant=tenant,
            request_class="",
            reply=reply,
            deadline=0.0,
            accept_by=wall + 2.0,
            traceparent=headers.get("traceparent", ""),
        )
        self._submit(submit, now, wall)

    def _submit(self, msg: m.Submit, now: float, wall: float) -> None:
        if wall > msg.accept_by:
            self._requests.labels("late").inc()
            return  # the client has asked somebody else by now (R11)
        if msg.request_id in self._table:
            raised = self._table.raise_term(msg.request_id, msg.term, now)
            self._perform(raised)
            if raised:
                self._records.renew(msg.request_id)
            owned = self._table.get(msg.request_id)
            # An adopted request's client hears of it when nothing is written under the old fence any more.
            if owned is not None and owned.stage is own.Stage.OPEN and not owned.announce:
                self._accept(owned.record, owned.fence)
            return
        if msg.term > 0 and self._records.resubmitted(msg.request_id, msg.term):
            return
        if self.state == "draining" and self._hand_on(msg):
            return
        if self._keep_early(msg, now):
            return
        fence = Fence(msg.term, f"{self.ref.id}.{self.ref.epoch}", 0)
        try:
            if 0 < msg.deadline <= wall:
                raise DeadlineExceeded("the request's deadline passed before it was taken")
            parsed = parse_request(msg.api, msg.body, models=self.config.models)
            self._check_capacity()
        except HeadraceError as exc:
            self._write_terminal(msg.request_id, msg.reply, fence, exc)
            self._requests.labels(exc.code or "error").inc()
            return
        backup = self._records.choose(msg.request_id)
        record = told(self._record(msg, parsed, wall, backup), self._strikes.of(msg.request_id))
        if backup is None:
            self._accept(record, fence)  # there is nobody else to hold it
        body: dict[str, Any] = {"created": record.created}
        if parsed.api == "chat":
            body["messages"] = list(parsed.messages)
        else:
            body["prompt"] = list(parsed.prompts)
        named = chosen_ids(parsed.sampling)
        if named:
            body["named_ids"] = named  # the tokenizer knows the vocabulary
        if parsed.sampling.min_tokens:
            body["min_tokens"] = parsed.sampling.min_tokens
        self._perform(
            self._table.admit(
                record,
                body,
                term=msg.term,
                max_tokens=parsed.max_tokens,
                remaining_s=record.deadline - wall,
                now=now,
                outputs=msg.outputs,
            )
        )
        if backup is not None:
            self._records.keep(msg.request_id, backup)  # `accepted` is said when it holds the record too (R2)

    def _hand_on(self, msg: m.Submit) -> bool:
        """Leave a request that was sent before its sender knew of the drain to another; false if there is no other."""
        others = [member.ref for member in self._members("admission") if member.ref != self.ref]
        if others:
            self.context.send(others[msg.term % len(others)], msg)
        return bool(others)

    def _keep_early(self, msg: m.Submit, now: float) -> bool:
        """Keep a request for a moment while no engine is known: the edge may have heard of one before this node did."""
        _, until = self._early.pop(msg.request_id, (msg, now + EARLY_S))
        if self.state != "ready" or now >= until or len(self._early) >= MAX_EARLY or self.context_limit() > 0:
            return False
        self._early[msg.request_id] = (msg, until)
        return True

    def _check_capacity(self) -> None:
        if self.state != "ready":
            raise Unavailable("this admission actor is draining", code="draining", retry_after_s=1.0)
        if self._table.full:
            raise Overloaded("too many requests are open", code="too_many_requests", retry_after_s=1.0)
        if self.context_limit() == 0:
            raise Unavailable("no engine is ready", code="not_ready", retry_after_s=1.0)

    def _record(self, msg: m.Submit, parsed: ParsedRequest, wall: float, backup: Ref | None) -> Record:
        seed = msg.seed if msg.seed is not None else parsed.seed
        if seed is None:
            seed = int(self.clock.random_hex(7), 16)
        deadline = msg.deadline
        if not deadline:
            ms = parsed.deadline_ms
            deadline = wall + (ms / 1000.0 if ms is not None else self.config.default_deadline_s)
        chosen = msg.request_class or parsed.request_class or "interactive"
        return Record(
            request_id=msg.request_id,
            tenant=msg.tenant,
            request_class=cast(Literal["interactive", "agent", "batch"], chosen),
            api=parsed.api,
            model=parsed.model,
            n=parsed.n,
            sampling=parsed.settle(seed=seed, max_tokens=parsed.max_tokens or 0),
            stream=parsed.stream,
            created=msg.created if msg.created is not None else int(wall),
            deadline=deadline,
            cache_salt=parsed.cache_salt,
            warm=parsed.warm_failover if parsed.warm_failover is not None else chosen in self.config.warm_classes,
            reply=msg.reply,
            owner=self.ref,
            backup=backup,
            edge_epoch=msg.edge_epoch,
            traceparent=self.context.telemetry.new_traceparent(msg.traceparent or None),
        )

    # --- messages -------------------------------------------------------------------------------

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        """Everything that bears on an owned request."""
        now = self.clock.now()
        if isinstance(message, m.Submit):
            self._submit(message, now, self.clock.wall())
            return
        if isinstance(message, m.PinPrompt):
            self._pinning.begin(message)
            return
        if sender is None or self._records.receive(message, sender):
            return
        table = self._table
        match message:
            case m.SubmitCancel():
                self._early.pop(message.request_id, None)
                self._perform(table.cancel(message.request_id, message.reason, now))
                self._terminals.pop(message.request_id, None)
                self.context.send(sender, m.CancelAck(request_id=message.request_id))
            case m.Tokenized():
                if not self._pinning.on_tokenized(message):
                    self._perform(table.on_tokenized(message, now))
            case m.Chain():
                self._pinning.on_chain(message)
            case m.KvPinned():
                self._pinning.on_pinned(message)
            case m.KvUnpinned():
                pass  # where an id had another prefix, or none
            case m.Opened():
                self._perform(table.on_opened(message, sender, now))
            case m.FencedIds():
                self._perform(table.on_fenced_ids(message, sender, now))
            case m.Dispatched():
                self._perform(table.on_dispatched(message, sender, now))
            case m.EngineError():
                self._perform(table.on_engine_error(message, sender, now))
            case m.Migrated():
                self._perform(table.on_migrated(message, sender, now))
            case m.Redirected():
                self._perform(table.on_redirected(message, sender, now))
            case m.Stalled():
                self._perform(table.on_stalled(message, self._silence_s, now))
            case m.Finished():
                self._records.on_finished(message)
                self._perform(table.on_finished(message, sender, now))
            case m.Closed():
                self._perform(table.on_closed(message, sender, now))
            case m.KvDump():
                self._where.index.on_dump(message, sender)
            case _:
                self.context.telemetry.log.warning("unexpected message", type=type(message).__name__)

    def receive_hot(self, kind: str, body: list[Any], sender: Ref | None) -> None:
        """Edges acknowledge what was written from here."""
        if kind != ACKS:
            return
        for ack in parse_acks(body):
            if ack.status in ("done", "fenced"):
                self._terminals.pop(ack.request_id, None)
                if ack.status == "fenced":
                    self._perform(self._table.cancel(ack.request_id, "superseded", self.clock.now()))

    def _on_native_ack(self, message: BusMessage) -> None:
        """A native client answers `accepted`, or a terminal from here; `done` before any item is a cancel."""
        request_id, of_end = subjects.acked(message.subject)
        if message.no_responders or request_id in self._terminals:
            if message.no_responders or of_end:  # one of `accepted` may come late
                self._terminals.pop(request_id, None)
            return
        owned = self._table.get(request_id)
        if owned is None or owned.stage is not own.Stage.OPEN:
            return
        try:
            body = replies.read(message.payload, owned.record.reply.encoding)
        except HeadraceError:
            return
        if body.get("done"):
            self._perform(self._table.cancel(request_id, "cancel", self.clock.now()))

    def member_down(self, ref: Ref, reason: str) -> None:
        """Move work off what is gone; cancel the work of a dead edge."""
        now = self.clock.now()
        self._where.index.member_down(ref)
        if ref.kind == "edge":
            if reason != "silent":
                self._perform(self._table.edge_down(ref.subject, now))
            return
        if ref.kind == "admission":
            self._records.member_down(ref, reason)
            return
        if reason == "exit":
            self._crashed(ref)
        self._perform(self._table.member_down(ref, reason, now))

    def _crashed(self, ref: Ref) -> None:
        """Count an engine's crash against the requests of its last step, whoever owns them: before they go on."""
        member = self.context.membership.get(ref)
        if member is None or not member.computing:
            return
        for request_id in self._strikes.crashed(ref.epoch, member.computing):
            owned = self._table.get(request_id)
            if owned is not None and owned.stage is own.Stage.OPEN:
                owned.record = told(owned.record, self._strikes.of(request_id))
                self._struck.inc()
                self._records.renew(request_id)  # its backup has to know

    def member_changed(self, ref: Ref, state: str) -> None:
        """A draining engine or detokenizer hands its requests over; one that has failed has lost them."""
        if ref.kind == "admission" and state == "draining":
            self._records.leaving(ref)
        if ref.kind not in ("decode", "both", "prefill", "detokenize"):
            return
        member = self.context.membership.get(ref)
        if state == "draining":
            self._perform(self._table.member_down(ref, "drain", self.clock.now()))
        elif state == "failed" and member is not None and not member.reason.startswith(SKEWED):
            self._perform(self._table.member_down(ref, "failed", self.clock.now()))

    def tick(self) -> None:
        """Repeat, expire, forget."""
        now = self.clock.now()
        self._perform(self._table.tick(now))
        for held in self._records.tick():  # R4: detokenizer and owner should have ended these
            error = DeadlineExceeded("the request's deadline passed")
            fence = above(held.keep.fence, f"{self.ref.id}.{self.ref.epoch}")
            self._write_terminal(held.keep.request_id, held.keep.record.reply, fence, error)
            self._requests.labels(error.code).inc()
        self._rebalance(now)
        self._pinning.tick(now)
        self._where.index.tick(now)
        self._replication.tick(now)
        for msg, _ in list(self._early.values()):
            self._submit(msg, now, self.clock.wall())
        for request_id, t in list(self._terminals.items()):
            if now >= t.next_send:
                if t.tries >= TERMINAL_TRIES:
                    del self._terminals[request_id]
                    continue
                t.tries += self.context.bus_ok  # while the bus is away nobody can be told
                t.next_send = now + TERMINAL_RESEND_S
                replies.write(self.context, t.reply, request_id, t.frame)

    # --- doing ----------------------------------------------------------------------------------

    def _perform(self, directives: list[own.Directive]) -> None:
        for d in directives:
            match d:
                case own.Send():
                    self._send(d)
                case own.Anycast():
                    self._anycast(d)
                case own.Broadcast():
                    for member in self._members(d.kind):
                        self.context.send(member.ref, d.message)
                case own.Terminal():
                    self._write_terminal(d.record.request_id, d.record.reply, d.fence, d.error)
                case own.Accept():
                    self._accept(d.record, d.fence)
                case own.Ended():
                    self._records.ended(d.record.request_id, elsewhere=d.outcome == "superseded")
                    tokens = SEQUENCE_TOKENS * d.record.num_choices
                    self._sent.ended(d.record.request_id)
                    self._in_flight.ended(d.record.request_id, tokens, self.clock.now())
                    self._log_ended(d)
                case own.MoveEnded():
                    self._moves.labels(d.reason, d.outcome).inc()
                    self.context.telemetry.log.info("move", request_id=d.request_id, why=d.reason, outcome=d.outcome)
                case own.Failover():
                    self._failovers.labels(d.kind, d.reason).inc()
                    self.context.telemetry.log.info("failover", request_id=d.request_id, kind=d.kind, reason=d.reason)

    def _send(self, d: own.Send) -> None:
        try:
            self.context.send(d.to, d.message)
        except TooLarge as exc:
            self._refuse(d.message, exc)
            return
        if isinstance(d.message, m.Dispatch):
            self._count_in_flight(d.message)

    def _anycast(self, d: own.Anycast) -> None:
        try:
            self.context.anycast(d.kind, d.message)
        except TooLarge as exc:
            self._refuse(d.message, exc)

    def _refuse(self, message: m.Message, error: HeadraceError) -> None:
        """A message about a request cannot travel: the request ends, the others go on."""
        assert isinstance(message, m.RequestMessage)
        owned = self._table.get(message.request_id)
        if owned is not None and owned.stage is own.Stage.OPEN:
            fence = owned.fence
            self._perform(self._table.cancel(message.request_id, "refused", self.clock.now()))
            self._write_terminal(message.request_id, owned.record.reply, fence.next(), error)

    def _accept(self, record: Record, fence: Fence) -> None:
        accepted: dict[str, Any] = {
            "id": record.request_id,
            "seed": record.sampling.seed,
            "created": record.created,
            "deadline": record.deadline,
            "owner": record.owner.wire(),
        }
        if record.backup is not None and record.reply.mode == "mailbox":
            accepted["backup"] = record.backup.wire()  # whom the edge asks first when this owner dies
        out = frame(record.request_id, fence, accepted=accepted)
        replies.write(self.context, record.reply, record.request_id, out)

    def _write_terminal(self, request_id: str, reply: ReplyTo, fence: Fence, error: HeadraceError) -> None:
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        terminal = {"usage": usage, "items": [], "error": error.info()}
        out = frame(request_id, fence, terminal=terminal)
        if len(self._terminals) < MAX_TERMINALS:
            self._terminals[request_id] = _OwnTerminal(reply, out, self.clock.now() + TERMINAL_RESEND_S)
        replies.write(self.context, reply, request_id, out)

    def _log_ended(self, d: own.Ended) -> None:
        now = self.clock.now()
        f = d.finished
        self._requests.labels(d.outcome).inc()
        if d.outcome == Poisoned.default_code:
            self._poisoned.inc()
        self._placed.ended(d.record.request_id, f.first_item_at if f is not None and not d.failovers else 0.0)
        self._e2e.observe(now - d.accepted_at)
        if f is not None:
            self._prompt.inc(f.prompt_tokens)
            self._generation.inc(f.completion_tokens)
        steps = {k: round(v - d.accepted_at, 6) for k, v in d.timeline.items()}
        wall = self.clock.wall()
        fields: dict[str, Any] = {
            "request_id": d.record.request_id,
            "tenant": d.record.tenant,
            "class": d.record.request_class,
            "api": d.record.api,
            "outcome": d.outcome,
            "prompt_tokens": f.prompt_tokens if f else sum(map(len, d.record.prompt_ids)),
            "completion_tokens": f.completion_tokens if f else 0,
            "cached_tokens": f.cached_tokens if f else 0,
            "failovers": d.failovers,
            "seconds": round(now - d.accepted_at, 6),
            **{f"{k}_s": v for k, v in steps.items()},
        }
        self.context.telemetry.log.info("request", **fields)
        self.context.telemetry.request_span(
            "request",
            d.record.traceparent,
            wall - (now - d.accepted_at),
            wall,
            request_id=d.record.request_id,
            model=d.record.model,
            max_tokens=d.record.sampling.max_tokens,
            temperature=d.record.sampling.temperature,
            top_p=d.record.sampling.top_p,
            prompt_tokens=fields["prompt_tokens"],
            completion_tokens=fields["completion_tokens"],
            cached_tokens=fields["cached_tokens"],
            finish_reasons=list(f.finish_reasons) if f else [d.outcome],
        )
        if "dispatched" in steps:
            self.context.telemetry.hop(
                "hop.admission",
                d.record.traceparent,
                wall - (now - d.accepted_at),
                wall - (now - d.accepted_at) + steps["dispatched"],
                request_id=d.record.request_id,
            )
        self.context.publish(subjects.USAGE, orjson.dumps(fields))

    # --- views ----------------------------------------------------------------------------------

    def _members(self, kind: str) -> list[Any]:
        return [e for e in self.context.membership.members(kind) if not e.silent]

    def _silence_s(self, ref: Ref) -> float:
        member = self.context.membership.get(ref)
        return float("inf") if member is None else self.clock.now() - member.last_heard

    def _choose_engines(self, record: Record, suspects: frozenset[Ref]) -> Placement | None:
        now = self.clock.now()
        if record.strikes:
            return self._choose_alone(suspects, now)
        by_role = [self._members(role) for role in ("prefill", "decode", "both")]
        engines = Engines(*by_role)
        everyone = [member for members in by_role for member in members]
        stored = self._where.find(record, everyone)
        sent = self._sent_since(now)
        placement = place(
            engines,
            self._ahead(record, everyone, sent, now),
            now,
            num_choices=record.num_choices,
            max_tokens=record.sampling.max_tokens,
            prompt_tokens=sum(map(len, record.prompt_ids)),
            whole_below=self.config.whole_below,
            avoid=suspects,
            stored=stored,
            disk_s_per_token=self._where.disk_speeds(everyone, stored),
            tie=record.request_id,
        )
        if placement is not None:
            tokens = sum(map(len, record.prompt_ids))
            self._placed.placed(record.request_id, placement, tokens, self.clock.wall())
            if self._where.asked:
                self._replication.placed(everyone, sent)
            hint = self._where.on_disk(record, placement.first, stored.get(placement.first))
            if hint is not None:  # the read begins while the dispatch is on its way
                self.context.send(*hint)
        return placement

    def _choose_alone(self, suspects: frozenset[Ref], now: float) -> Placement | None:
        """Run a request that may have killed an engine whole on the one with the least to do, a decode engine first."""
        engines = [*self._members("decode"), *self._members("both")] or self._members("prefill")
        others = [e for e in engines if e.ref not in suspects]
        ref = least_loaded(others or engines, self._sent_since(now), now)
        return None if ref is None else Placement(ref, None)

    def _choose_target(self, record: Record, avoid: frozenset[Ref]) -> Ref | None:
        """Return the engine with the least to do that a running request can move to; what it will get is counted."""
        now = self.clock.now()
        engines = [e for kind in ("decode", "both") for e in self._members(kind) if e.ref not in avoid]
        target = least_loaded(engines, self._sent_since(now), now)
        if target is not None:
            self._in_flight.sent(target, SEQUENCE_TOKENS * record.num_choices, record.request_id, now)
        return target

    def _rebalance(self, now: float) -> None:
        """Look for a move that pays, a few times a second."""
        if self._rebalancer is not None and self._rebalancer.due(now):
            engines = [e for kind in ("decode", "both") for e in self._members(kind)]
            move = self._rebalancer.decide(engines, self._table.runners, now)
            if move is not None:
                self._perform(self._table.move(move.request_id, move.to, "balance", now))

    def _refuse_early(self, record: Record, placement: Placement, remaining_s: float) -> HeadraceError | None:
        """Return why a request is refused: its first token is expected too late for its deadline, or for its class."""
        first = self.context.membership.get(placement.first)
        if first is None:
            return None
        senders = len(self._members("admission"))
        asked = _asked(record, placement)
        since = self._sent.since(placement.first, self._counted(placement.first), senders, self.clock.now())
        engine = standing(first.load, since, age_s=self._silence_s(placement.first))
        weights = self.config.tenant_weights
        predicted_s = predicted_ttft_s(engine, asked, placement.service_s, weights)
        least_s = least_ttft_s(engine, asked, placement.service_s, weights)
        return refusal(engine, predicted_s, least_s, remaining_s, self._promised_s(record))

    def _promised_s(self, record: Record) -> float | None:
        """Return the time to the first token that a request's class is promised."""
        return self.config.slo_ttft_s.get(record.request_class)

    def _choose_detokenizer(self, record: Record) -> Ref | None:
        """Take one on another node where there is one: no single death takes owner and detokenizer.

        For the requests of this node's edge that is in vain, which end with it: they take the way that is shortest.
        """
        members, here = self._members("detokenize"), self.context.node
        wanted = [e for e in members if (e.node == here) == self.context.private]
        return least_loaded(wanted or members, self._sent_since(self.clock.now()), self.clock.now())

    def _ahead(self, record: Record, engines: list[Any], in_flight: Mapping[Ref, int], now: float) -> Mapping[Ref, int]:
        """Return what was sent since heartbeats, less what waits at engines and does not go before this request."""
        since = dict(in_flight)
        asked = Asked(record.tenant, CLASSES.index(record.request_class), sum(map(len, record.prompt_ids)))
        for engine in engines:
            if engine.load.get("queues"):
                sent = self._sent.since(engine.ref, self._counted(engine.ref), 1, now)
                behind = tokens_behind(standing(engine.load, sent), asked, self.config.tenant_weights)
                since[engine.ref] = since.get(engine.ref, 0) - int(behind)
        return since

    def _sent_since(self, now: float) -> Mapping[Ref, int]:
        engines = [e.ref for kind in ("prefill", "decode", "both") for e in self._members(kind)]
        return self._in_flight.since(engines, self._counted, now)

    def _counted(self, ref: Ref) -> frozenset[str]:
        member = self.context.membership.get(ref)
        return frozenset(member.load.get("counted", ())) if member is not None else frozenset()

    def _count_in_flight(self, msg: m.Dispatch) -> None:
        now = self.clock.now()
        owned = self._table.get(msg.request_id)
        placement = owned.placement if owned is not None else None
        work = [(msg.detokenize, 64)]
        if placement is not None:
            self._sent.sent(placement.first, msg.request_id, _asked(msg.record, placement), now)
            work.append((placement.first, placement.new_tokens))
            work.append((placement.decode or placement.first, SEQUENCE_TOKENS * msg.record.num_choices))
        for ref, tokens in work:
            self._in_flight.sent(ref, tokens, msg.request_id, now)


def _asked(record: Record, placement: Placement) -> Asked:
    return Asked(record.tenant, CLASSES.index(record.request_class), placement.new_tokens)
