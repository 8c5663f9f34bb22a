"""Request and reply over publish and subscribe: one inbox subscription per connection, told apart by subject."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from runtime.bus import BusMessage, Handler, Subscription
from schemas.errors import DeadlineExceeded, Unavailable


class Requests(ABC):
    """The part of a bus that waits for replies; both buses are built on it."""

    def __init__(self, inbox: str) -> None:
        """Prepare.

        Args:
            inbox: a subject prefix that nobody else uses.
        """
        self._inbox = inbox
        self._next_inbox = 0
        self._waiting: dict[str, asyncio.Future[BusMessage]] = {}
        self._mux: Subscription | None = None

    @abstractmethod
    def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """See `runtime.bus.Bus`."""

    @abstractmethod
    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65_536
    ) -> Subscription:
        """See `runtime.bus.Bus`."""

    def new_inbox(self) -> str:
        """Return a subject that nobody else uses."""
        self._next_inbox += 1
        return f"{self._inbox}.i.{self._next_inbox}"

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: dict[str, str] | None = None
    ) -> BusMessage:
        """Publish and wait for one reply.

        Raises:
            Unavailable: if nobody listens on the subject.
            DeadlineExceeded: if no reply came in time.
        """
        if self._mux is None:
            self._mux = await self.subscribe(f"{self._inbox}.r.*", self._on_reply)
        self._next_inbox += 1
        reply = f"{self._inbox}.r.{self._next_inbox}"
        future: asyncio.Future[BusMessage] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = future
        try:
            self.publish(subject, payload, reply=reply, headers=headers)
            async with asyncio.timeout(timeout_s):
                message = await future
        except TimeoutError as exc:
            raise DeadlineExceeded(f"no reply on {subject} within {timeout_s} s") from exc
        finally:
            del self._waiting[reply]
        if message.no_responders:
            raise Unavailable(f"nobody listens on {subject}")
        return message

    def _on_reply(self, message: BusMessage) -> None:
        future = self._waiting.get(message.subject)
        if future is not None and not future.done():
            future.set_result(message)
