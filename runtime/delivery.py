"""Order, loss, credit and the end of a stream, by one mechanism (R5): cumulative acks, repeats, drop what is old.

Pure: the actors that send and receive items hold one `Outbound` or `Inbound` per request and tell it the time.
Works for any item with `choice` and `index`, such as `schemas.items.Item` and `TextItem`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

RESEND_AFTER_S = 0.3
MAX_RESEND_AFTER_S = 1.2
ACK_EVERY_S = 0.2
WINDOW = 4096
MAX_BURST = 512  # items that one call of `due` returns


class Indexed(Protocol):
    """An item of a stream: its choice, and its position in that choice."""

    @property
    def choice(self) -> int: ...

    @property
    def index(self) -> int: ...


I = TypeVar("I", bound=Indexed)  # noqa: E741


class Inbound(Generic[I]):
    """What a receiver knows of one request: the next index expected of each choice.

    Args:
        num_choices: how many choices the request has.
        start: the index from which each choice is expected; 0 if absent.
    """

    def __init__(self, num_choices: int, start: Sequence[int] | None = None) -> None:
        self.next = list(start) if start is not None else [0] * num_choices
        self.accepted = self.repeated = self.gaps = 0
        self._ack_wanted = False
        self._acked_at: float | None = None

    def accept(self, items: Iterable[I]) -> list[I]:
        """Return the items that are new and in order; repeats and what lies beyond a gap are dropped and counted.

        Items of choices that do not exist are dropped like those beyond a gap.
        """
        new: list[I] = []
        for item in items:
            choice = item.choice
            if not 0 <= choice < len(self.next) or item.index > self.next[choice]:
                self.gaps += 1
            elif item.index < self.next[choice]:
                self.repeated += 1
            else:
                self.next[choice] += 1
                new.append(item)
            # Whatever came, the sender shall learn where we are: it may be repeating for want of an ack.
            self._ack_wanted = True
        self.accepted += len(new)
        return new

    def ack_due(self, now: float, *, at_once: bool = False) -> bool:
        """Whether an ack has to be sent: 200 ms after the last one, or `at_once` on any arrival since."""
        if self._ack_wanted and at_once:
            return True
        return self._acked_at is None or now - self._acked_at >= ACK_EVERY_S

    def acked(self, now: float) -> list[int]:
        """Note that an ack goes out now; returns its `next`."""
        self._ack_wanted = False
        self._acked_at = now
        return list(self.next)


class Outbound(Generic[I]):
    """What a sender holds of one request until it is acknowledged.

    Args:
        num_choices: how many choices the request has.
        start: index of the first item of each choice that will be appended; 0 if absent.
        window: items that may be on their way before the first ack says how many.
        resend_after_s: silence after which what is on its way is sent again; doubles while nothing comes, to 1.2 s.
    """

    def __init__(
        self,
        num_choices: int,
        start: Sequence[int] | None = None,
        *,
        window: int = WINDOW,
        resend_after_s: float = RESEND_AFTER_S,
    ) -> None:
        self.acked = list(start) if start is not None else [0] * num_choices
        self._sent = list(self.acked)
        self._held: list[deque[I]] = [deque() for _ in self.acked]
        self._window = window
        self._resend_after_s = resend_after_s
        self._wait_s = resend_after_s
        self._timer = 0.0
        self._ended = False
        self._end_sent_at: float | None = None
        self.done = False
        self.resent = 0

    # --- what the sender does --------------------------------------------------------------------------

    def append(self, items: Iterable[I]) -> None:
        """Hold new items, each the next of its choice; `due` says what may be sent.

        Raises:
            ValueError: if an item is not the next of its choice.
        """
        for item in items:
            held = self._held[item.choice]
            if item.index != self.acked[item.choice] + len(held):
                raise ValueError(f"item {item.index} of choice {item.choice}, {self.total(item.choice)} was next")
            held.append(item)

    def end(self) -> None:
        """Nothing more will be appended: a terminal follows the last item."""
        self._ended = True

    def due(self, now: float) -> list[I]:
        """Return what to send now: what was never sent, as far as the window goes, and what has to be repeated."""
        if self.done:
            return []
        out: list[I] = []
        if self.in_flight and now - self._timer >= self._wait_s:
            self._wait_s = min(2 * self._wait_s, MAX_RESEND_AFTER_S)
            self._timer = now
            for choice, held in enumerate(self._held):
                for item in _first(held, self._sent[choice] - self.acked[choice], MAX_BURST - len(out)):
                    out.append(item)
            self.resent += len(out)
        fresh = self._fresh(min(max(self._window, 1) - self.in_flight, MAX_BURST - len(out)))
        if fresh and not self.in_flight:
            self._timer = now
        for item in fresh:
            self._sent[item.choice] = item.index + 1
        return out + fresh

    def _fresh(self, limit: int) -> list[I]:
        fresh: list[I] = []
        for choice, held in enumerate(self._held):
            at = self._sent[choice] - self.acked[choice]
            while at < len(held) and len(fresh) < limit:
                fresh.append(held[at])
                at += 1
        return fresh

    def end_due(self, now: float) -> bool:
        """Whether the terminal has to be sent (again) now; true means that the caller sends it."""
        if not self._ended or self.done or any(self.unsent):
            return False
        if self._end_sent_at is not None and now - self._end_sent_at < self._resend_after_s:
            return False
        self._end_sent_at = now
        return True

    # --- what the receiver says ------------------------------------------------------------------------

    def ack(self, next_: Sequence[int], now: float, *, window: int | None = None, done: bool = False) -> int:
        """Take a cumulative ack; returns how many items it releases. Old and impossible values change nothing.

        Args:
            next_: next index expected, per choice.
            now: monotonic seconds.
            window: items that may be on their way from now on.
            done: the receiver wants nothing more.
        """
        released = 0
        for choice, index in enumerate(next_[: len(self.acked)]):
            held = self._held[choice]
            # A receiver may be ahead of what this sender has sent (after a failover): that needs no sending.
            while self.acked[choice] < index and held:
                held.popleft()
                self.acked[choice] += 1
                released += 1
            self._sent[choice] = max(self._sent[choice], self.acked[choice])
        if window is not None:
            self._window = window
        if released:
            self._wait_s = self._resend_after_s
            self._timer = now
        if done:
            self.done = True
            for held in self._held:
                held.clear()
        return released

    # --- questions -------------------------------------------------------------------------------------

    def total(self, choice: int) -> int:
        """Return how many items of a choice were ever appended, `start` included."""
        return self.acked[choice] + len(self._held[choice])

    @property
    def in_flight(self) -> int:
        """Items sent and not acknowledged."""
        return sum(self._sent) - sum(self.acked) if not self.done else 0

    @property
    def unsent(self) -> list[int]:
        """Items per choice that the window holds back."""
        return [self.total(c) - self._sent[c] for c in range(len(self.acked))] if not self.done else []

    @property
    def held(self) -> int:
        """Items kept for want of an ack."""
        return sum(map(len, self._held))

    @property
    def settled(self) -> bool:
        """Whether nothing has to be sent or awaited any more."""
        return self.done or (not self._ended and not self.held)


def _first(held: deque[I], count: int, limit: int) -> list[I]:
    return [held[i] for i in range(min(count, limit, len(held)))]
