"""What a sender knows of engines beyond their last heartbeats: what was sent there, and what has ended there, since."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from schemas.subjects import Ref

IN_FLIGHT_S = 0.6  # what was sent, or has ended, earlier shows in heartbeats by now
MAX_ENDED = 1024  # remembered; more than that end only while heartbeats cannot name them all


@dataclass(frozen=True, slots=True)
class _Sent:
    at: float
    tokens: int
    request_id: str


class InFlight:
    """Corrections to loads, in tokens' worth of work. Pure; seconds of any one clock.

    Heartbeats name the requests that they count (`counted`). One that was sent and is not named yet adds to a load; one
    that is named and is known to have ended takes from it: the next burst finds engines as they are.
    """

    def __init__(self) -> None:
        """Start with nothing sent."""
        self._sent: dict[Ref, list[_Sent]] = {}
        self._ended: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def sent(self, ref: Ref, tokens: int, request_id: str, now: float) -> None:
        """Work of about so many tokens was sent to an actor."""
        self._sent.setdefault(ref, []).append(_Sent(now, tokens, request_id))

    def ended(self, request_id: str, tokens: int, now: float) -> None:
        """A request has ended; wherever it is still counted, it counts for so many tokens."""
        self._ended[request_id] = now, tokens
        self._forget(now)

    def since(
        self, engines: Collection[Ref], counted: Callable[[Ref], Collection[str]], now: float
    ) -> dict[Ref, int]:
        """Return what to add to the load of each actor; negative where more has ended than was sent.

        Args:
            engines: whose loads name requests.
            counted: the requests that an actor's last heartbeat counts.
            now: the time.
        """
        self._forget(now)
        out: dict[Ref, int] = {}
        for ref, sent in list(self._sent.items()):
            # What a heartbeat counts already must not count twice: its engine would look fuller than those unheard.
            shown = counted(ref)
            recent = [
                one for one in sent
                if now - one.at < IN_FLIGHT_S and one.request_id not in shown and one.request_id not in self._ended
            ]  # fmt: skip
            if recent:
                self._sent[ref] = recent
                out[ref] = sum(one.tokens for one in recent)
            else:
                del self._sent[ref]
        for ref in engines if self._ended else ():
            over = sum(self._ended[name][1] for name in counted(ref) if name in self._ended)
            if over:
                out[ref] = out.get(ref, 0) - over
        return out

    def _forget(self, now: float) -> None:
        ended = self._ended
        while ended and (len(ended) > MAX_ENDED or next(iter(ended.values()))[0] < now - IN_FLIGHT_S):
            ended.popitem(last=False)
