"""Open-loop load: requests come when a seeded Poisson process says so, whatever became of those before."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.client import LoadFailed, Refused, Timing, stream
from bench.stats import percentile
from chaos.workload import chat


@dataclass(frozen=True, slots=True)
class Slo:
    """What counts as quick enough, in seconds: the time to the first token, and the mean time between tokens."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What became of one request: `ok`, `refused` (429) or `failed`; times in seconds."""

    at: float
    outcome: str
    ttft_s: float = 0.0
    itl_s: float = 0.0
    retry_after_s: float | None = None

    def met(self, slo: Slo) -> bool:
        """Whether it was quick enough."""
        return self.outcome == "ok" and self.ttft_s <= slo.ttft_s and self.itl_s <= slo.itl_s


def times(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the arrivals of a Poisson process with `rate` per second, for so long."""
    source, out, at = random.Random(seed), [], 0.0
    while (at := at + source.expovariate(rate)) < seconds:
        out.append(at)
    return out


def sample(at: float, timing: Timing, tokens: int) -> Sample:
    """Return an answer's sample."""
    last = timing.chunks_at[-1] - timing.chunks_at[0]
    return Sample(at, "ok", timing.ttft_s, last / max(1, tokens - 1))


async def send(
    base: str, model: str, text: str, tokens: int, at: float, headers: Mapping[str, str] | None = None, **fields: Any
) -> Sample:
    """Send one request; a refusal or a failure is a sample too."""
    body = chat(model, text, tokens, seed=None, stream=True) | fields
    try:
        timing = await stream(base, body, headers=headers)
    except Refused as exc:
        return Sample(at, "refused" if exc.status == 429 else "failed", retry_after_s=exc.retry_after_s)
    except (LoadFailed, OSError, EOFError, TimeoutError, ValueError):
        return Sample(at, "failed")
    return sample(at, timing, tokens) if timing.chunks_at else Sample(at, "failed")


async def offer(arrivals: Sequence[float], request: Callable[[int, float], Any]) -> list[Sample]:
    """Start `request(number, at)` at each arrival, and wait for all."""
    began = time.monotonic()
    tasks: list[asyncio.Task[Sample]] = []
    for number, at in enumerate(arrivals):
        wait_s = began + at - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(request(number, at)))
    return list(await asyncio.gather(*tasks))


def figures(samples: Sequence[Sample], slo: Slo, seconds: float) -> dict[str, Any]:
    """Sum up what came of an offered load.

    Args:
        samples: of the requests that came in the measured time.
        slo: what counts.
        seconds: that they came in.
    """
    ok = [s for s in samples if s.outcome == "ok"]
    waits = [s.retry_after_s for s in samples if s.retry_after_s is not None]
    return {
        "offered": len(samples), "offered_per_s": round(len(samples) / seconds, 2),
        "goodput_per_s": round(sum(s.met(slo) for s in samples) / seconds, 2),
        "attainment": round(sum(s.met(slo) for s in samples) / max(1, len(samples)), 3),
        "answered": len(ok), "refused": sum(s.outcome == "refused" for s in samples),
        "failed": sum(s.outcome == "failed" for s in samples),
        "late_first": sum(s.ttft_s > slo.ttft_s for s in ok), "late_tokens": sum(s.itl_s > slo.itl_s for s in ok),
        "ttft_p50_ms": round(percentile((s.ttft_s * 1000 for s in ok), 0.5), 1) if ok else None,
        "ttft_p95_ms": round(percentile((s.ttft_s * 1000 for s in ok), 0.95), 1) if ok else None,
        "itl_p50_ms": round(percentile((s.itl_s * 1000 for s in ok), 0.5), 2) if ok else None,
        "itl_p95_ms": round(percentile((s.itl_s * 1000 for s in ok), 0.95), 2) if ok else None,
        "retry_after_p50_s": percentile(waits, 0.5) if waits else None,
    }  # fmt: skip
