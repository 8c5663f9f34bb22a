"""Heartbeats: what each actor of a node says four times a second, from a thread or from the loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.bus import Bus
from runtime.clock import Clock, SystemClock
from schemas.codec import encode
from schemas.errors import HeadraceError
from schemas.messages import Heartbeat
from schemas.subjects import Ref, heartbeat

_log = logging.getLogger("headrace.heartbeat")


@dataclass(frozen=True, slots=True)
class Beat:
    """What one actor says next; `steps` is read when it is said, so that a busy loop does not hide progress."""

    ref: Ref
    state: str
    reason: str
    load: dict[str, Any]
    steps: Callable[[], int | None]
    private: bool = False


class Sender(Protocol):
    """Sends the latest beats every interval."""

    async def start(self) -> None: ...

    def kick(self) -> None:
        """Send now."""
        ...

    async def stop(self) -> None: ...


class BeatSource:
    """The latest beats of a node, replaced as a whole by the loop and read by whoever sends them."""

    def __init__(self, node: str, host: str, pid: int, lag: Callable[[], float]) -> None:
        self.beats: tuple[Beat, ...] = ()
        self._node, self._host, self._pid = node, host, pid
        self._lag = lag
        self._seq = 0

    def publish(self, bus: Bus, wall: float) -> None:
        """Send one heartbeat per actor."""
        self._seq += 1
        for beat in self.beats:
            load = beat.load
            steps = beat.steps()
            if steps is not None:
                load = {**load, "steps": steps}
            message = Heartbeat(
                ref=beat.ref, node=self._node, host=self._host, pid=self._pid, seq=self._seq, sent_at=wall,
                state=beat.state, reason=beat.reason, loop_lag_s=self._lag(), load=load,
                private=beat.private,
            )  # fmt: skip
            try:
                bus.publish(heartbeat(beat.ref.kind, beat.ref.id), encode(message, beat.ref))
            except (HeadraceError, ValueError, TypeError) as exc:
                _log.error("heartbeat of %s: %r", beat.ref, exc)


class LoopSender:
    """Sends from the node's own loop (in-memory bus)."""

    def __init__(self, source: BeatSource, bus: Bus, clock: Clock, interval_s: float) -> None:
        self._source, self._bus, self._clock, self._interval_s = source, bus, clock, interval_s
        self._task: asyncio.Task[Any] | None = None

    async def start(self) -> None:
        """Begin."""
        self._task = self._clock.spawn(self._run(), name="heartbeat")

    async def _run(self) -> None:
        while True:
            self.kick()
            await self._clock.sleep(self._interval_s)

    def kick(self) -> None:
        """Send now."""
        self._source.publish(self._bus, self._clock.wall())

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()


class ThreadSender:
    """Sends from a thread with a loop and a connection of its own, so that a busy node does not look dead."""

    def __init__(
        self,
        source: BeatSource,
        connect: Callable[[Clock, Callable[[], None]], Awaitable[Bus]],
        interval_s: float,
        on_closed: Callable[[], None],
    ) -> None:
        self._source, self._connect, self._interval_s, self._on_closed = source, connect, interval_s, on_closed
        self._thread = threading.Thread(target=self._main, name="heartbeat", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stopping = False
        self._started = threading.Event()
        self._error: BaseException | None = None

    async def start(self) -> None:
        """Begin; returns once the connection is there.

        Raises:
            BusUnavailable: if the thread could not connect.
        """
        self._thread.start()
        await asyncio.get_running_loop().run_in_executor(None, self._started.wait)
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as exc:
            self._error = exc
            if self._started.is_set():
                _log.error("the heartbeat thread failed: %r", exc, exc_info=exc)
                self._on_closed()
        finally:
            self._started.set()

    async def _run(self) -> None:
        clock = SystemClock()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        bus = await self._connect(clock, self._on_closed)
        self._source.publish(bus, clock.wall())
        self._started.set()
        try:
            while not self._stopping:
                try:
                    async with asyncio.timeout(self._interval_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                if not self._stopping:
                    self._source.publish(bus, clock.wall())
        finally:
            await bus.close()

    def kick(self) -> None:
        """Send now."""
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:  # it closed in between
                pass

    async def stop(self) -> None:
        """End; no heartbeat follows."""
        self._stopping = True
        self.kick()
        if self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 3.0)
