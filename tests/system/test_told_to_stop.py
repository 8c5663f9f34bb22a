"""SIGTERM with streams open: who was served is served to the end, or told; the exit is clean and in time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.launch import System

pytestmark = pytest.mark.slow

SMALL = ("--prefill", "0", "--decode", "0", "--both", "1")
LONG = "wait " * 300
Ends = list[tuple[str, list[dict[str, Any]]]]


async def stream(http: httpx.AsyncClient, model: str, text: str, tokens: int) -> tuple[str, list[dict[str, Any]]]:
    """Read one stream to its end; returns `done`, `error` or `cut`, and its chunks."""
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0.0, "stream": True}
    chunks: list[dict[str, Any]] = []
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return f"{response.status_code}", chunks
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return "done", chunks
                if line.startswith("data: "):
                    chunks.append(json.loads(line[6:]))
    except httpx.HTTPError:
        return "cut", chunks
    return ("error" if chunks and "error" in chunks[-1] else "cut"), chunks


def text_of(chunks: list[dict[str, Any]]) -> str:
    """The text of a stream's chunks."""
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))


def stopped(
    script: Path, directory: Path, limit_s: float, tokens: int, *, also: str = ""
) -> tuple[Ends, list[tuple[int, bool]], int, float, list[str]]:
    """Start, open four streams and four that wait, SIGTERM; returns ends, statuses meanwhile, code, seconds, texts."""
    system = System(directory, *SMALL, "--engine", f"scripted:{script}", "--drain-limit-s", str(limit_s))
    system.start()
    process, seen = system.process, []
    assert process is not None

    async def run() -> tuple[Ends, int, float, list[str]]:
        async with system.address.client() as http:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            prompts = [f"open {n}" for n in range(4)] + [f"queued {n} {LONG}" for n in range(4)]
            first = [(await stream(http, model, prompts[0], 20))[1]]
            tasks = [asyncio.create_task(stream(http, model, prompt, tokens)) for prompt in prompts]
            await asyncio.sleep(0.4)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            while (got := (await http.get("/health/ready")).status_code) == 200 and time.monotonic() - began < 2.0:
                await asyncio.sleep(0.01)
            seen.append((got, True))
            body = {"model": model, "messages": [{"role": "user", "content": "late"}]}
            late = await http.post("/v1/chat/completions", json=body)
            seen.append((late.status_code, "retry-after" in late.headers))
            if also == "again":
                process.send_signal(signal.SIGTERM)
            elif also == "bus":
                bus = next(p for p in system.processes() if "nats-server" in " ".join(p.cmdline()))
                os.kill(bus.pid, signal.SIGKILL)
            ends = await asyncio.gather(*tasks)
            code = await asyncio.to_thread(process.wait, 40)
            return list(ends), code, time.monotonic() - began, [text_of(c) for c in first]

    try:
        ends, code, took, texts = asyncio.run(run())
    finally:
        system.stop(signal.SIGKILL)
    assert system.leftovers() == []
    return ends, seen, code, took, texts


def test_a_long_limit_lets_every_stream_end(script_file: Path, tmp_path: Path, nats_binary: str) -> None:
    """Readiness is 503 at once, new requests get 503 with `Retry-After`; open and waiting ones end with their text."""
    ends, seen, code, took, texts = stopped(script_file, tmp_path, 30.0, 150)

    assert seen == [(503, True), (503, True)]
    assert [how for how, _ in ends] == ["done"] * 8
    assert text_of(ends[0][1]).startswith(texts[0]) and len({len(text_of(c)) for _, c in ends}) >= 1
    assert code == 0 and took < 30.0


def test_a_short_limit_tells_streams_of_the_end(script_file: Path, tmp_path: Path, nats_binary: str) -> None:
    """What cannot end in time gets an error event or a status, no cut; the exit is clean and within two seconds."""
    ends, seen, code, took, _ = stopped(script_file, tmp_path, 1.5, 3000)

    assert seen == [(503, True), (503, True)]
    assert {how for how, _ in ends} <= {"error", "503"} and ends
    assert code == 0 and took <= 1.5 + 2.0 + 1.5  # and what two busy cores take to end ten processes


@pytest.mark.soak
def test_a_second_sigterm_ends_the_drain(script_file: Path, tmp_path: Path, nats_binary: str) -> None:
    """Whoever asks twice does not want to wait."""
    ends, _, _, took, _ = stopped(script_file, tmp_path, 30.0, 3000, also="again")

    assert took < 8.0 and "done" not in {how for how, _ in ends}


@pytest.mark.soak
def test_a_bus_that_dies_in_a_drain_does_not_hold_it_up(script_file: Path, tmp_path: Path, nats_binary: str) -> None:
    """Streams are told, nothing hangs, and the exit comes within the limit."""
    ends, _, code, took, _ = stopped(script_file, tmp_path, 3.0, 3000, also="bus")

    assert {how for how, _ in ends} <= {"error", "503"}
    assert code == 0 and took <= 3.0 + 2.0 + 1.5
