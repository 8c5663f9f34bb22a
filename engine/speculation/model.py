"""A small model guesses for a large one: a runner of its own, over a little memory of its own, always greedy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.plan import BatchPlan, Row, Runner, Sampled
from engine.sequence import Key
from engine.speculation.drafter import Wish
from kvstore.block import num_blocks_for
from schemas.record import Sampling

CATCH_UP_TOKENS = 64  # of contexts that the small model has not seen, in one call: a step never waits for more
_GREEDY = Sampling(temperature=0.0)


class _Known:
    """What the small model has computed of a sequence."""

    __slots__ = ("blocks", "ids")

    def __init__(self) -> None:
        self.ids: list[int] = []  # ids whose KV lies in the blocks
        self.blocks: list[int] = []


class ModelDrafter:
    """Guesses with another runner, all wishes of a step together; its least recently used sequences make room."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        """Bind the runner to memory of its own.

        Args:
            runner: the small model; nobody else may use it.
            num_blocks: blocks of its memory.
        """
        self._runner = runner
        self._memory = bytearray(num_blocks * runner.block_nbytes)
        runner.bind(memoryview(self._memory), num_blocks)
        self._free = list(range(num_blocks))
        self._known: OrderedDict[Key, _Known] = OrderedDict()
        self._step = 0

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """Return greedy guesses; none for a sequence whose context is still to be read, or that finds no room."""
        left = CATCH_UP_TOKENS
        ready: list[tuple[int, Wish, _Known]] = []
        reading: list[Row] = []
        asking = {wish.key for wish in wishes}
        for at, wish in enumerate(wishes):
            known = self._agreeing(wish)
            if not self._make_room(known, len(wish.context) + wish.length, asking):
                continue
            missing = len(wish.context) - len(known.ids)
            if missing > left:
                if left > 0:
                    reading.append(self._row(wish.key, known, list(wish.context), left, sample=False))
                    left = 0
                continue
            left -= missing
            ready.append((at, wish, known))
        out: list[list[int]] = [[] for _ in wishes]
        contexts = {wish.key: list(wish.context) for _, wish, _ in ready}
        rows = reading + [self._row(wish.key, known, contexts[wish.key], None) for _, wish, known in ready]
        going = ready
        while rows:
            chosen = {one.key: one for one in self._execute(rows)}
            going = [(at, wish, known) for at, wish, known in going if chosen[wish.key].error is None]
            for at, wish, _ in going:
                out[at].append(chosen[wish.key].id)
                contexts[wish.key].append(chosen[wish.key].id)
            going = [(at, wish, known) for at, wish, known in going if len(out[at]) < wish.length]
            rows = [self._row(wish.key, known, contexts[wish.key], None) for _, wish, known in going]
        return out

    def forget(self, key: Key) -> None:
        """Free a sequence's blocks."""
        known = self._known.pop(key, None)
        if known is not None:
            self._free += known.blocks

    def close(self) -> None:
        """Let go of the runner and its memory."""
        self._runner.close()
        self._known.clear()
        self._memory = bytearray()

    def _execute(self, rows: list[Row]) -> list[Sampled]:
        self._step += 1
        return self._runner.execute(BatchPlan(self._step, rows))

    def _agreeing(self, wish: Wish) -> _Known:
        """Return what is known of a sequence, without guesses that turned out wrong."""
        known = self._known.setdefault(wish.key, _Known())
        self._known.move_to_end(wish.key)
        ids, context = known.ids, wish.context
        # The last id of the context is always computed: its logits are wanted.
        count = min(len(ids), len(context) - 1)
        if ids[:count] != context[:count]:
            count = next(i for i in range(count) if ids[i] != context[i])
        del ids[count:]
        return known

    def _make_room(self, known: _Known, num_tokens: int, asking: set[Key]) -> bool:
        needed = num_blocks_for(num_tokens) - len(known.blocks)
        if num_tokens > self._runner.max_context:
            return False
        for key in list(self._known):
            if needed <= len(self._free):
                break
            if key not in asking:
                self.forget(key)
        if needed > len(self._free):
            return False
        for _ in range(needed):
            known.blocks.append(self._free.pop())
        return True

    def _row(self, key: Key, known: _Known, context: list[int], count: int | None, *, sample: bool = True) -> Row:
        """Return the row that computes what is missing of a context, and note it as computed."""
        start = len(known.ids)
        ids = context[start:] if count is None else context[start : start + count]
        known.ids += ids
        return Row(key, ids, start, len(context), known.blocks, sample, 0, (0,), _GREEDY, context)
