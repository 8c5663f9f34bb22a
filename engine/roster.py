"""Who is in the engine and in what phase: the lines of running and waiting sequences, each by rank."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterator

from engine.live import Live
from engine.sequence import Key, Phase, Sequence
from kvstore.block import BLOCK_TOKENS
from kvstore.pool import BlockPool


class Line:
    """Sequences in the order of their places; none stands in it twice."""

    def __init__(self) -> None:
        """Start empty."""
        self._line: list[Live] = []
        self._keys: set[Key] = set()

    def add(self, live: Live) -> None:
        """Put a sequence in its place."""
        assert live.seq.key not in self._keys
        bisect.insort(self._line, live, key=_place)
        self._keys.add(live.seq.key)

    def discard(self, live: Live) -> None:
        """Take a sequence out, if it stands here."""
        if live.seq.key in self._keys:
            self._keys.remove(live.seq.key)
            del self._line[bisect.bisect_left(self._line, _place(live), key=_place)]

    @property
    def first(self) -> Live | None:
        """The first one, if any."""
        return self._line[0] if self._line else None

    def __iter__(self) -> Iterator[Live]:
        return iter(self._line)

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys


class Roster:
    """All sequences that live in an engine. The core moves blocks; this keeps phases and lines in agreement."""

    def __init__(self, rank: Callable[[Sequence], float]) -> None:
        """Start empty; `rank` orders the lines, arrival here breaks its ties."""
        self._rank = rank
        self._order = 0
        self.live: dict[Key, Live] = {}
        self.running = Line()
        self.waiting = Line()

    def enter(self, seq: Sequence, root: bytes) -> Live:
        """Take a sequence in; it stands in no line yet."""
        live = Live(seq, root, (self._rank(seq), self._order))
        self._order += 1
        self.live[seq.key] = live
        return live

    def wait(self, live: Live) -> None:
        """Put a sequence into the queue, with nothing computed."""
        self.running.discard(live)
        live.restart()
        self.waiting.add(live)

    def start(self, live: Live) -> None:
        """Let a sequence take part in steps."""
        self.waiting.discard(live)
        live.seq.phase = Phase.RUNNING
        self.running.add(live)

    def hold(self, live: Live) -> None:
        """Let a computed prompt wait for its hand-off."""
        self.running.discard(live)
        live.seq.phase = Phase.HELD

    def leave(self, live: Live) -> None:
        """Forget a sequence."""
        del self.live[live.seq.key]
        self.running.discard(live)
        self.waiting.discard(live)

    @property
    def first(self) -> Live | None:
        """The one that must always be able to finish: the first that runs, or else waits."""
        return self.running.first or self.waiting.first

    @property
    def next_deadline(self) -> float:
        """Earliest deadline in the lines; infinite if there is none."""
        lines = (v.seq.deadline for line in (self.running, self.waiting) for v in line)
        return min((at for at in lines if at > 0), default=float("inf"))

    def late(self, wall: float, but: Container[Key]) -> list[Live]:
        """Return those past their deadline; waiting ones in `but` are left alone."""
        late = [v for v in self.running if 0 < v.seq.deadline <= wall]
        return late + [v for v in self.waiting if 0 < v.seq.deadline <= wall and v.seq.key not in but]

    def ready(self, pool: BlockPool, but: Container[Key]) -> Iterator[Sequence]:
        """Yield waiting sequences that may start; one whose prompt is being computed waits to share the blocks."""
        computing = {v.hashes[v.prompt_hashes - 1] for v in self.running if v.prefilling and v.prompt_hashes}
        for live in self.waiting:
            if live.seq.key in but:
                continue
            if live.prompt_hashes:
                last = live.hashes[live.prompt_hashes - 1]
                if last in computing:
                    continue
                if pool.block_of(last) is None:
                    computing.add(last)
            yield live.seq

    @property
    def num_held_blocks(self) -> int:
        """Blocks of prompts that wait for their hand-off; shared ones count once each."""
        return sum(len(v.seq.blocks) for v in self.live.values() if v.seq.phase is Phase.HELD)

    def load(self) -> dict[str, int]:
        """Return counts of sequences, and of tokens that wait to be computed."""
        queued = sum(v.seq.num_tokens for v in self.waiting)
        queued += sum(v.seq.num_uncomputed for v in self.running if v.prefilling)
        held = sum(v.seq.phase is Phase.HELD for v in self.live.values())
        return {"running": len(self.running), "waiting": len(self.waiting), "held": held, "queued_tokens": queued}

    def check_integrity(self) -> None:
        """Assert that phases, lines and ids agree."""
        for line in (self.running, self.waiting):
            places = [v.place for v in line]
            assert places == sorted(places) and len(places) == len(line), "a line is out of order"
        for live in self.live.values():
            seq = live.seq
            assert (seq.key in self.running) == (seq.phase is Phase.RUNNING), seq
            assert (seq.key in self.waiting) == (seq.phase is Phase.WAITING), seq
            assert seq.num_computed <= len(seq.blocks) * BLOCK_TOKENS, seq
            assert live.context == seq.tokens, seq


def _place(live: Live) -> tuple[float, int]:
    return live.place
