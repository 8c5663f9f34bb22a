"""The same requests under every circumstance that serving knows; each must give the ids that it gives alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, replace
from typing import Any

from bench.inprocess import Engine, EngineFailed, Request, Shape
from engine.plan import Runner
from engine.sequence import Key, Sequence
from engine.speculation.lookup import PromptLookup
from kvstore.block import num_blocks_for
from schemas.record import Sampling

Texts = dict[Key, list[int]]
LONGEST_PROMPT = 200  # tokens; longer questions are left out, to bound pools and time


@dataclass(frozen=True, slots=True)
class Found:
    """What one condition came to."""

    requests: int
    mismatches: int
    first: str = ""  # which request differs first, and where
    facts: Mapping[str, Any] = field(default_factory=dict)  # what shows that the condition was really there
    took_s: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Return it for the report."""
        out = {"requests": self.requests, "mismatches": self.mismatches, **self.facts, "took_s": round(self.took_s, 1)}
        return out | ({"first": self.first} if self.first else {})


class NotProvoked(Exception):
    """Raised when a condition did not come about, so that equal texts would show nothing."""


def requests(prompts: Listing[Listing[int]], tokens: int) -> tuple[list[Request], list[Request]]:
    """Return each prompt as a greedy request, and as a seeded one with two choices (their first, then the second)."""
    plain = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    greedy = [Request(f"greedy-{i}", tuple(p), plain) for i, p in enumerate(prompts)]
    seeded = [
        Request(f"seeded-{i}", tuple(p), Sampling(**_drawn(i), max_tokens=tokens, ignore_eos=True), choice)
        for choice in (0, 1)
        for i, p in enumerate(prompts)
    ]
    return greedy, seeded


def _drawn(number: int) -> dict[str, Any]:
    """Return one of several ways to draw, each with a seed of its own."""
    ways: list[dict[str, Any]] = [
        {"top_p": 0.95}, {"top_k": 40}, {"min_p": 0.05}, {}, {"repetition_penalty": 1.1, "presence_penalty": 0.4},
    ]  # fmt: skip
    return {"temperature": (0.7, 1.0, 0.9)[number % 3], "seed": 7_000 + number, **ways[number % len(ways)]}


def longest(wanted: Listing[Request]) -> int:
    """Return the tokens of the longest request, with its answer."""
    return max((len(r.ids) + r.sampling.max_tokens for r in wanted), default=0)


def alone(runner: Runner, wanted: Listing[Request]) -> Texts:
    """Run each request with nobody beside it and an empty cache: the texts that all others are held against."""
    with Engine(runner, Shape(max_running=1), longest=longest(wanted)) as engine:
        return engine.run(wanted)


class Checker:
    """Runs conditions with one runner and compares with the texts of requests that ran alone."""

    def __init__(self, runner: Runner, wanted: Listing[Request], want: Texts) -> None:
        """Take the requests that each condition runs, and what all of them give alone (more may be in it)."""
        self._runner = runner
        self._requests = list(wanted)
        self._longest = longest(wanted)
        self._want = want

    def conditions(self) -> dict[str, Callable[[], Found]]:
        """Return all conditions by name."""
        return {
            "beside_1": lambda: self._plain(Shape(max_running=2)),
            "beside_7": lambda: self._plain(Shape(max_running=8), least_rows=8),
            "beside_63": lambda: self._plain(Shape(max_running=64), least_rows=64, warm=True),
            "admitted_mid_run": lambda: self._plain(Shape(max_running=64), every=3),
            "chunked": lambda: self._plain(Shape(max_running=24, token_budget=48, max_chunk=7)),
            "from_cache": self.from_cache,
            "preempted": self.preempted,
            "preempted_with_parking": lambda: self.preempted(parking_tokens=8192),
            "prefilled_again": self.prefilled_again,
            "guessed": self.guessed,
            "handed_over": self.handed_over,
        }

    def compare(self, got: Texts, began: float, facts: Mapping[str, Any] | None = None) -> Found:
        """Count the requests whose ids are not those they have alone."""
        if not got:
            raise NotProvoked("nothing ran")
        bad = {key: ids for key, ids in got.items() if ids != self._want[key]}
        first = ""
        if bad:
            key, ids = next(iter(bad.items()))
            pairs = zip(ids, self._want[key], strict=False)
            at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(self._want[key])))
            first = f"{key.request_id}/{key.choice} at output {at}"
        return Found(len(got), len(bad), first, facts or {}, time.monotonic() - began)

    def _plain(self, shape: Shape, *, every: int = 0, least_rows: int = 2, warm: bool = False) -> Found:
        """Run in one shape of batches.

        Args:
            shape: of batches and pool.
            every: steps between one request's arrival and the next one's.
            least_rows: of some step, or as many as there are requests; else the condition did not come about.
            warm: find the prompts' full blocks in the pool. A scheduler that keeps the pace of running streams lets
                the first ones end before the 64th prompt is computed.
        """
        began = time.monotonic()
        rows = 0

        def watch(count: int) -> None:
            nonlocal rows
            rows = max(rows, count)

        with Engine(self._runner, shape, longest=self._longest, watch=watch) as engine:
            if warm:
                engine.run([r.with_tokens(1) for r in self._requests[: shape.max_running]])
                rows = 0
            got = engine.run(self._requests, every=every)
        if rows < min(least_rows, len(self._requests)):
            raise NotProvoked(f"no step had more than {rows} rows")
        return self.compare(got, began, {"rows": rows})

    def from_cache(self) -> Found:
        """Run prompts whose full blocks another request has left behind."""
        began = time.monotonic()
        mine = [replace(r, salt="shared") for r in self._requests]
        with Engine(self._runner, Shape(max_running=32, num_blocks=2048)) as engine:
            engine.run([replace(r.with_tokens(1), name=f"before-{r.name}") for r in mine])
            before = engine.statistics["cached_tokens_total"]
            got = engine.run(mine)
            cached = int(engine.statistics["cached_tokens_total"] - before)
        least = sum((len(r.ids) - 1) // 16 * 16 for r in mine)
        if cached < least or least == 0:
            raise NotProvoked(f"{cached} tokens came from the cache, of {least}")
        return self.compare(got, began, {"cached_tokens": cached})

    def preempted(self, *, parking_tokens: int = 0) -> Found:
        """Run in a pool that is too small for those that run at once; with room to park, blocks may be kept."""
        began = time.monotonic()
        most = num_blocks_for(self._longest)
        blocks = max(most + 2, 5 * most // 2)
        shape = Shape(max_running=16, num_blocks=blocks)
        with Engine(self._runner, shape, parking_tokens=parking_tokens) as engine:
            got = engine.run(self._requests)
            counts = engine.statistics
        if counts["preempted_total"] == 0:
            raise NotProvoked("nobody was preempted")
        facts = {"preemptions": int(counts["preempted_total"]), "parked": int(counts["preempted_parked_total"])}
        return self.compare(got, began, facts)

    def prefilled_again(self) -> Found:
        """Start from the prompt and the first outputs, as after the loss of an engine."""
        began = time.monotonic()
        resumed = []
        for number, request in enumerate(self._requests):
            ids = self._want[request.key]
            resumed.append(replace(request, outputs=tuple(ids[: 1 + number * 7 % (len(ids) - 1)])))
        with Engine(self._runner, Shape(max_running=32), longest=self._longest) as engine:
            got = engine.run(resumed)
        return self.compare(got, began, {"outputs_given": sum(len(r.outputs) for r in resumed)})

    def guessed(self) -> Found:
        """Run with ids guessed ahead from prompt and answer."""
        began = time.monotonic()
        with Engine(
            self._runner, Shape(max_running=4), longest=self._longest, drafter=PromptLookup()
        ) as engine:  # few at once: guesses pay less in large batches, and stop
            got = engine.run(self._requests)
            counts = engine.statistics
        if counts["drafted_total"] == 0:
            raise NotProvoked("nothing was guessed")
        facts = {"guessed": int(counts["drafted_total"]), "right": int(counts["accepted_total"])}
        return self.compare(got, began, facts)

    def handed_over(self) -> Found:
        """Compute prompts in one engine, copy their blocks into another one, and decode there."""
        began = time.monotonic()
        groups = _by_prompt(self._requests)
        held = self._prefill(groups)
        got: Texts = {}
        with Engine(self._runner, Shape(max_running=32), longest=self._longest) as engine:
            waiting = list(held)
            while waiting or engine.core.has_work:
                while waiting and self._accept(engine, waiting[0], got):
                    waiting.pop(0)
                for result in engine.steps():
                    for item in result.items:
                        got[item.key].append(item.id)
                    if waiting:
                        break
        return self.compare(got, began, {"prompts": len(groups)})

    def _prefill(self, groups: Listing[list[Request]]) -> list[_Held]:
        by_key = {group[0].key: group for group in groups}
        out: list[_Held] = []
        with Engine(self._runner, Shape(max_running=16), longest=self._longest) as engine:
            for group in groups:
                engine.core.add(group[0].sequence(handoff=True, num_first=len(group)))
            view, size = engine.pool.view(), engine.pool.block_nbytes
            for result in engine.steps():
                for key, firsts in result.held:
                    blocks = result.held_blocks[key]
                    data = [bytes(view[ref.index * size : (ref.index + 1) * size]) for ref in blocks.refs]
                    ids = {one.choice: one.id for one in firsts}
                    out.append(_Held(by_key[key], [ids[r.choice] for r in by_key[key]], data, blocks.num_tokens))
                    engine.core.release(key)
            del view
        return out

    def _accept(self, engine: Engine, held: _Held, got: Texts) -> bool:
        blocks = engine.core.reserve(held.group[0].key, held.num_tokens, len(held.group))
        if blocks is None:
            return False
        view, size = engine.pool.view(), engine.pool.block_nbytes
        for block, data in zip(blocks, held.data, strict=True):
            view[block * size : (block + 1) * size] = data
        sequences: list[Sequence] = []
        for request, first in zip(held.group, held.firsts, strict=True):
            got[request.key] = [first]
            sequences.append(replace(request, outputs=(first,)).sequence())
        engine.core.activate(sequences, blocks, held.num_tokens)
        return True


@dataclass(frozen=True, slots=True)
class _Held:
    """A computed prompt on its way: its choices, their first ids, the bytes of its blocks."""

    group: list[Request]
    firsts: list[int]
    data: list[bytes]
    num_tokens: int


def _by_prompt(wanted: Listing[Request]) -> list[list[Request]]:
    groups: dict[str, list[Request]] = {}
    for request in sorted(wanted, key=lambda r: r.key):
        groups.setdefault(request.name, []).append(request)
    if any([r.choice for r in group] != list(range(len(group))) for group in groups.values()):
        raise EngineFailed("a request lacks its first choice")
    return list(groups.values())


def several_choices(runner: Runner, wanted: Listing[Request], want: Texts) -> Found:
    """Run all choices of each request together; they share the blocks of their prompt."""
    began = time.monotonic()
    shared = [replace(r, salt=f"choices of {r.name}") for r in sorted(wanted, key=lambda r: r.key)]
    with Engine(runner, Shape(max_running=32), longest=longest(wanted)) as engine:
        got = engine.run(shared)
        cached = int(engine.statistics["cached_tokens_total"])
    if cached == 0:
        raise NotProvoked("no choice shared the prompt of another")
    apart = sum(got[Key(r.name, 0)] != got[r.key] for r in wanted if r.choice == 1)
    return Checker(runner, wanted, want).compare(got, began, {"cached_tokens": cached, "choices_that_differ": apart})
