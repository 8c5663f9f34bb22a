"""`python -m bench.replay.generate`: a small trace of Mooncake's form, drawn from a seed; for trials and tests."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.replay.trace import BLOCK_TOKENS

NEXT_TURN = 0.4  # chance that a request goes on with a conversation
OPEN = 64  # conversations that may go on


def requests(count: int, seed: int, *, per_s: float = 3.0, mean_tokens: int = 12_000) -> Iterator[dict[str, Any]]:
    """Yield requests by time: every prompt begins with the same block, some go on with a conversation, most do not.

    Args:
        count: how many.
        seed: same seed, same requests.
        per_s: arrivals per second, at random moments.
        mean_tokens: of a new prompt; lengths have a long tail.
    """
    draw = random.Random(seed)
    names = itertools.count(1)
    talks: list[list[int]] = []  # whole blocks of each open conversation
    at = 0.0
    for _ in range(count):
        at += draw.expovariate(per_s)
        if talks and draw.random() < NEXT_TURN:
            whole = talks.pop(draw.randrange(len(talks)))
            tokens = len(whole) * BLOCK_TOKENS + draw.randint(100, 2000)
        else:
            whole = [0]
            tokens = min(120_000, BLOCK_TOKENS + int(draw.lognormvariate(0.0, 1.0) * mean_tokens / 1.65))
        needed = -(-tokens // BLOCK_TOKENS)
        hashes = whole + [next(names) for _ in range(needed - len(whole))]
        talks.append(hashes if tokens % BLOCK_TOKENS == 0 else hashes[:-1])
        del talks[:-OPEN]
        yield {
            "timestamp": int(at * 1000),
            "input_length": tokens,
            "output_length": draw.randint(1, 700),
            "hash_ids": hashes,
        }


def write(path: Path, count: int, seed: int, *, per_s: float = 3.0) -> Path:
    """Write a trace and return its path."""
    path.write_text("".join(json.dumps(request) + "\n" for request in requests(count, seed, per_s=per_s)))
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a trace."""
    parser = argparse.ArgumentParser(prog="python -m bench.replay.generate", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-s", type=float, default=3.0, help="arrivals per second")
    options = parser.parse_args(arguments)
    write(options.path, options.requests, options.seed, per_s=options.per_s)
    print(options.path)


if __name__ == "__main__":
    main()
