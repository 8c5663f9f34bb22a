"""Whose turn the next step is, where some sequences may not share theirs: pure.

An engine that dies takes everybody along who was in the step. So a request that may have killed one gets steps of its
own: if it kills again, it is known that it was nobody else. Every other step is everybody else's.
"""

from __future__ import annotations

from engine.sequence import Key, Phase, Sequence

EVERYBODY = ""  # in place of a request's id: the turn of all that may share a step


class Turns:
    """Sequences that may not share steps, and whose turn was last."""

    def __init__(self) -> None:
        self._apart: dict[Key, Sequence] = {}
        self._last = EVERYBODY

    def __bool__(self) -> bool:
        return bool(self._apart)

    def add(self, seq: Sequence) -> None:
        """A sequence has come; it counts here only if its next steps are its request's own."""
        if seq.alone:
            self._apart[seq.key] = seq

    def requests(self) -> dict[str, None]:
        """Return the requests whose steps are their own, in their turn; what has ended or is past that is forgotten."""
        over = [key for key, seq in self._apart.items() if not seq.alone or seq.phase is Phase.FINISHED]
        for key in over:
            del self._apart[key]
        return dict.fromkeys(key.request_id for key in self._apart)

    def order(self) -> list[str]:
        """Return whose turn it is, and who is asked next if these have nothing to do; every other is everybody's."""
        names = list(self.requests())
        return [EVERYBODY, *names] if self._last != EVERYBODY else [*names, EVERYBODY]

    def took(self, turn: str) -> None:
        """Note who had the step: of those apart it is the last from now on."""
        self._last = turn
        for key in [key for key in self._apart if key.request_id == turn]:
            self._apart[key] = self._apart.pop(key)
