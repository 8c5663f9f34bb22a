"""Two engines and everything that can happen between them, in any order."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import expected, make_core, prompt, sequence
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from engine.core import EngineCore
from engine.live import HeldBlocks
from engine.plan import Sampled
from engine.sequence import Key
from kvstore.handoff import copy_blocks
from kvstore.pool import attach, detach

TOKENS = 12


class Pair(RuleBasedStateMachine):
    """A prefill and a decode engine with small pools; requests are handed over, aborted, and started locally."""

    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.prefill = make_core(self.directory, name="p", num_blocks=14)
        self.decode = make_core(self.directory, name="d", num_blocks=16)
        self.number = 0
        self.lengths: dict[str, tuple[int, int]] = {}  # prompt length and choices
        self.reserved: dict[str, list[int]] = {}
        self.held: dict[str, tuple[list[Sampled], HeldBlocks]] = {}
        self.ids: dict[Key, list[int]] = {}
        self.gone: set[str] = set()
        self.writers: set[str] = set()

    def ids_of(self, name: str) -> list[int]:
        """Few different prompts, so that prefixes are shared."""
        length, _ = self.lengths[name]
        return prompt(length, length % 3)

    @rule(length=st.integers(1, 80), n=st.integers(1, 3))
    def dispatch(self, length: int, n: int) -> None:
        """A request for hand-off arrives at prefill."""
        self.number += 1
        name = f"r{self.number}"
        self.lengths[name] = (length, n)
        self.prefill.add(sequence(name, self.ids_of(name), handoff=True, num_first=n, max_tokens=TOKENS))

    @rule(length=st.integers(1, 80))
    def local(self, length: int) -> None:
        """A request that decode computes whole."""
        self.number += 1
        name = f"l{self.number}"
        self.lengths[name] = (length, 1)
        self.decode.add(sequence(name, self.ids_of(name), max_tokens=TOKENS))

    @rule()
    def reserve(self) -> None:
        """The oldest request without blocks at decode asks for them."""
        for name, (length, n) in self.lengths.items():
            if name[0] == "r" and name not in self.reserved and name not in self.gone:
                blocks = self.decode.reserve(Key(name, 0), length, n)
                if blocks is not None:
                    self.reserved[name] = blocks
                return

    @rule()
    def step_prefill(self) -> None:
        """Prefill steps."""
        result = self.prefill.step()
        assert not result.failed and not result.items and not result.ended
        for key, first in result.held:
            self.held[key.request_id] = (first, result.held_blocks[key])

    @rule(times=st.integers(1, 6))
    def step_decode(self, times: int) -> None:
        """Decode steps."""
        for _ in range(times):
            result = self.decode.step()
            assert not result.failed
            for item in result.items:
                self.ids.setdefault(item.key, []).append(item.id)

    @rule()
    def transfer(self) -> None:
        """One request whose both sides are ready moves over and starts."""
        for name in [n for n in self.held if n in self.reserved]:
            first, blocks = self.held.pop(name)
            key, to = Key(name, 0), self.reserved[name]
            assert self.prefill.pool.check(blocks.refs)
            copy_blocks(
                attach(self.prefill.pool.handle()),
                blocks.refs,
                attach(self.decode.pool.handle()),
                self.decode.refs(key),
                should_stop=lambda: False,
            )
            ids = self.ids_of(name)
            for one in first:
                self.ids[Key(name, one.choice)] = [one.id]
            starts = [
                sequence(name, ids, choice=one.choice, outputs=[one.id], max_tokens=TOKENS) for one in first
            ]
            self.decode.activate(starts, to, blocks.num_tokens)
            assert self.prefill.release(key)
            return

    @rule(data=st.data(), writing=st.booleans())
    def abort(self, data: st.DataObject, writing: bool) -> None:
        """A request is dropped on both sides, perhaps while its transfer is writing."""
        open_ = [name for name in self.lengths if name not in self.gone]
        if not open_:
            return
        name = data.draw(st.sampled_from(open_))
        self.gone.add(name)
        writer = f"job-{name}" if writing and name in self.reserved else None
        self.prefill.abort(Key(name, 0))
        for choice in range(self.lengths[name][1]):
            self.decode.abort(Key(name, choice), writer=writer)
        self.held.pop(name, None)
        if writer is not None:
            self.writers.add(writer)

    @rule()
    def absolve(self) -> None:
        """All writers confirm."""
        for writer in self.writers:
            self.decode.absolve(writer)
        self.writers.clear()

    @invariant()
    def balances(self) -> None:
        """Both ledgers balance at any moment."""
        for core in (self.prefill, self.decode):
            core.check_integrity()

    def teardown(self) -> None:
        """Everything that was not dropped comes to its end with the ids of an undisturbed run; all blocks return."""
        try:
            self._finish()
        finally:
            for core in (self.prefill, self.decode):
                core.pool.close()
            detach()

    def _finish(self) -> None:
        self.absolve()
        for _ in range(3000):
            if self._idle(self.prefill) and self._idle(self.decode):
                break
            self.reserve()
            self.step_prefill()
            self.transfer()
            self.step_decode(1)
        else:
            raise AssertionError("the two engines block each other")
        for name, (_, n) in self.lengths.items():
            for choice in range(n):
                got, ids = self.ids.get(Key(name, choice), []), self.ids_of(name)
                wanted = expected(ids, TOKENS, choice)
                assert got == (wanted[: len(got)] if name in self.gone else wanted)
        assert self.prefill.pool.in_use == self.decode.pool.in_use == 0

    @staticmethod
    def _idle(core: EngineCore) -> bool:
        load = core.load()
        return not (load["running"] or load["waiting"] or load["held"] or load["expected"])


@pytest.mark.slow
def test_any_order_of_events_gives_the_same_ids_and_returns_all_blocks(tmp_path: Path) -> None:
    """Hand-offs, local requests, aborts and late writers in random order: no wrong id, no lost block, no deadlock."""
    Pair.directory = tmp_path
    run_state_machine_as_test(
        Pair,
        settings=settings(
            max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
