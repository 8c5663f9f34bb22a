"""An engine in this very process: runner, pool, scheduler and core, without bus or actors."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.core import EngineCore
from engine.live import StepResult
from engine.native_runner import NativeRunner
from engine.plan import Runner
from engine.real_runner import load_runner
from engine.scheduler import Scheduler
from engine.sequence import Key, Sequence
from headrace.fetch import default_cache_dir
from kernels.kv_format import FORMATS
from kvstore.block import BLOCK_TOKENS, num_blocks_for, root_hash
from kvstore.pool import DEFAULT_DIRECTORY, BlockPool
from schemas.record import Sampling
from schemas.settings import Settings

STEPS_WITHOUT_PROGRESS = 1000
BUDGET = int(Settings.model_fields["token_budget"].default)  # as an engine node has it


class EngineFailed(Exception):
    """Raised when a sequence fails, or the engine stops getting anywhere."""


def make_runner(kind: str, model: Path, threads: int) -> Any:
    """Load a runner.

    Args:
        kind: `native`, `native:BOUND` with another `coarse_below` (0: 16 bits everywhere), `native:FORMAT` with rounded
            keys and values (`int8`, `fp8`), or `torch:DTYPE`.
        model: a GGUF file.
        threads: of its kernels.

    Raises:
        ValueError: if there is no such kind.
    """
    name, _, rest = kind.partition(":")
    if name not in ("native", "torch"):
        raise ValueError(f"{kind!r} is not native, native:BOUND, native:FORMAT or torch:DTYPE")
    cache = default_cache_dir().parent  # as nodes have it, so that weights are packed once for both
    if name == "native" and rest in FORMATS:
        return NativeRunner(model, threads, cache, kv_format=rest)
    if name == "native" and rest:
        return NativeRunner(model, threads, cache, coarse_below=float(rest))
    return load_runner(model, engine=name, dtype=rest or "auto", threads=threads, cache=cache)


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of one request, as a value: it can be run again and again."""

    name: str
    ids: tuple[int, ...]
    sampling: Sampling
    choice: int = 0
    outputs: tuple[int, ...] = ()  # computed before, by an engine that is gone
    salt: str = ""  # whose blocks it may find; by default nobody's

    @property
    def key(self) -> Key:
        """Its name inside an engine."""
        return Key(self.name, self.choice)

    def sequence(self, **fields: Any) -> Sequence:
        """Return a new sequence for it."""
        salt = self.salt or f"{self.name}/{self.choice}"
        return Sequence(self.key, list(self.ids), self.sampling, outputs=list(self.outputs), salt=salt, **fields)

    def with_tokens(self, count: int) -> Request:
        """Return it with another length of the answer."""
        return replace(self, sampling=self.sampling.model_copy(update={"max_tokens": count}))


def greedy(name: str, ids: Iterable[int], tokens: int) -> Request:
    """Return a greedy request that runs to its full length."""
    return Request(name, tuple(ids), Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True))


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine batches."""

    max_running: int = 64
    token_budget: int = BUDGET
    max_chunk: int = BUDGET
    num_blocks: int = 0  # 0: room for all that can run at once


class Engine:
    """A core over a runner, for as long as a `with` block; the runner can then be used by another one."""

    def __init__(
        self,
        runner: Runner,
        shape: Shape,
        *,
        longest: int = 512,
        watch: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        """Make the pool and bind the runner to it.

        Args:
            runner: loaded before.
            shape: of batches and pool.
            longest: tokens of the longest sequence, to size a pool that is not given.
            watch: told the number of rows of each step.
            options: more arguments of `EngineCore`.
        """
        self._watch = watch
        self.runner = runner
        blocks = shape.num_blocks or shape.max_running * (num_blocks_for(longest) + 1)
        self._directory = tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=_memory_directory())
        self.pool = BlockPool.create(
            Path(self._directory.name), "bench", blocks, runner.block_nbytes, runner.layout, "0", "here"
        )
        self.core = EngineCore(
            runner,
            self.pool,
            Scheduler(BLOCK_TOKENS, shape.token_budget, shape.max_running, shape.max_chunk),
            root=lambda salt: root_hash("bench", runner.fingerprint, runner.layout, salt),
            now=time.monotonic,
            wall=time.time,
            **options,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        # The runner's hold on the pool's memory must end before the memory can go.
        self.runner.bind(memoryview(bytearray(self.runner.block_nbytes)), 1)
        self.pool.close()
        self._directory.cleanup()

    def steps(self) -> Iterator[StepResult]:
        """Step until nothing is left to do.

        Raises:
            EngineFailed: if a sequence fails, or nothing moves any more.
        """
        idle = 0
        while self.core.has_work:
            result = self.core.step()
            if result.failed:
                raise EngineFailed(f"{len(result.failed)} sequences failed: {result.failed[0][1]}")
            idle = 0 if result.num_tokens or result.eventful else idle + 1
            if idle > STEPS_WITHOUT_PROGRESS:
                raise EngineFailed("the engine does not get on")
            if self._watch is not None:
                self._watch(result.num_rows)
            yield result

    def run(self, requests: Iterable[Request], *, every: int = 0) -> dict[Key, list[int]]:
        """Run requests to their ends and return all output ids of each, those it came with included.

        Args:
            requests: added at once, in their order.
            every: steps between one addition and the next, if not at once.
        """
        waiting = list(requests)
        found: dict[Key, list[int]] = {r.key: list(r.outputs) for r in waiting}
        while waiting or self.core.has_work:
            for request in waiting[: 1 if every else None]:
                self.core.add(request.sequence())
            waiting = waiting[1:] if every else []
            for number, result in enumerate(self.steps(), 1):
                for item in result.items:
                    found[item.key].append(item.id)
                if every and waiting and number >= every:
                    break
        return found

    @property
    def statistics(self) -> dict[str, float]:
        """The core's counters."""
        return self.core.statistics()


def _memory_directory() -> Path | None:
    return DEFAULT_DIRECTORY if DEFAULT_DIRECTORY.is_dir() else None
