"""The bounded queue in front of an actor, and the dispatch from bytes to its handlers."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from runtime.actor import Actor
from runtime.bus import BusMessage
from runtime.clock import Clock
from schemas.codec import DecodeError, decode, split
from schemas.items import HOT
from schemas.messages import (
    Close,
    Closed,
    Dispatch,
    Finished,
    FinishedAck,
    Message,
    RequestMessage,
    Reserve,
    Tokenize,
    TransferAbort,
    TransferDone,
    TransferJob,
    Transferred,
)
from schemas.subjects import Ref

if TYPE_CHECKING:
    from runtime.telemetry import Telemetry

_log = logging.getLogger("headrace.mailbox")

CAPACITY = 65_536
BURST = 64
GRACE_S = 1.0  # after a deadline messages about a request are still of use for this long

# What begins work does so before the deadline or not at all; whoever sent it ends the request by himself.
BEGINS_WORK: tuple[type[Message], ...] = (Tokenize, Dispatch, Reserve, TransferJob, Transferred)
# What ends work and gives things back is wanted however late it comes.
NEVER_STALE: tuple[type[Message], ...] = (Close, Closed, Finished, FinishedAck, TransferDone, TransferAbort)


class Mailbox:
    """Holds messages between the bus and one actor. Full: the newest is dropped and counted.

    An exception in a handler is logged and counted; the actor goes on with the next message.
    """

    def __init__(self, actor: Actor, clock: Clock, telemetry: Telemetry, *, capacity: int = CAPACITY) -> None:
        self.actor = actor
        self.on_error: Callable[[BaseException], None] | None = None
        self.handled = self.dropped = self.stale = self.malformed = self.errors = 0
        self._clock = clock
        self._capacity = capacity
        self._queue: deque[BusMessage] = deque()
        self._scheduled = False
        self._open = True
        self._hold = False
        self._seen_malformed: set[str] = set()
        kind = actor.ref.kind
        labels = ("kind",)
        self._errors_total = telemetry.counter(
            "actor_errors", "Exceptions in handlers of actors.", labels
        ).labels(kind)  # fmt: skip
        self._dropped_total = telemetry.counter(
            "mailbox_dropped", "Messages dropped because a mailbox was full.", labels
        ).labels(kind)  # fmt: skip
        self._stale_total = telemetry.counter(
            "mailbox_stale", "Messages dropped because their request's deadline had passed.", labels
        ).labels(kind)  # fmt: skip
        self._malformed_total = telemetry.counter(
            "mailbox_malformed", "Messages that could not be decoded.", labels
        ).labels(kind)  # fmt: skip

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: BusMessage) -> None:
        """Queue a message from the bus."""
        if not self._open:
            return
        if len(self._queue) >= self._capacity:
            self.dropped += 1
            self._dropped_total.inc()
            return
        self._queue.append(message)
        self._schedule()

    def hold(self, held: bool) -> None:
        """Stop or resume dispatch (a frozen node in simulations)."""
        self._hold = held
        self._schedule()

    def close(self) -> None:
        """Dispatch nothing any more."""
        self._open = False
        self._queue.clear()

    def _schedule(self) -> None:
        if self._queue and not self._scheduled and not self._hold:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        for _ in range(BURST):
            if not self._queue or self._hold or not self._open:
                break
            self._handle(self._queue.popleft())
        if self._queue:
            self._schedule()
        else:
            self.actor.context.hurry()

    def _handle(self, message: BusMessage) -> None:
        self.handled += 1
        if message.no_responders:
            return
        kind = "?"
        try:
            _, kind, origin, body = split(message.payload)
            if kind in HOT:
                sender = _sender(origin)
                self.call(lambda: self.actor.receive_hot(kind, body, sender))
                return
            control, sender = decode(message.payload)
        except DecodeError as exc:
            self._count_malformed(kind, exc)
            return
        if self._is_stale(control):
            self.stale += 1
            self._stale_total.inc()
            return
        self.call(lambda: self.actor.receive(control, sender))

    def _is_stale(self, message: Message) -> bool:
        if not isinstance(message, RequestMessage) or not message.deadline or isinstance(message, NEVER_STALE):
            return False
        grace_s = 0.0 if isinstance(message, BEGINS_WORK) else GRACE_S
        return self._clock.wall() > message.deadline + grace_s

    def _count_malformed(self, kind: str, error: Exception) -> None:
        self.malformed += 1
        self._malformed_total.inc()
        if kind not in self._seen_malformed and len(self._seen_malformed) < 64:
            self._seen_malformed.add(kind)
            _log.warning("%s got a malformed %s: %s", self.actor.ref, kind, error)

    def call(self, handler: Callable[[], Any]) -> None:
        """Run a handler of the actor; what it raises is logged and counted, and ends nothing."""
        try:
            handler()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:
            self.errors += 1
            self._errors_total.inc()
            _log.error("a handler of %s failed: %r", self.actor.ref, exc, exc_info=exc)
            if self.on_error is not None:
                self.on_error(exc)

    def statistics(self) -> dict[str, float]:
        """Counters since the start."""
        return {
            "handled": self.handled, "dropped": self.dropped, "stale": self.stale, "malformed": self.malformed,
            "errors": self.errors, "pending": len(self._queue),
        }  # fmt: skip


def _sender(origin: list[str] | None) -> Ref | None:
    if origin is None:
        return None
    try:
        return Ref(*origin)
    except TypeError as exc:
        raise DecodeError(f"malformed sender {origin!r}") from exc
