"""A process's worth of actors: mailboxes, heartbeats, ticks, membership, drain and exit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Gauge

from runtime.actor import Actor, Context
from runtime.bus import Bus, BusMessage, Subscription
from runtime.clock import Clock, Tasks
from runtime.context import ActorContext
from runtime.heartbeat import Beat, BeatSource, LoopSender, Sender, ThreadSender
from runtime.mailbox import Mailbox
from runtime.membership import MAX_SKEW_S, SKEWED, Membership
from runtime.neighbours import Neighbours
from runtime.telemetry import Telemetry
from runtime.vitals import Vitals
from schemas.codec import DecodeError, decode, encode
from schemas.errors import HeadraceError
from schemas.messages import Drain, ExitNotice, MetricsQuery, MetricsReport
from schemas.subjects import DRAIN, EXIT, METRICS, Ref, anycast, hot

_log = logging.getLogger("headrace.node")

TICK_S = 0.05
EXIT_BUS_LOST = 75
BUS_DRAIN_S = 2.0
LINGER_S = 0.3

HeartbeatBus = Callable[[Clock, Callable[[], None]], Awaitable[Bus]]


@dataclass(slots=True)
class _Hosted:
    actor: Actor
    context: ActorContext
    mailbox: Mailbox


class Node:
    """Hosts actors on two connections, `control` and `stream`.

    Args:
        name: unique on the bus; one token.
        host: machine, as in pool handles.
        control: connection for control messages.
        stream: connection for items, acks and frames.
        clock: the seam.
        telemetry: metrics, spans and log.
        hb_interval_s: between heartbeats.
        heartbeat_bus: makes the heartbeat thread's own connection; if absent, `control.sibling` does where the bus
            has one, and else heartbeats run on the loop.
        drain_limit_s: how long a drain waits until the actors are idle.
    """

    def __init__(
        self,
        name: str,
        host: str,
        *,
        control: Bus,
        stream: Bus,
        clock: Clock,
        telemetry: Telemetry,
        hb_interval_s: float = 0.25,
        heartbeat_bus: HeartbeatBus | None = None,
        drain_limit_s: float = 30.0,
        pid: int | None = None,
    ) -> None:
        self.name, self.host = name, host
        self.pid = pid if pid is not None else os.getpid()
        self.clock, self.telemetry = clock, telemetry
        self.control, self.stream = control, stream
        self.drain_limit_s = drain_limit_s
        self.vitals = Vitals()
        self.tasks = Tasks()
        self.neighbours = Neighbours()
        self.membership = Membership(clock, self.well, node=name)
        self.on_error: Callable[[BaseException], None] | None = None
        self._hosted: list[_Hosted] = []
        self._subscriptions: list[Subscription] = []
        self._source = BeatSource(name, host, self.pid, lambda: self.vitals.lag_at(clock.now()))
        self._sender: Sender = self._make_sender(heartbeat_bus, hb_interval_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Future[int] | None = None
        self._drain_asked = False
        self._hurry: asyncio.Event | None = None
        self._stopped = False
        self._most: dict[Ref, int] = {}
        self._paused = False
        self._lag = telemetry.gauge("event_loop_lag_seconds", "How late the last tick of the event loop was.")
        self._lag_max = telemetry.gauge("event_loop_lag_max_seconds", "Longest lag of the event loop.")

    def _make_sender(self, heartbeat_bus: HeartbeatBus | None, interval_s: float) -> Sender:
        sibling = getattr(self.control, "sibling", None)
        if heartbeat_bus is None and sibling is not None:

            async def connect(clock: Clock, on_closed: Callable[[], None]) -> Bus:
                bus: Bus = await sibling(f"{self.name}-heartbeat", clock, on_closed=on_closed)
                return bus

            heartbeat_bus = connect
        if heartbeat_bus is None:
            return LoopSender(self._source, self.control, self.clock, interval_s)
        return ThreadSender(self._source, heartbeat_bus, interval_s, self._closed_from_thread)

    # --- assembling ------------------------------------------------------------------------------------

    def add(
        self, kind: str, actor_id: str, factory: Callable[[Context], Actor], *, private: bool = False
    ) -> Ref:
        """Host one more actor, made by `factory`; before `start`. Returns the address of this incarnation.

        A private one works for this node's other actors alone.
        """
        return self._make(kind, actor_id, factory, private).actor.ref

    def _make(self, kind: str, actor_id: str, factory: Callable[[Context], Actor], private: bool) -> _Hosted:
        ref = Ref(kind, actor_id, self.clock.random_hex(8))
        context = ActorContext(
            ref, self.name, self.host, self.clock, self.membership, self.telemetry,
            self.control, self.stream, self.tasks, self.well, self.neighbours, private,
        )  # fmt: skip
        actor = factory(context)
        mailbox = context.mailbox = Mailbox(actor, self.clock, self.telemetry)
        mailbox.on_error = self._report
        self.neighbours.add(actor, mailbox)
        hosted = _Hosted(actor, context, mailbox)
        self._hosted.append(hosted)
        return hosted

    async def join(self, kind: str, actor_id: str, factory: Callable[[Context], Actor], *, private: bool) -> None:
        """Host one more actor while the node runs; one that does not start says `failed` in its heartbeats.

        Args:
            kind, actor_id, factory, private: as of `add`.
        """
        hosted = self._make(kind, actor_id, factory, private)
        await self._open(hosted)
        await self.control.flush()
        await self.stream.flush()
        try:
            await self._start_actor(hosted)
        except Exception as exc:
            self._report(exc)
        self._take_snapshot()
        self._sender.kick()

    @property
    def refs(self) -> list[Ref]:
        """Addresses of the actors hosted here."""
        return [h.actor.ref for h in self._hosted]

    @property
    def actors(self) -> list[Actor]:
        """The actors hosted here."""
        return [h.actor for h in self._hosted]

    @property
    def draining(self) -> bool:
        """Whether the node is on its way out."""
        return self._drain_asked

    def well(self) -> bool:
        """Whether silence of others may count: the bus is up, settled and carries, and this loop keeps time."""
        if self.membership.deaf:
            return False
        up = self.control.connected and self.stream.connected
        since = max(self.control.connected_since, self.stream.connected_since) if up else None
        return self.vitals.well(self.clock.now(), since)

    def _report(self, error: BaseException) -> None:
        if self.on_error is not None:
            self.on_error(error)

    # --- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Subscribe all mailboxes, begin heartbeats, then start the actors side by side.

        Raises:
            Exception: what the first actor to fail raised; its heartbeats say `failed` until the node stops.
        """
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        self._hurry = asyncio.Event()
        self.tasks.on_error = lambda _name, error: self._report(error)
        self.membership.listen(down=self._member_down, changed=self._member_changed)
        for hosted in self._hosted:
            await self._open(hosted)
        await self.membership.start(self.control)
        self._subscriptions += [
            await self.control.subscribe(METRICS, self._on_metrics_query),
            await self.control.subscribe(DRAIN, self._on_drain),
        ]
        # Whoever learns of an actor from its heartbeat may send to it: interest must be known to the bus before.
        await self.control.flush()
        await self.stream.flush()
        self._take_snapshot()
        self.vitals.tick(self.clock.now(), TICK_S)
        await self._sender.start()
        self.tasks.spawn(self._tick_forever(), name=f"{self.name}-ticks")
        results = await asyncio.gather(*(self._start_actor(h) for h in self._hosted), return_exceptions=True)
        self._take_snapshot()
        self._sender.kick()
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def _open(self, hosted: _Hosted) -> None:
        actor, put = hosted.actor, hosted.mailbox.put
        subscriptions, shared = hosted.context.subscriptions, hosted.context.shared
        subscriptions.append(await self.control.subscribe(actor.ref.subject, put))
        subscriptions.append(await self.stream.subscribe(hot(actor.ref), put))
        if type(actor).anycast and not hosted.context.private:
            kind = actor.ref.kind
            shared.append(await self.control.subscribe(anycast(kind), put, queue=kind))

    async def _start_actor(self, hosted: _Hosted) -> None:
        try:
            await hosted.actor.start()
        except Exception as exc:
            hosted.actor.state, hosted.actor.reason = "failed", str(exc) or repr(exc)
            _log.error("%s did not start: %r", hosted.actor.ref, exc, exc_info=exc)
            raise

    async def run(self, *, on_started: Callable[[], None] | None = None) -> int:
        """Start, serve until SIGTERM, SIGINT, a `Drain` or the loss of the bus, stop; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_drain)
        try:
            await self.start()
            if on_started is not None:
                on_started()
            return await self.wait()
        finally:
            await self.stop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def wait(self) -> int:
        """Wait until the node has to end; returns its exit code. `stop` is the caller's to call."""
        assert self._over is not None, "start comes first"
        return await asyncio.shield(self._over)

    def bus_closed(self) -> None:
        """Take note that a connection is closed for good; the node ends and its supervisor starts another."""
        if not self._stopped:
            _log.error("node %s has lost the bus for good", self.name)
            self._end(EXIT_BUS_LOST)

    def _closed_from_thread(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.bus_closed)

    def _end(self, code: int) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(code)

    # --- drain and stop --------------------------------------------------------------------------------

    def request_drain(self) -> None:
        """Take no new work, wait until the actors are idle or the limit is over, end with 0; twice: end now."""
        if self._drain_asked:
            if self._hurry is not None:
                self._hurry.set()
            return
        self._drain_asked = True
        self.tasks.spawn(self._drain(), name=f"{self.name}-drain")

    async def _drain(self) -> None:
        for hosted in self._hosted:
            await self._drain_actor(hosted)
        self._take_snapshot()
        self._sender.kick()
        assert self._hurry is not None
        idle_since = now = self.clock.now()
        end = now + self.drain_limit_s
        # Idle for a while: what others sent before they heard of the drain is still on its way.
        while now < end and not self._hurry.is_set() and now - idle_since < LINGER_S:
            await self.clock.sleep(0.02)
            now = self.clock.now()
            if not self._idle():
                idle_since = now
        if not self._idle():
            busy = ", ".join(str(h.actor.ref) for h in self._hosted if not h.actor.idle)
            _log.warning("node %s leaves with work held by %s", self.name, busy or "its mailboxes")
        self._end(0)

    async def _drain_actor(self, hosted: _Hosted) -> None:
        if hosted.context.private:
            return  # its neighbours take nothing new; what they have is finished where it is
        shared, hosted.context.shared = hosted.context.shared, []
        for subscription in shared:
            await subscription.unsubscribe()
        hosted.mailbox.call(hosted.actor.drain)

    def _idle(self) -> bool:
        return all(h.actor.idle and not len(h.mailbox) for h in self._hosted)

    async def stop(self) -> None:
        """Stop the actors, say goodbye, leave the bus; nothing remains."""
        if self._stopped:
            return
        self._stopped = True
        for hosted in self._hosted:
            try:
                await hosted.actor.stop()
            except Exception as exc:
                _log.error("%s did not stop cleanly: %r", hosted.actor.ref, exc, exc_info=exc)
                self._report(exc)
            hosted.mailbox.close()
        await self._sender.stop()
        await self.tasks.cancel_all()
        await self.membership.stop()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        if self.control.connected and self._over is not None:
            # Nobody has to wait for heartbeats to be missed, supervisor or not.
            notice = ExitNotice(node=self.name, pid=self.pid, code=0, refs=self.refs)
            self.control.publish(EXIT, encode(notice))
        await self.stream.drain(BUS_DRAIN_S)
        await self.control.drain(BUS_DRAIN_S)
        self._end(0)

    async def vanish(self) -> None:
        """Be gone without a word (simulations): no goodbye, no drain; only what this process would leak is freed."""
        self._stopped = True
        for hosted in self._hosted:
            hosted.mailbox.close()
        await self._sender.stop()
        await self.tasks.cancel_all()
        for hosted in self._hosted:
            try:
                await hosted.actor.stop()
            except Exception as exc:
                _log.debug("%s after its death: %r", hosted.actor.ref, exc)

    def pause(self, paused: bool) -> None:
        """Stop or resume ticks and dispatch (a frozen process, in simulations)."""
        self._paused = paused
        for hosted in self._hosted:
            hosted.mailbox.hold(paused)

    # --- every 50 ms -----------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            await self.clock.sleep(TICK_S)
            if not self._paused:
                self._tick()

    def _tick(self) -> None:
        self._lag.set(self.vitals.tick(self.clock.now(), TICK_S))
        self._lag_max.set(self.vitals.max_lag_s)
        self.membership.check()
        for hosted in self._hosted:
            hosted.mailbox.call(hosted.actor.tick)
        changed = self._take_snapshot()
        if changed:
            self._sender.kick()

    def _take_snapshot(self) -> bool:
        """Renew what heartbeats say; returns whether it is news: a state changed, or a load halved of one who tells."""
        before = {b.ref: b.state for b in self._source.beats}
        skew = self.membership.view.own_skew()
        beats = []
        for hosted in self._hosted:
            actor = hosted.actor
            state, reason = actor.state, actor.reason
            if abs(skew) > MAX_SKEW_S and state == "ready":
                state, reason = "failed", f"{SKEWED} {skew * 1000:.0f} ms from the others"
            beats.append(Beat(actor.ref, state, reason, self._load(hosted), _steps_of(actor), hosted.context.private))
        self._source.beats = tuple(beats)
        eased = [b for h, b in zip(self._hosted, beats, strict=True) if h.actor.tells_ease and self._has_eased(b)]
        return bool(eased) or any(before.get(b.ref) != b.state for b in beats)

    def _has_eased(self, beat: Beat) -> bool:
        """Whether an actor has half of the work, or less, that it had at most since it last told so."""
        now, most = _work(beat.load), self._most.get(beat.ref, 0)
        eased = most > 0 and 2 * now <= most
        self._most[beat.ref] = now if eased else max(now, most)
        return eased

    def _load(self, hosted: _Hosted) -> dict[str, Any]:
        load: dict[str, Any] = {}
        hosted.mailbox.call(lambda: load.update(hosted.actor.load()))
        return load

    # --- what others say -------------------------------------------------------------------------------

    def _member_down(self, ref: Ref, reason: str) -> None:
        for hosted in self._hosted:
            if hosted.actor.ref != ref:
                hosted.mailbox.call(lambda actor=hosted.actor: actor.member_down(ref, reason))  # type: ignore[misc]

    def _member_changed(self, ref: Ref, state: str) -> None:
        for hosted in self._hosted:
            hosted.mailbox.call(lambda actor=hosted.actor: actor.member_changed(ref, state))  # type: ignore[misc]

    def _on_drain(self, message: BusMessage) -> None:
        body = _decoded(message)
        if not isinstance(body, Drain):
            return
        if body.target == self.name:
            if not self._drain_asked:
                self.request_drain()
            return
        for hosted in self._hosted:
            if hosted.actor.ref.id == body.target:
                self.tasks.spawn(self._drain_actor(hosted), name=f"{self.name}-drain-{body.target}")

    def _on_metrics_query(self, message: BusMessage) -> None:
        body = _decoded(message)
        if not isinstance(body, MetricsQuery):
            return
        report = MetricsReport(ticket=body.ticket, node=self.name, text=self.render_metrics())
        try:
            self.control.publish(body.reply.subject, encode(report))
        except HeadraceError as exc:
            _log.error("the metrics of node %s do not fit the bus: %s", self.name, exc.message)

    def render_metrics(self) -> str:
        """Return all metrics of this node in the Prometheus text format, the actors' statistics included."""
        for hosted in self._hosted:
            kind, actor_id = hosted.actor.ref.kind, hosted.actor.ref.id
            values: dict[str, float] = {}
            hosted.mailbox.call(lambda actor=hosted.actor, into=values: into.update(actor.statistics()))  # type: ignore[misc]
            values["mailbox_pending"] = float(len(hosted.mailbox))
            for name, value in values.items():
                self._gauge(f"{kind.replace('-', '_')}_{name}", ("actor",)).labels(actor_id).set(value)
        for label, bus in (("control", self.control), ("stream", self.stream)):
            for name, value in bus.statistics().items():
                self._gauge(f"bus_{name}", ("connection",)).labels(label).set(value)
        self._gauge("members", ()).set(len(self.membership.view.members(states=("starting", "ready", "draining"))))
        self._gauge("tasks_failed", ()).set(self.tasks.failed)
        self._gauge("tasks_running", ()).set(len(asyncio.all_tasks(self._loop)) if self._loop is not None else 0)
        return self.telemetry.render()

    def _gauge(self, name: str, labels: tuple[str, ...]) -> Gauge:
        return self.telemetry.gauge(name, f"See statistics() of {name.split('_')[0]}.", labels)


def _steps_of(actor: Actor) -> Callable[[], int | None]:
    def read() -> int | None:
        steps = getattr(actor, "steps", None)
        return steps if isinstance(steps, int) else None

    return read


def _work(load: Mapping[str, Any]) -> int:
    return int(load.get("running", 0)) + int(load.get("waiting", 0))


def _decoded(message: BusMessage) -> Any:
    try:
        return decode(message.payload)[0]
    except DecodeError as exc:
        _log.warning("malformed message on %s: %s", message.subject, exc)
        return None
