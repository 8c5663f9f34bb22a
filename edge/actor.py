"""The edge as an actor: HTTP in front, the bus behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from edge.app import Parts, create_app
from edge.exchange import MAX_OPEN, Exchange
from edge.generate import Limits
from edge.goodput import Goodput
from edge.health import STATES, coming, cut_off, degraded, missing
from edge.metrics import EdgeMetrics, MetricsCollector
from edge.pins import PinRoutes
from edge.server import AddressUnavailable, HttpServer
from edge.submission import ACCEPT_LIMIT_S
from runtime.actor import Actor, Context
from runtime.membership import Member
from schemas.errors import Unavailable
from schemas.items import FRAMES
from schemas.messages import CancelAck, Closed, KvStatus, KvUnpinned, Message, MetricsReport, PromptPinned
from schemas.subjects import Ref

REPLACED_S = ACCEPT_LIMIT_S  # like a request that nobody accepts
HELD_POLL_S = 0.02
MAX_HELD = 256  # requests, bodies and all; what comes beyond is refused at once


class EdgeActor(Actor):
    """Serves OpenAI's HTTP routes.

    Args:
        host, port: where to listen; port 0 takes a free one, see `address`.
        models: names under which the model is served, the first one being its proper name.
        limits: of the HTTP side.
        max_open: requests that may be open at once.
        admin_token: opens the routes of who runs the instance; empty: they are closed.
        unloaded_s: median time to the first token, and between tokens, without load; 0: learnt.
        listen: False serves no socket; the application is then reached as `app`.
    """

    kind: ClassVar[str] = "edge"

    def __init__(
        self,
        context: Context,
        *,
        models: Sequence[str],
        host: str = "127.0.0.1",
        port: int = 8000,
        limits: Limits | None = None,
        max_open: int = MAX_OPEN,
        listen: bool = True,
        admin_token: str = "",
        unloaded_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__(context)
        if not models:
            raise ValueError("an edge needs at least one model name")
        self.metrics = EdgeMetrics(context.telemetry)
        self.goodput = Goodput(context.telemetry, *unloaded_s)
        self.exchange = Exchange(context, self.metrics, max_open=max_open, goodput=self.goodput)
        self._collector = MetricsCollector(context)
        self._pins = PinRoutes(context, admin_token)
        self._was_ready = False
        self._num_held = 0
        parts = Parts(
            context=context, exchange=self.exchange, metrics=self.metrics, collector=self._collector, health=self,
            models=tuple(dict.fromkeys(models)), limits=limits or Limits(), pins=self._pins,
            started=int(context.clock.wall()),
        )  # fmt: skip
        self.app = create_app(parts)
        self._server = HttpServer(self.app, host, port) if listen else None

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port that it listens on."""
        return self._server.address if self._server is not None else None

    async def start(self) -> None:
        """Listen.

        Raises:
            AddressUnavailable: if the address is taken.
        """
        if self._server is not None:
            try:
                await self._server.start(self.context)
            except AddressUnavailable as exc:
                self.state, self.reason = "failed", str(exc)
                raise
        self.state = "ready"

    async def stop(self) -> None:
        """End what is open with an error, answer it, and close the port."""
        self.exchange.end_all(Unavailable("the server is stopping"))
        if self._server is not None:
            await self._server.stop()

    def receive(self, message: Message, sender: Ref | None) -> None:
        """Take answers to cancels and to metrics queries."""
        match message:
            case CancelAck():
                self.exchange.on_cancel_ack(message, sender)
            case MetricsReport():
                self._collector.report(message)
            case PromptPinned() | KvStatus() | KvUnpinned():
                self._pins.report(message)
            case Closed():
                pass
            case _:
                self.context.telemetry.log.warning("unexpected message", type=type(message).__name__)

    def receive_hot(self, kind: str, body: list[Any], sender: Ref | None) -> None:
        """Take frames."""
        if kind == FRAMES and sender is not None:
            self.exchange.on_frames(body, sender)

    def tick(self) -> None:
        """Let time pass for open requests."""
        self.exchange.tick()

    def member_down(self, ref: Ref, reason: str) -> None:
        """Ask others for what this actor was asked for."""
        self.exchange.member_down(ref)

    @property
    def idle(self) -> bool:
        """Whether no answer is open."""
        return len(self.exchange) == 0

    def load(self) -> dict[str, Any]:
        """Open requests, accepted or not."""
        waiting = self.exchange.unaccepted
        return {"running": len(self.exchange) - waiting, "waiting": waiting}

    def statistics(self) -> dict[str, float]:
        """Gauges of open requests."""
        return {
            "requests_in_flight": len(self.exchange),
            "oldest_request_age_seconds": self.exchange.oldest_age_s,
            **self.goodput.statistics(self.context.clock.now()),
        }

    async def metrics_page(self) -> str:
        """Return the merged metrics of all nodes."""
        return await self._collector.page()

    # --- readiness -------------------------------------------------------------------------------------

    @property
    def was_ready(self) -> bool:
        """Whether requests could be served at any time since the start."""
        return self._was_ready

    def not_ready(self) -> Unavailable | None:
        """Return why requests cannot be served now."""
        if self.state == "draining":
            return Unavailable("the server is stopping", code="draining", retry_after_s=5.0)
        members = self._members()
        if cut_off(members, self.clock.now()):
            return Unavailable("the bus cannot be reached", code="bus_unavailable", retry_after_s=2.0)
        reasons = missing(members)
        if reasons:
            return Unavailable("; ".join(reasons), code="not_ready", retry_after_s=2.0)
        self._was_ready = True
        return None

    async def ready(self, limit_s: float) -> None:
        """Return once requests can be served, at once if they can be now.

        A part of which the last one has just died is about to be replaced: what comes meanwhile is held for a while,
        as what was sent to the dead one is. Not before all was there for the first time: that may take minutes.

        Raises:
            Unavailable: if they cannot be served, and will not be within `limit_s` and `REPLACED_S` seconds.
        """
        problem = self.not_ready()
        if problem is None:
            return
        if not self._was_ready or self._num_held >= MAX_HELD:
            raise problem
        self._num_held += 1
        self.metrics.held.inc()
        until = self.clock.now() + min(limit_s, REPLACED_S)
        try:
            while problem is not None:
                if self.clock.now() >= until or problem.code != "not_ready" or not coming(self._members()):
                    raise problem
                await self.clock.sleep(HELD_POLL_S)
                problem = self.not_ready()
        finally:
            self._num_held -= 1

    def _members(self) -> list[Member]:
        return self.context.membership.members(states=STATES)

    def degraded(self) -> list[str]:
        """Return what does not work although requests are served."""
        return degraded(self._members())
