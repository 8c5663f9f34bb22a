"""`python -m bench.kv_transfer`: what it is worth to move blocks in larger pieces, or in smaller ones.

*Larger*: `copy_blocks` over neighbouring blocks, which it copies in one piece, and over the same blocks where no two
are neighbours. *Smaller*: the most that decode or prefill could win by starting on the first layers of blocks before
the last ones have arrived. For a prompt on a real model that is, at a hand-off, all of the copy that could hide behind
prefill; at a load from host memory what of the copy could hide behind the step that computes the rest of the prompt, or
the other way round. Groups of layers of a block are no neighbours of the next block's, so their copies are timed as
well. Times are medians; the engine computes alone, in this process. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.inprocess import make_runner
from engine.plan import BatchPlan, Row
from engine.sequence import Key
from headrace.fetch import ensure_model
from kvstore.block import BLOCK_TOKENS
from kvstore.handoff import copy_blocks
from kvstore.pool import DEFAULT_DIRECTORY, BlockPool
from schemas.messages import BlockRef
from schemas.record import Sampling

LENGTHS = (1024, 4096)
TAIL = 16  # tokens of a stored prompt that are computed all the same
TURNS = 7
BUDGET = 256  # tokens of a step
GROUPS = (2, 5, 10)


def timed(work: Callable[[], object], turns: int = TURNS) -> float:
    """Return the median seconds of some turns; one more goes first and does not count."""
    taken = []
    for _ in range(turns + 1):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


class Pools:
    """Two pools in shared memory with blocks of a model."""

    def __init__(self, stack: ExitStack, num_blocks: int, block_nbytes: int, layout: str) -> None:
        memory = DEFAULT_DIRECTORY if DEFAULT_DIRECTORY.is_dir() else None
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=memory)))
        self.num_blocks = num_blocks
        self.source, self.dest = (
            BlockPool.create(directory, name, num_blocks, block_nbytes, layout, "0", "here") for name in ("a", "b")
        )
        for pool in (self.source, self.dest):
            stack.callback(pool.close)
            pool.view()[:] = bytes(len(pool.view()))

    def copy(self, order: list[int]) -> None:
        """Copy these blocks onto those of the same numbers."""
        refs = [BlockRef(index=i, generation=1) for i in order]
        copy_blocks(self.source, refs, self.dest, refs, should_stop=lambda: False)

    def copy_groups(self, count: int, groups: int) -> None:
        """Copy blocks in so many groups of layers, unverified: piece by piece, since none is another's neighbour."""
        size = self.source.block_nbytes
        part = size // groups
        from_, to = self.source.view(), self.dest.view()
        for group in range(groups):
            for at in range(group * part, count * size, size):
                to[at : at + part] = from_[at : at + part]


def coalescing(pools: Pools) -> dict[str, float]:
    """Return MB/s with neighbours and without."""
    mb = len(pools.source.view()) / 1e6
    ordered = list(range(pools.num_blocks))
    apart = ordered[::2] + ordered[1::2]
    random.Random(1).shuffle(apart)
    near, far = timed(lambda: pools.copy(ordered)), timed(lambda: pools.copy(apart))
    return {"together_mb_s": round(mb / near), "apart_mb_s": round(mb / far), "ratio": round(far / near, 3)}


def compute(runner: Any, ids: list[int], blocks: list[int], first: int = 0) -> None:
    """Compute a prompt from a position on, as an engine cuts it."""
    for start in range(first, len(ids), BUDGET):
        end = min(len(ids), start + BUDGET)
        row = Row(
            Key("p", 0), ids[start:end], start, len(ids), blocks, end == len(ids), 0, (0,), Sampling(temperature=0.0),
            ids[:end],
        )  # fmt: skip
        runner.execute(BatchPlan(0, [row]))


def prompt(runner: Any, pools: Pools, length: int) -> dict[str, Any]:
    """Return times of a prompt, and the most that groups of layers could save."""
    rng = random.Random(length)
    ids = [rng.randrange(3, runner.vocab_size) for _ in range(length)]
    stored = (length - TAIL) // BLOCK_TOKENS
    blocks = list(range(length // BLOCK_TOKENS + 1))
    cold = timed(lambda: compute(runner, ids, blocks), 2)
    tail = timed(lambda: compute(runner, ids, blocks, length - TAIL))
    copy = timed(lambda: pools.copy(list(range(stored))))
    unverified = timed(lambda: pools.copy_groups(stored, 1))
    slices = {str(n): round(timed(lambda n=n: pools.copy_groups(stored, n)) * 1e3, 2) for n in GROUPS}  # type: ignore[misc]
    return {
        "tokens": length, "prefill_ms": round(cold * 1e3, 1), "rest_ms": round(tail * 1e3, 2),
        "copy_ms": round(copy * 1e3, 2), "unverified_ms": round(unverified * 1e3, 2), "in_groups_ms": slices,
        "handoff_saves_at_most": round(copy / (cold + copy), 4),
        "load_saves_at_most": round(min(copy, tail) / (copy + tail), 4),
        "load_saves_at_most_ms": round(min(copy, tail) * 1e3, 2),
    }  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    threads = args.threads or len(os.sched_getaffinity(0))
    runner = make_runner("native", args.model or ensure_model(), threads)
    num_blocks = max(args.tokens) // BLOCK_TOKENS + 1
    with ExitStack() as stack:
        stack.callback(runner.close)
        pools = Pools(stack, num_blocks, runner.block_nbytes, runner.layout)
        runner.bind(pools.source.view(), num_blocks)
        found = [prompt(runner, pools, length) for length in args.tokens]
        runner.bind(memoryview(bytearray(runner.block_nbytes)), 1)
        return {
            "check": "kv_transfer", "threads": threads, "block_kb": round(runner.block_nbytes / 1e3),
            "coalescing": coalescing(pools), "prompts": found,
        }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table("", *(str(p["tokens"]) for p in result["prompts"]), title="A prompt by tokens", title_justify="left")
    for name in list(result["prompts"][0])[1:]:
        table.add_row(name.replace("_", " "), *(str(p[name]) for p in result["prompts"]))
    console = Console(width=120)
    console.print(table)
    console.print(f"blocks of {result['block_kb']} KB, neighbours and not: {result['coalescing']}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_transfer", description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; the default model without it")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--tokens", type=lambda s: [int(n) for n in s.split(",")], default=list(LENGTHS))
    result = measure(parser.parse_args())
    show(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
