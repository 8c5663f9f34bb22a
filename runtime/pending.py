"""What one subscription holds between the bus and its handler: a bounded queue and its dispatcher."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from runtime.bus import BusMessage, Handler

_log = logging.getLogger("headrace.bus")

BURST = 128  # messages handled before other tasks of the loop get a turn


class Pending:
    """Bounded queue in front of a handler. Full: the newest message is dropped and counted.

    The handler runs from the event loop, never from the connection's read loop, so nothing that it raises (not even
    `CancelledError`) can end the subscription or the connection.
    """

    __slots__ = ("_loop", "_queue", "_scheduled", "closed", "dropped", "errors", "handled", "handler", "hold",
                 "limit", "on_error", "pattern", "queue_group")

    def __init__(self, pattern: str, queue_group: str, handler: Handler, limit: int) -> None:
        self.pattern = pattern
        self.queue_group = queue_group
        self.handler = handler
        self.limit = limit
        self.closed = False
        self.hold = False
        self.handled = self.dropped = self.errors = 0
        self.on_error: Callable[[BaseException], None] | None = None
        self._queue: deque[BusMessage] = deque()
        self._scheduled = False
        self._loop = asyncio.get_running_loop()

    def offer(self, message: BusMessage) -> None:
        """Queue a message for the handler."""
        if self.closed:
            return
        if len(self._queue) >= self.limit:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # 1, 2, 4, 8, ...: a flood does not flood the log
                _log.warning("%s: %d messages dropped, %d pending", self.pattern, self.dropped, self.limit)
            return
        self._queue.append(message)
        if not self._scheduled:
            self.schedule()

    def schedule(self) -> None:
        """Run the dispatcher in the loop's next round, unless held."""
        if self._queue and not self.hold and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        queue, handler = self._queue, self.handler
        for _ in range(BURST):
            if not queue or self.hold or self.closed:
                break
            message = queue.popleft()
            try:
                handler(message)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as exc:  # CancelledError included: it would end a subscription silently
                self.errors += 1
                _log.error("handler of %s failed: %r", self.pattern, exc, exc_info=exc)
                if self.on_error is not None:
                    self.on_error(exc)
            self.handled += 1
        self.schedule()

    def close(self) -> None:
        """Handle nothing any more."""
        self.closed = True
        self._queue.clear()

    def __len__(self) -> int:
        return len(self._queue)
