"""Engines for tests: a scripted runner over a small pool, on time that stands still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.core import EngineCore
from engine.live import StepResult
from engine.scheduler import Scheduler
from engine.scripted_runner import Script, ScriptedRunner
from engine.sequence import Key, Sequence
from kvstore.block import root_hash
from kvstore.pool import BlockPool
from schemas.record import Sampling

EOS = 2


def plain(prompt: list[int], choice: int, index: int, sampling: Sampling) -> int:
    """Ids that depend on the whole prompt, the choice and the index."""
    return 100 + (sum((i + 1) * t for i, t in enumerate(prompt)) + 31 * choice + 7 * index) % 900


class Time:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at


def make_core(
    directory: Path,
    *,
    name: str = "engine",
    num_blocks: int = 64,
    script: Script = plain,
    time: Time | None = None,
    scheduler: Scheduler | None = None,
    runner: ScriptedRunner | None = None,
    **options: Any,
) -> EngineCore:
    """Build a core whose runner verifies the blocks at every step."""
    clock = time if time is not None else Time()
    if runner is None:
        runner = ScriptedRunner(script, vocab_size=2000, max_context=1024, eos_ids=frozenset({EOS}))
    pool = BlockPool.create(directory, name, num_blocks, runner.block_nbytes, runner.layout, f"{name}00", "here")
    return EngineCore(
        runner,
        pool,
        scheduler if scheduler is not None else Scheduler(16, 128, 16, 48),
        root=lambda salt: root_hash("test", salt),
        now=clock.now,
        wall=clock.now,
        **options,
    )


def prompt(length: int, start: int = 10) -> list[int]:
    """A prompt unlike those with another start."""
    return [(start * 17 + i * 13) % 1999 for i in range(length)]


def sequence(name: str, ids: list[int], *, choice: int = 0, max_tokens: int = 20, **fields: Any) -> Sequence:
    """A greedy sequence."""
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=fields.pop("ignore_eos", False))
    return Sequence(Key(name, choice), ids, sampling, **fields)


def run(
    core: EngineCore, *, each: Callable[[StepResult], None] | None = None, limit: int = 5000
) -> dict[Key, list[int]]:
    """Step until nothing is left to do; the ledger must balance after each step and nothing may fail."""
    ids: dict[Key, list[int]] = {}
    for _ in range(limit):
        if not core.has_work:
            return ids
        result = core.step()
        core.check_integrity()
        assert not result.failed, result.failed
        for item in result.items:
            ids.setdefault(item.key, []).append(item.id)
        if each is not None:
            each(result)
    raise AssertionError("the engine did not come to an end")


def expected(ids: list[int], count: int, choice: int = 0) -> list[int]:
    """What `plain` answers."""
    return [plain(ids, choice, index, Sampling()) for index in range(count)]
