"""`python -m bench.kv_format`: what 8-bit keys and values cost and save.

For `int8` and `fp8` on a real model: bytes of a stored block over a raw one; MB/s of raw bytes through `copy_blocks`
into a store and out of it, beside raw copies; how far distributions are from those of the engine that keeps KV exact,
teacher forced over questions and the exact engine's own answers; the error of single values by the number of those that
share a scale. Before a rate is printed every block has come back bit by bit. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.exact import conditions, divergence
from bench.inprocess import make_runner
from bench.questions import NoQuestions, default_path, read
from engine.plan import Row
from engine.sequence import Key
from headrace.fetch import ensure_model
from kernels.kv_format import BLOCK_TOKENS, Shape, native, plain
from kvstore.formats import shape_of, stored_form
from kvstore.handoff import copy_blocks
from kvstore.pool import DEFAULT_DIRECTORY, BlockPool
from models.text import load_text
from schemas.record import Sampling

FORMS = ("int8", "fp8")
SHARES = (16, 32, 64, 16 * 64)  # elements that share a scale; the last: a head's key or value of all tokens of a block
RATE_BLOCKS = 128
TURNS = 9
SAMPLED = 40  # prompts of which values are rounded
Floats = np.ndarray[Any, np.dtype[np.float32]]


class WrongBytes(Exception):
    """Raised when a block does not come back as it was."""


def prompts_of(model: Path, questions: Path, count: int) -> list[list[int]]:
    """Return the ids of questions as chats.

    Raises:
        NoQuestions: if there are too few that are not overlong.
    """
    text = load_text(model)
    ids = (text.chat_ids([{"role": "user", "content": q.text}], created=0) for q in read(questions))
    found = [one for one in ids if len(one) <= conditions.LONGEST_PROMPT][:count]
    if len(found) < count:
        raise NoQuestions(questions, f"{len(found)} questions of at most {conditions.LONGEST_PROMPT} tokens")
    return found


def computed(runner: Any, prompts: list[list[int]]) -> bytearray:
    """Return a pool with the full blocks of these prompts, each computed alone."""
    counts = [len(ids) // BLOCK_TOKENS for ids in prompts]
    pool = bytearray(sum(counts) * runner.block_nbytes)
    runner.bind(memoryview(pool), sum(counts))
    first = 0
    for number, (ids, count) in enumerate(zip(prompts, counts, strict=True)):
        if count:
            whole = ids[: count * BLOCK_TOKENS]
            blocks = list(range(first, first + count))
            greedy = Sampling(temperature=0.0)
            runner.logits([Row(Key(f"p{number}", 0), whole, 0, len(whole), blocks, True, 0, (0,), greedy, whole)])
        first += count
    runner.bind(memoryview(bytearray(runner.block_nbytes)), 1)
    return pool


def parts(pool: bytearray, shape: Shape) -> dict[str, Floats]:
    """Return keys and values of a pool in the compiled kernels' order, `[blocks · layers · heads, tokens, dim]`."""
    bits = np.frombuffer(pool, np.uint16).reshape(-1, shape.layers, 2, shape.elements // shape.layers // 2)
    values: Floats = (bits.astype(np.uint32) << 16).view(np.float32)
    heads, dim, tokens = shape.kv_heads, shape.head_dim, BLOCK_TOKENS
    keys = values[:, :, 0].reshape(-1, heads, dim // 2, tokens, 2).transpose(0, 1, 3, 2, 4)
    vals = values[:, :, 1].reshape(-1, heads, tokens // 2, dim, 2).transpose(0, 1, 2, 4, 3)
    return {name: part.reshape(-1, tokens, dim) for name, part in (("keys", keys), ("values", vals))}


def errors(x: Floats, form: str) -> dict[str, float]:
    """Return the root mean square of the error over that of the values, by the number that share a scale."""
    size = float(np.sqrt(np.square(x, dtype=np.float64).mean()))

    def relative(got: Floats) -> float:
        return float(f"{np.sqrt(np.square(got - x, dtype=np.float64).mean()) / size:.3g}")

    dim = x.shape[-1]
    out = {str(n): relative(plain.round_groups(x, dim, form, n)) for n in SHARES if x[0].size % n == 0}
    groups = x.reshape(-1, 32)
    if form == "int8":  # what scales that are no powers of two would give
        scale = np.maximum(np.abs(groups).max(-1, keepdims=True) / 127, 1e-30)
        out["32, free scale"] = relative((np.rint(groups / scale) * scale).reshape(x.shape).astype(np.float32))
    return out


def rates(form_layout: str, raw_layout: str, source: bytearray, shape: Shape) -> dict[str, float]:
    """Return MB/s of raw bytes into a store and out of it, packed and raw, everything verified; by turns, medians.

    Raises:
        WrongBytes: if what comes back is not what went in.
    """
    nbytes = shape.block_nbytes
    whole = bytes(source) * (RATE_BLOCKS * nbytes // len(source) + 1)
    with ExitStack() as stack:
        memory = DEFAULT_DIRECTORY if DEFAULT_DIRECTORY.is_dir() else None
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=memory)))

        def pool(name: str, layout: str, size: int) -> BlockPool:
            made = BlockPool.create(directory, name, RATE_BLOCKS, size, layout, "0", "here")
            stack.callback(made.close)
            made.view()[:] = bytes(len(made.view()))  # its pages are there
            return made

        ways: dict[str, Callable[[], object]] = {}
        ends: list[tuple[BlockPool, BlockPool]] = []
        for name, layout in (("raw", raw_layout), ("packed", form_layout)):
            engine, back = (pool(f"{name}-{end}", layout, nbytes) for end in ("engine", "back"))
            kept, size = stored_form(layout, nbytes)
            store = pool(f"{name}-store", kept, size)
            engine.view()[:] = whole[: len(engine.view())]
            refs = [p.refs(range(RATE_BLOCKS)) for p in (engine, store, back)]
            ends.append((engine, back))

            def copy(a: BlockPool = engine, b: BlockPool = store, r: Any = refs, at: int = 0) -> None:
                copy_blocks(a, r[at], b, r[at + 1], should_stop=lambda: False)

            ways[f"{name}_in"] = copy
            ways[f"{name}_out"] = lambda a=store, b=back, r=refs: copy_blocks(  # type: ignore[misc]
                a, r[1], b, r[2], should_stop=lambda: False
            )
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(TURNS + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                taken[name].append(time.perf_counter() - began)
        if any(engine.view() != back.view() for engine, back in ends):
            raise WrongBytes("blocks that came out of the store are not those that went in")
        return {f"{name}_mb_s": round(RATE_BLOCKS * nbytes / 1e6 / median(t[1:])) for name, t in taken.items()}


def round_us(pool: bytearray, shape: Shape) -> float:
    """Return the microseconds that rounding takes one thread for the keys and values of one token in all layers."""
    size = shape.elements // BLOCK_TOKENS
    x = (np.frombuffer(pool, np.uint16)[: 64 * size].astype(np.uint32) << 16).view(np.float32)
    taken = []
    for _ in range(TURNS):
        began = time.perf_counter()
        native.round_groups(x, shape.head_dim, shape.format)
        taken.append((time.perf_counter() - began) / (len(x) / size) * 1e6)
    return round(median(taken), 1)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures.

    Raises:
        WrongBytes: if a block does not come back.
    """
    model = args.model or ensure_model()
    threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    prompts = prompts_of(model, args.questions, max(args.requests, SAMPLED))
    exact = make_runner("native", model, threads)
    raw = computed(exact, prompts[:SAMPLED])
    out: dict[str, Any] = {"check": "kv_format", "fingerprint": exact.fingerprint, "threads": threads, "formats": {}}
    for form in FORMS:
        runner = make_runner(f"native:{form}", model, threads)
        shape = shape_of(runner.layout)
        assert shape is not None
        found: dict[str, Any] = {"bytes_over_raw": round(shape.packed_nbytes / shape.block_nbytes, 4)}
        found["round_us_per_token"] = round_us(raw, shape)
        found |= rates(runner.layout, exact.layout, computed(runner, prompts[:8]), shape)
        found["error"] = {name: errors(part, form) for name, part in parts(raw, shape).items()}
        if args.requests:
            spans = divergence.compare(exact, runner, prompts[: args.requests], args.tokens)
            for name, span in (("answers", spans.continuation), ("prompts", spans.prompt)):
                found[name] = {k: float(f"{v:.4g}") for k, v in span.figures().items()}
        out["formats"][form] = found
        runner.close()
    exact.close()
    return out


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=130)
    table = Table("", *result["formats"], title="8-bit keys and values against exact ones", title_justify="left")
    first = next(iter(result["formats"].values()))
    for name, value in first.items():
        if isinstance(value, dict):
            for inner in value:
                table.add_row(f"{name}: {inner}", *(str(f[name][inner]) for f in result["formats"].values()))
        else:
            table.add_row(name.replace("_", " "), *(str(f[name]) for f in result["formats"].values()))
    console.print(table)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_format", description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; the default model without it")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--questions", type=Path, default=default_path("mt_bench"))
    parser.add_argument("--requests", type=int, default=50, help="questions of which answers are compared; 0: none")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    args = parser.parse_args()
    try:
        result = measure(args)
        show(result)
    except (WrongBytes, NoQuestions, FloatingPointError) as exc:
        print(json.dumps({"check": "kv_format", "error": f"{type(exc).__name__}: {exc}"}))
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
