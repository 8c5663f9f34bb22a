"""The receiving end of one request: fences, order, totals and the one ending. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from schemas.errors import HeadraceError, ReplayMismatch, from_info
from schemas.items import FRAME_VERSION
from schemas.record import Fence
from schemas.subjects import Ref

# Items per choice that may wait for a slow reader before its credit is used up.
CREDIT = 256
# What came in spite of that is refused from here on, and repeated by its sender later.
HARD_LIMIT = 2 * CREDIT


class Verdict(Enum):
    """What the sender of a frame is told."""

    OK = "ok"
    DONE = "done"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice: what its items since the last delta released, perhaps nothing."""

    choice: int
    text: str
    num_items: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A choice is complete."""

    choice: int
    reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the owner fixed when it took the request."""

    owner: Ref
    seed: int
    created: int
    term: int
    backup: Ref | None = None  # who holds the request too, and takes it over if the owner dies


@dataclass(frozen=True, slots=True)
class Received:
    """The outcome of one frame: the verdict, and how many new items each choice got."""

    verdict: Verdict
    fresh: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class _Choice:
    ids: list[int] = field(default_factory=list)
    finish: tuple[str, int] | None = None
    finished: bool = False
    waiting: int = 0  # items whose text nobody has taken yet


@dataclass(slots=True)
class Inflight:
    """One request as its client's side sees it.

    Frames under a lower fence change nothing. Of items only the next one of a choice is taken. A finish takes effect
    when all items below its total are here, the terminal when all choices are finished; an error ends at once.
    """

    request_id: str
    num_choices: int
    fence: Fence | None = None
    accepted: Accepted | None = None
    usage: Usage | None = None
    error: HeadraceError | None = None
    ended: bool = False
    ended_here: bool = False  # by this side: the other one does not know yet
    started: bool = False  # an item has come
    _choices: list[_Choice] = field(default_factory=list)
    _events: list[Delta | Finish] = field(default_factory=list)
    _totals: Usage | None = None

    def __post_init__(self) -> None:
        self._choices = [_Choice() for _ in range(self.num_choices)]

    @property
    def next(self) -> list[int]:
        """The next expected index per choice."""
        return [len(c.ids) for c in self._choices]

    @property
    def outputs(self) -> list[list[int]]:
        """Ids per choice that another owner may start from; none if there are none.

        The last id of each is left out: it is chosen again, so that no choice is complete before it is resumed.
        """
        return [c.ids[:-1] for c in self._choices] if self.started else []

    @property
    def window(self) -> int:
        """How many items per choice beyond `next` may be sent."""
        return max(0, CREDIT - self.waiting)

    @property
    def waiting(self) -> int:
        """Items of the fullest choice that the reader has not taken yet."""
        return max((c.waiting for c in self._choices), default=0)

    @property
    def has_events(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._events)

    def take(self) -> list[Delta | Finish]:
        """Return what came since the last call, neighbouring deltas of a choice joined."""
        events, self._events = self._events, []
        for choice in self._choices:
            choice.waiting = 0
        return _joined(events)

    def end(self, error: HeadraceError) -> None:
        """End from this side; the first ending stays."""
        if not self.ended:
            self.ended, self.ended_here, self.error = True, True, error

    def receive(self, frame: dict[str, Any]) -> Received:
        """Take a frame.

        Raises:
            ValueError, TypeError, KeyError, IndexError: if it is malformed.
        """
        if frame["v"] != FRAME_VERSION:
            raise ValueError(f"frame version {frame['v']!r}")
        if self.ended:
            return Received(Verdict.DONE)
        fence = Fence(*frame["fence"])
        terminal = frame.get("terminal")
        if self.fence is not None and fence < self.fence:
            return Received(Verdict.FENCED)
        if self._refused_elsewhere(fence, frame):
            return Received(Verdict.DONE)
        if fence != self.fence:
            self._raise(fence)
        accepted = frame.get("accepted")
        if accepted is not None:
            backup = accepted.get("backup")
            self.accepted = Accepted(
                Ref(*accepted["owner"]), int(accepted.get("seed") or 0), int(accepted["created"]), fence.term,
                Ref(*backup) if backup else None,
            )  # fmt: skip
        fresh = self._items(frame.get("items") or ())
        for number, reason, total in frame.get("finish") or ():
            choice = self._choices[number]
            if not choice.finished:
                choice.finish = (str(reason), int(total))
        for number in range(self.num_choices):
            self._settle(number)
        if terminal is not None and not self.ended:
            self._terminal(terminal)
        if not self.ended and self._totals is not None and all(c.finished for c in self._choices):
            self.usage, self.ended = self._totals, True
        return Received(Verdict.DONE if self.ended else Verdict.OK, fresh)

    def _refused_elsewhere(self, fence: Fence, frame: dict[str, Any]) -> bool:
        """Whether this is a refusal of a later attempt, while an earlier one is being served."""
        if self.accepted is None or frame.get("accepted") is not None:
            return False
        terminal = frame.get("terminal")
        return fence.term > self.accepted.term and terminal is not None and terminal.get("error") is not None

    def _raise(self, fence: Fence) -> None:
        """Follow a newer command; what an older one announced and did not deliver is void."""
        self.fence, self._totals = fence, None
        for choice in self._choices:
            if not choice.finished:
                choice.finish = None

    def _items(self, items: Any) -> tuple[tuple[int, int], ...]:
        counts: dict[int, int] = {}
        for number, index, token_id, text, _logprob in items:
            choice = self._choices[number] if number >= 0 else None
            if choice is None:
                raise IndexError(f"choice {number}")
            have = len(choice.ids)
            if index < have:
                if choice.ids[index] != token_id:
                    self.end(ReplayMismatch(f"choice {number}: item {index} differs from the one already received"))
                    break
                continue
            if index > have or choice.finished or choice.waiting >= HARD_LIMIT:
                continue
            choice.ids.append(token_id)
            choice.waiting += 1
            counts[number] = counts.get(number, 0) + 1
            self._events.append(Delta(number, text, 1))
        if counts:
            self.started = True
        return tuple(counts.items())

    def _settle(self, number: int) -> None:
        choice = self._choices[number]
        if choice.finish is not None and not choice.finished and len(choice.ids) >= choice.finish[1]:
            choice.finished = True
            self._events.append(Finish(number, choice.finish[0]))

    def _terminal(self, terminal: dict[str, Any]) -> None:
        error = terminal.get("error")
        if error is not None:
            self.ended, self.error = True, from_info(error)
            return
        usage = terminal["usage"]
        self._totals = Usage(
            int(usage["prompt_tokens"]), int(usage["completion_tokens"]), int(usage.get("cached_tokens") or 0)
        )


def _joined(events: list[Delta | Finish]) -> list[Delta | Finish]:
    """Join deltas of one choice that follow each other without its finish between them; order stays."""
    if len(events) < 2:
        return events
    out: list[Delta | Finish] = []
    place: dict[int, int] = {}
    texts: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, Finish):
            out.append(event)
        elif event.choice in place:
            texts[event.choice].append(event.text)
        else:
            place[event.choice] = len(out)
            texts[event.choice] = [event.text]
            out.append(event)
    for number, at in place.items():
        out[at] = Delta(number, "".join(texts[number]), len(texts[number]))
    return out
