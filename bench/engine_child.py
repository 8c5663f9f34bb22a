"""One configuration of our engine, measured in this process; run by `bench.engine`. The last line is a JSON object."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.inprocess import Engine, EngineFailed, Request, Shape, greedy, make_runner
from bench.load import GateFailed
from bench.questions import long_text
from bench.targets import SHORT
from models.text import load_text

PROMPT_TOKENS = 128
NODE_POOL_TOKENS = 4096  # of the row about resident memory
GATE_REQUESTS, GATE_TOKENS = 5, 24


def prompt(number: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """Return ids that look random, begin like no other number's, and are no control tokens."""
    low = 100
    return tuple(
        low + (number * 7919 + i * 104_729 + i * i * 31) % (min(vocab_size, 40_000) - low) for i in range(length)
    )


def gate(runner: Any) -> None:
    """Check that greedy texts are the same alone and together.

    Raises:
        GateFailed: if one differs: the speeds would be those of wrong answers.
    """
    wanted = [greedy(f"g{i}", prompt(i, 20 + 31 * i, runner.vocab_size), GATE_TOKENS) for i in range(GATE_REQUESTS)]
    with Engine(runner, Shape(max_running=1)) as engine:
        alone = engine.run(wanted)
    with Engine(runner, Shape(max_running=len(wanted), token_budget=64, max_chunk=37)) as engine:
        together = engine.run(wanted)
    differing = sum(alone[key] != together[key] for key in alone)
    if differing:
        raise GateFailed("the engine alone", differing, len(wanted))


def decode(runner: Any, rows: int, tokens: int) -> float:
    """Return the tokens per second of steps in which `rows` sequences decode, after prompts of 128 tokens.

    The prompts are computed before and found again in their blocks, so that all rows begin in one step; a scheduler
    that keeps the pace of running streams would let the first ones end before the last prompt is done.
    """
    length = PROMPT_TOKENS + 1  # the last id is computed with the first step
    wanted = [greedy(f"d{rows}-{i}", prompt(1000 + i, length, runner.vocab_size), tokens) for i in range(rows)]
    produced, began, ended = 0, 0.0, 0.0
    with Engine(runner, Shape(max_running=rows), longest=length + tokens) as engine:
        engine.run([request.with_tokens(1) for request in wanted])
        for request in wanted:
            engine.core.add(request.sequence())
        for result in engine.steps():
            now = time.perf_counter()
            if result.num_rows == rows and result.num_tokens == rows:
                if began:
                    produced, ended = produced + rows, now
                began = began or now
    if not produced:
        raise EngineFailed(f"no two steps of {rows} rows followed each other")
    return produced / (ended - began)


def prefill(runner: Any, length: int, number: int) -> float:
    """Return the tokens per second of one prompt, from its arrival to its first id."""
    request = greedy(f"p{number}", prompt(5000 + number, length, runner.vocab_size), 1)
    with Engine(runner, Shape(max_running=1), longest=length + 16) as engine:
        began = time.perf_counter()
        engine.run([request])
        return length / (time.perf_counter() - began)


def burst(runner: Any, requests: Sequence[Request]) -> float:
    """Return the output tokens per second of requests that arrive at once, their prompts included."""
    longest = max(len(r.ids) + r.sampling.max_tokens for r in requests)
    with Engine(runner, Shape(max_running=64), longest=longest) as engine:
        began = time.perf_counter()
        found = engine.run(requests)
        return sum(map(len, found.values())) / (time.perf_counter() - began)


def chats(model: Path, count: int, tokens: int, turn: int) -> list[Request]:
    """Return the requests that `bench.whole` sends over HTTP, as the engine sees them."""
    text = load_text(model)
    bodies = [long_text(1000 * (turn + 1) + i, SHORT) for i in range(count)]
    ids = [text.chat_ids([{"role": "user", "content": body}], created=0) for body in bodies]
    return [greedy(f"b{turn}-{i}", one, tokens) for i, one in enumerate(ids)]


def rss_mb() -> float:
    """Return this process's resident megabytes."""
    return float(psutil.Process().memory_info().rss / 2**20)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load, answer, check, then time."""
    # What an engine node has imported before it loads; without torch for a runner that needs none.
    importlib.import_module(
        "engine.native_runner" if args.runner.partition(":")[0] == "native" else "engine.torch_runner"
    )
    began = time.perf_counter()
    runner = make_runner(args.runner, args.model, args.threads)
    with Engine(runner, Shape(max_running=16, num_blocks=NODE_POOL_TOKENS // 16)) as engine:
        engine.run([greedy("first", prompt(0, PROMPT_TOKENS, runner.vocab_size), 1)])
        first = time.perf_counter() - began
        # Every block of the pool is written once: what is resident then stays so.
        many = NODE_POOL_TOKENS // (PROMPT_TOKENS + 16)
        engine.run([greedy(f"fill{i}", prompt(200 + i, PROMPT_TOKENS, runner.vocab_size), 8) for i in range(many)])
        resident = rss_mb()
    gate(runner)
    if args.burst:
        rates = [burst(runner, chats(args.model, args.burst, args.tokens, turn)) for turn in range(3)]
        return {"ok": True, "burst_tokens_per_s": statistics.median(rates)}
    out: dict[str, Any] = {"ok": True, "runner": args.runner, "threads": args.threads}
    out |= {"fingerprint": runner.fingerprint, "load_to_first_token_s": round(first, 3), "rss_mb": round(resident, 1)}
    out["decode"] = {
        str(rows): round(statistics.median(decode(runner, rows, args.tokens) for _ in range(args.repetitions)), 1)
        for rows in args.rows
    }
    out["prefill"] = {
        str(length): round(
            statistics.median(prefill(runner, length, length + n) for n in range(args.repetitions + 1)), 1
        )
        for length in args.prefill
    }
    return out


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine_child", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runner", default="native")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=lambda s: tuple(map(int, s.split(","))), default=(1, 4, 16, 64))
    parser.add_argument("--prefill", type=lambda s: tuple(map(int, s.split(","))), default=(128, 1024))
    parser.add_argument("--burst", type=int, default=0, help="measure that many chats at once, and nothing else")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2)
    args = parser.parse_args()
    try:
        result = measure(args)
    except (EngineFailed, GateFailed, ImportError, ValueError, OSError) as exc:
        result = {"ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
