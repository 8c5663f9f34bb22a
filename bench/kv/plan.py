"""What is measured of the store and what it comes to: pool sizes, samples and their faults, ratios, verdicts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bench.speculation import Pair, interval
from bench.targets import KV_TTFT, KV_WRITE_BACK, LONG, Target
from kvstore.block import BLOCK_TOKENS

WARM_UP, COLD, DEVICE, HOST, DISK, OTHER = "warm-up", "cold", "device", "host", "disk", "other host"
BEFORE, AFTER = "before", "after"  # the restart of everything
WHOLE = 0.9  # of a prompt's tokens: so much comes from a tier, or at most the rest does
SPARE = 1.1  # a prompt has about as many tokens as it was meant to have
FEWEST = 3  # pairs or samples; of fewer, a ratio says nothing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: where its prompt's blocks should have come from, and where they came from.

    Args:
        phase: before or after the restart.
        path: `warm-up`, `cold`, `device`, `host`, `disk` or `other host`.
        length: tokens that the prompt was meant to have.
        number: names the prompt among those of its length; equal numbers are equal prompts.
        ttft_s: from sending to the first text.
        prompt_tokens, cached_tokens: as the answer's usage tells them.
        loaded_blocks: that the engine took from host memory, by its counter.
        disk_blocks: that the store got from its disk, or another host, into host memory, by its counter.
        read_nbytes: that the system read from a disk for the store's process meanwhile, or that the other host's
            counters say it has sent; None where it does not tell.
        text: the answer.
    """

    phase: str
    path: str
    length: int
    number: int
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    loaded_blocks: int
    disk_blocks: int
    read_nbytes: int | None
    text: str

    @property
    def fault(self) -> str:
        """Why this is no sample of its path; empty if it is one.

        What the disk delivers too late is computed: that is a slow sample of the disk, and no fault.
        """
        most, least = (1 - WHOLE) * self.prompt_tokens, WHOLE * self.prompt_tokens
        loaded = self.loaded_blocks * BLOCK_TOKENS
        match self.path:
            case "warm-up" | "cold":
                right = self.cached_tokens <= most and loaded <= most
            case "device":
                right = self.cached_tokens >= least and not self.loaded_blocks
            case "host":
                right = self.cached_tokens >= least and loaded >= least and not self.disk_blocks
            case "disk":
                right = self.disk_blocks > 0
            case "other host":
                right = self.disk_blocks > 0 and bool(self.read_nbytes)
            case _:
                return f"no path {self.path!r}"
        if right:
            return ""
        return (
            f"{self.path} {self.length}/{self.number}: {self.cached_tokens} of {self.prompt_tokens} tokens cached, "
            f"{self.loaded_blocks} blocks from host memory, {self.disk_blocks} from the disk"
        )


def fitting(lengths: Iterable[int], context: int, tokens: int) -> list[int]:
    """Return the lengths of prompts that fit a context window with their answers; longer ones become the longest."""
    longest = int((context - tokens) / SPARE) // BLOCK_TOKENS * BLOCK_TOKENS
    return sorted({min(length, longest) for length in lengths})


def pool_blocks(lengths: Sequence[int]) -> int:
    """Return the blocks of a device pool that runs each prompt, and in which the others push it out between two uses.

    A prompt's blocks are loaded only beside room for a whole prompt, so the pool holds more than two. Between a prompt
    and its second use after two rounds (see `rounds`) the pool sees the longest one twice and each other one thrice.

    Raises:
        ValueError: if the prompts would not push the longest one out.
    """
    blocks = sorted(length // BLOCK_TOKENS for length in lengths)
    pool = blocks[-1] * 9 // 4
    if 2 * blocks[-1] + 3 * sum(blocks[:-1]) < pool or blocks[0] < 4:
        raise ValueError(f"prompts of {', '.join(map(str, lengths))} tokens do not push one another out of a pool")
    return pool


def rounds(lengths: Sequence[int], repetitions: int) -> list[tuple[str, int, int]]:
    """Return (path, length, number) of all requests before the restart, in their order.

    Every round has a new prompt of each length, cold and then from the device pool, and the prompts of two rounds ago
    from host memory: by then others have pushed them out of the device pool. The first round is a warm-up.
    """
    out: list[tuple[str, int, int]] = []
    for number in range(repetitions + 2):
        for length in lengths:
            out += [(COLD, length, number), (DEVICE, length, number)] if number else [(WARM_UP, length, number)]
        out += [(HOST, length, number - 2) for length in lengths if number >= 2]
    return out


def restarted(lengths: Sequence[int], repetitions: int) -> list[tuple[str, int, int]]:
    """Return (path, length, number) of all requests after the restart: new prompts and those from before, by turns."""
    new = repetitions + 2
    out = [(WARM_UP, lengths[0], new)]
    for number in range(1, repetitions + 1):
        for length in lengths:
            out += [(COLD, length, new + number), (DISK, length, number)]
    return out


def differing(samples: Iterable[Sample]) -> int:
    """Count the answers that are not those of the same prompt's first run."""
    first: dict[tuple[int, int], str] = {}
    return sum(first.setdefault((s.length, s.number), s.text) != s.text for s in samples)


def table(samples: Sequence[Sample], phases: Sequence[str] = (BEFORE, AFTER)) -> list[dict[str, Any]]:
    """Return a row for each phase, length and path: medians, and the ratio to the cold runs of the same phase."""
    rows = []
    for phase in phases:
        for length in sorted({s.length for s in samples}):
            cold = [s.ttft_s for s in samples if (s.phase, s.length, s.path) == (phase, length, COLD)]
            for path in (COLD, DEVICE, HOST, DISK, OTHER):
                of = [s for s in samples if (s.phase, s.length, s.path) == (phase, length, path)]
                if of:
                    rows.append({"phase": phase, "length": length, "path": path, **_row(of, cold)})
    return rows


def _row(samples: Sequence[Sample], cold: Sequence[float]) -> dict[str, Any]:
    ttft = [s.ttft_s for s in samples]
    path, length = samples[0].path, samples[0].length
    read = [s.read_nbytes for s in samples if s.read_nbytes is not None]
    row: dict[str, Any] = {
        "samples": len(samples),
        "ttft_ms": round(statistics.median(ttft) * 1000, 1),
        "ttft_min_ms": round(min(ttft) * 1000, 1), "ttft_max_ms": round(max(ttft) * 1000, 1),
        "prompt_tokens": round(statistics.median(s.prompt_tokens for s in samples)),
        "cached_tokens": round(statistics.median(s.cached_tokens for s in samples)),
        "loaded_blocks": round(statistics.median(s.loaded_blocks for s in samples)),
        "disk_blocks": round(statistics.median(s.disk_blocks for s in samples)),
    }  # fmt: skip
    if path in (DISK, OTHER):
        row["read_mb"] = round(statistics.median(read) / 1e6, 1) if read else None
    if path != COLD and cold:
        value = statistics.median(ttft) / statistics.median(cold)
        row["over_cold"] = round(value, 4)
        target = KV_TTFT.get(path) if length >= LONG else None
        if target is not None:
            row |= {"target": str(target), "met": verdict(value, target, len(samples))}
    return row


def verdict(value: float, target: Target, count: int) -> bool | None:
    """Return whether a target is met; None where too few measurements stand behind the figure."""
    return target.met(value) if count >= FEWEST else None


def order(arms: Sequence[T], number: int) -> list[T]:
    """Return in which order the arms of a round run; over two rounds per arm each has each place twice."""
    turn = number // 2 % len(arms)
    rotated = [*arms[turn:], *arms[:turn]]
    return rotated[::-1] if number % 2 else rotated


def cost(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the ratio of rates, with a tier over without, its 95 % interval, and whether the target is met.

    It is met if the whole interval keeps it, and missed if the whole interval breaks it; what lies between is open.
    """
    value, low, high = interval(pairs)
    met: bool | None = None
    if len(pairs) >= FEWEST:
        met = True if KV_WRITE_BACK.met(low) else (None if KV_WRITE_BACK.met(high) else False)
    tokens = sum(pair.tokens for pair in pairs)
    return {
        "pairs": len(pairs), "tokens": tokens,
        "tokens_per_s_off": round(tokens / sum(pair.plain_s for pair in pairs), 1),
        "tokens_per_s_on": round(tokens / sum(pair.guessing_s for pair in pairs), 1),
        "ratio": round(value, 4), "low": round(low, 4), "high": round(high, 4),
        "target": str(KV_WRITE_BACK), "met": met,
    }  # fmt: skip
