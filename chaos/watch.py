"""Who lives, what they hold and how loaded they are, from the heartbeats on the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from chaos.history import Recorder
from schemas import subjects
from schemas.codec import DecodeError, decode
from schemas.messages import Heartbeat

STALE_S = 1.5


@dataclass(frozen=True, slots=True)
class Seen:
    """One actor's last heartbeat and when it arrived (monotonic seconds)."""

    t: float
    beat: Heartbeat

    @property
    def name(self) -> str:
        """Kind and id, which survive a restart; the epoch does not."""
        return f"{self.beat.ref.kind}/{self.beat.ref.id}"

    @property
    def held(self) -> frozenset[str]:
        """Request ids that it holds."""
        return frozenset(str(r) for r in self.beat.load.get("requests", []))

    def figure(self, name: str) -> int:
        """One figure of its load, 0 if it does not report it."""
        return int(self.beat.load.get(name, 0))


class Watch:
    """Keeps the last heartbeat of every actor; engine loads also go into the history."""

    def __init__(self, now: Callable[[], float], recorder: Recorder | None = None) -> None:
        self._now = now
        self._recorder = recorder
        self._changed = asyncio.Event()
        self.seen: dict[str, Seen] = {}

    async def start(self, nats: Nats) -> None:
        """Listen to the heartbeats."""
        await nats.subscribe(subjects.HEARTBEATS, cb=self._on_beat)

    async def _on_beat(self, message: Msg) -> None:
        try:
            beat, _ = decode(message.data)
        except DecodeError:
            return
        if isinstance(beat, Heartbeat):
            self.take(beat)

    def take(self, beat: Heartbeat) -> None:
        """Note one heartbeat."""
        seen = Seen(self._now(), beat)
        self.seen[seen.name] = seen
        if self._recorder is not None and beat.ref.kind in ("prefill", "decode", "both"):
            figures = {k: seen.figure(k) for k in ("running", "waiting", "blocks_in_use", "steps")}
            self._recorder.add("", "load", actor=seen.name, **figures)
        self._changed.set()

    def live(self, *kinds: str) -> list[Seen]:
        """Return the actors that were heard of lately, of these kinds or of all; of kinds, not the edge's own ones."""
        now = self._now()
        found = [
            s for s in self.seen.values()
            if now - s.t < STALE_S and (not kinds or (s.beat.ref.kind in kinds and not s.beat.private))
        ]  # fmt: skip
        return sorted(found, key=lambda s: s.name)

    def ready(self, *kinds: str) -> list[Seen]:
        """Return the live actors that take work."""
        return [s for s in self.live(*kinds) if s.beat.state == "ready"]

    async def settle(self, seconds: float) -> None:
        """Listen for a while."""
        await asyncio.sleep(seconds)

    def serving(self, kind: str) -> dict[str, frozenset[str]]:
        """Return what each live actor of a kind holds."""
        return {s.name: s.held for s in self.live(kind)}

    async def until(self, condition: Callable[[Watch], Any], *, timeout_s: float, what: str) -> None:
        """Wait until a heartbeat makes the condition true.

        Raises:
            TimeoutError: naming `what` did not happen.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self):
                    self._changed.clear()
                    try:
                        async with asyncio.timeout(0.25):
                            await self._changed.wait()
                    except TimeoutError:
                        pass  # silence changes liveness too
        except TimeoutError as exc:
            states = ", ".join(f"{s.name}={s.beat.state}" for s in self.live())
            raise TimeoutError(f"{what} within {timeout_s} s; live: {states}") from exc
