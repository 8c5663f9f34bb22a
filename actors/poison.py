"""Requests that kill engines (R12): pure. Which deaths count against a request, and what follows from them.

A strike is a confirmed crash of an engine in a step of which the request was a part; the supervisor reads that step off
the engine's note (`runtime.step_note`). After a strike the request's steps are its own: nobody else takes part in them,
until it is past the place where the engine died. What has one strike and kills once more, in a step of its own, is
refused. So a request that kills wherever it runs takes two engines down; one that kills now and then, three: after the
second strike all of its steps are its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from schemas.errors import Poisoned
from schemas.record import Record, Strike

# Ids of the last moment are lost with an engine: the place where it died is a little behind the last one that arrived.
TRIAL_TOKENS = 8
FOR_GOOD = 1 << 62
REMEMBERED = 4096


def alone_until(strikes: Sequence[Strike], num_outputs: int) -> int:
    """Return the output index before which a sequence's steps are its own; 0 without strikes.

    Args:
        strikes: of its request.
        num_outputs: ids that it has at the start: those that had arrived when the engine died.
    """
    if not strikes:
        return 0
    return num_outputs + TRIAL_TOKENS if len(strikes) == 1 else FOR_GOOD


def verdict(strikes: Sequence[Strike]) -> Poisoned | None:
    """Return why a request runs nowhere any more, if so: it killed an engine alone, and not for the first time."""
    if len(strikes) < 2 or not any(strike.alone for strike in strikes[1:]):
        return None
    return Poisoned(f"the request is not run again: {len(strikes)} engines have crashed while they computed it")


def joined(known: Sequence[Strike], more: Iterable[Strike]) -> list[Strike]:
    """Return the strikes of both, each engine's death once."""
    out = {strike.epoch: strike for strike in known}
    for strike in more:
        out.setdefault(strike.epoch, strike)
    return list(out.values())


def told(record: Record, more: Sequence[Strike]) -> Record:
    """Return a record that knows of these strikes too."""
    strikes = joined(record.strikes, more)
    return record if len(strikes) == len(record.strikes) else record.model_copy(update={"strikes": strikes})


class Strikes:
    """What one admission actor has heard of crashes: of every request, also of those that it may own only later.

    Of more than `REMEMBERED` requests the oldest are forgotten; their records know.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[str, list[Strike]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def crashed(self, epoch: str, requests: Iterable[str]) -> list[str]:
        """An incarnation of an engine has crashed in a step of these requests; returns those that it is new of."""
        names = list(dict.fromkeys(requests))
        strike = Strike(epoch=epoch, alone=len(names) == 1)
        out = []
        for name in names:
            known = self._of.setdefault(name, [])
            self._of.move_to_end(name)
            if all(one.epoch != epoch for one in known):
                known.append(strike)
                out.append(name)
        while len(self._of) > REMEMBERED:
            self._of.popitem(last=False)
        return out

    def of(self, request_id: str) -> list[Strike]:
        """Return what was heard of a request."""
        return self._of.get(request_id, []) if self._of else []
