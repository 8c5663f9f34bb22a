"""The load that every server of a comparison gets: streamed greedy chat of fixed length, over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from bench.client import LoadFailed, Timing, stream
from bench.stats import Level, level
from chaos.workload import chat


class GateFailed(Exception):
    """Raised when texts are not what they must be: no speed is printed over wrong answers."""

    def __init__(self, what: str, differing: int, of: int) -> None:
        super().__init__(f"{what}: {differing} of {of} greedy texts differ from those computed one at a time")
        self.differing = differing


async def model_of(base: str) -> str:
    """Return the name of the model that is served."""
    async with httpx.AsyncClient(base_url=base, timeout=10.0) as http:
        return str((await http.get("/v1/models")).json()["data"][0]["id"])


async def one(
    base: str, model: str, text: str, tokens: int, timing: Timing | None = None, **fields: Any
) -> Timing:
    """Send one request, with more `fields` in its body, and time it; `timing` is filled meanwhile.

    Raises:
        LoadFailed: if it fails, shows nothing, or has another number of tokens than asked for.
    """
    timing = await stream(base, chat(model, text, tokens, seed=None, stream=True) | fields, timing=timing)
    if timing.completion_tokens != tokens:
        raise LoadFailed(f"{timing.completion_tokens} tokens instead of {tokens}")
    if not timing.chunks_at:
        raise LoadFailed("an answer without any text")
    return timing


async def run(base: str, model: str, prompts: Sequence[str], streams: int, tokens: int) -> list[Timing]:
    """Send all prompts, `streams` at a time, each worker taking the next when it is done.

    Raises:
        LoadFailed: if one of them fails: failures have no speed.
    """
    timings: list[Timing] = []

    async def worker(queue: Iterator[str]) -> None:
        for text in queue:
            timings.append(await one(base, model, text, tokens))

    queue = iter(prompts)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(worker(queue))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return timings


async def measure(base: str, model: str, prompts: Sequence[str], streams: int, tokens: int) -> Level:
    """Run a level and sum it up; its time includes the prompts."""
    began = time.monotonic()
    timings = await run(base, model, prompts, streams, tokens)
    return level(streams, timings, time.monotonic() - began)


async def differing(base: str, model: str, prompts: Sequence[str], tokens: int) -> int:
    """Count the greedy texts that are not the same one at a time and all at once."""
    alone = [(await one(base, model, text, tokens)).text for text in prompts]
    together = await asyncio.gather(*(one(base, model, text, tokens) for text in prompts))
    return sum(a != b.text for a, b in zip(alone, together, strict=True))
