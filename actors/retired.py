"""What a detokenizer remembers of requests that it holds no more: pure. Most have ended, some were only fenced off."""

from __future__ import annotations

from collections import OrderedDict

from schemas.record import Fence

MAX_RETIRED = 4096


class Retired:
    """The fence under which each request left, newest last; of more than `limit` the oldest is forgotten."""

    def __init__(self, limit: int = MAX_RETIRED) -> None:
        self._limit = limit
        self._fences: OrderedDict[str, tuple[Fence, bool]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._fences)

    def note(self, request_id: str, fence: Fence, *, fenced_off: bool) -> None:
        """A request has left; `fenced_off`: it may be served elsewhere, and says nothing of the end."""
        self._fences[request_id] = (fence, fenced_off)
        self._fences.move_to_end(request_id)
        while len(self._fences) > self._limit:
            self._fences.popitem(last=False)

    def fence(self, request_id: str) -> Fence | None:
        """Return the fence under which a request left, if that is remembered."""
        known = self._fences.get(request_id)
        return None if known is None else known[0]

    def ended(self, request_id: str) -> bool:
        """Whether a request is known to have ended here: nobody has to serve it any more."""
        known = self._fences.get(request_id)
        return known is not None and not known[1]

    def covers(self, request_id: str, fence: Fence) -> bool:
        """Whether items under this fence come too late: above the fence of its leave, another try may bring it back."""
        known = self._fences.get(request_id)
        return known is not None and (fence <= known[0] or not known[1])
