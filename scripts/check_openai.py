"""The official OpenAI client against the HTTP edge: streamed and not, sync and async, 16 at once.

A concatenated stream must equal the whole answer of the same request, its finish reason and its usage included.
The last line is one JSON object; exit code 1 if anything differs or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Any

import openai

from chaos.instance import Address, add_options, report, serving
from chaos.workload import SUBJECTS

TOKENS = 48
# (text, reason) per choice, and prompt and completion tokens
Reading = tuple[tuple[tuple[str, str], ...], tuple[int, int]]


def requests(model: str, count: int) -> list[dict[str, Any]]:
    """Return different chat requests: greedy and seeded, some with two choices, some with stop strings."""
    out = []
    for at in range(count):
        text = f"Tell me about {SUBJECTS[at % len(SUBJECTS)]}, number {at}."
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
        body |= {"temperature": 0.0} if at % 2 == 0 else {"temperature": 0.9, "seed": at}
        if at % 4 == 1:
            body["n"] = 2
        if at % 4 == 2:
            body["stop"] = [", ", "\n"]
        out.append(body)
    return out


def whole(answer: Any) -> Reading:
    """Read a whole chat answer."""
    choices = sorted(answer.choices, key=lambda c: c.index)
    usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    return tuple((c.message.content or "", c.finish_reason) for c in choices), usage


class Collector:
    """Concatenates a streamed chat answer."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.usage = (-1, -1)
        self.first_at = 0.0

    def take(self, chunk: Any) -> None:
        """Take one chunk."""
        self.first_at = self.first_at or time.monotonic()
        if chunk.usage is not None:
            self.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            self.texts[choice.index] = self.texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason is not None:
                self.reasons[choice.index] = choice.finish_reason

    def reading(self) -> Reading:
        """Return what was read."""
        return tuple((self.texts[i], self.reasons.get(i, "")) for i in sorted(self.texts)), self.usage


def run_sync(client: openai.OpenAI, bodies: list[dict[str, Any]]) -> tuple[list[Reading], list[Reading]]:
    """Ask one after another: whole answers and streams."""
    wholes, streams = [], []
    for body in bodies:
        wholes.append(whole(client.chat.completions.create(**body)))
        collector = Collector()
        for chunk in client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
            collector.take(chunk)
        streams.append(collector.reading())
    return wholes, streams


async def run_async(client: openai.AsyncOpenAI, bodies: list[dict[str, Any]]) -> tuple[list[Reading], list[Reading]]:
    """Ask all at once: whole answers, then streams."""

    async def stream(body: dict[str, Any]) -> Reading:
        collector = Collector()
        chunks = await client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        async for chunk in chunks:
            collector.take(chunk)
        return collector.reading()

    async def ask(body: dict[str, Any]) -> Reading:
        return whole(await client.chat.completions.create(**body))

    wholes = await asyncio.gather(*(ask(body) for body in bodies))
    return list(wholes), list(await asyncio.gather(*(stream(body) for body in bodies)))


async def completions(client: openai.AsyncOpenAI, model: str) -> tuple[str, str]:
    """Ask for a text completion, whole and streamed."""
    body: dict[str, Any] = {"model": model, "prompt": "The river rose, and", "max_tokens": TOKENS, "temperature": 0.0}
    answer = (await client.completions.create(**body)).choices[0].text
    parts = [c.choices[0].text async for c in await client.completions.create(**body, stream=True) if c.choices]
    return answer, "".join(parts)


async def errors(client: openai.AsyncOpenAI, model: str) -> list[str]:
    """Return which errors did not reach the client as its own exception types."""
    wrong = []
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for name, kind, body in (
        ("unknown model", openai.NotFoundError, {"model": "nope", "messages": messages}),
        ("bad range", openai.BadRequestError, {"model": model, "messages": messages, "temperature": 9}),
        ("no messages", openai.BadRequestError, {"model": model, "messages": []}),
    ):
        for stream in (False, True):
            try:
                await client.chat.completions.create(**body, stream=stream)
                wrong.append(f"{name}, stream={stream}: no error")
            except kind:
                continue
            except openai.APIError as exc:
                wrong.append(f"{name}, stream={stream}: {type(exc).__name__}")
    return wrong


async def check(where: Address, count: int) -> dict[str, Any]:
    """Run everything against one address."""
    base = f"{where.http}/v1"
    sync_client = openai.OpenAI(base_url=base, api_key="unused", max_retries=0, timeout=300)
    client = openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0, timeout=300)
    model = (await client.models.list()).data[0].id
    bodies = requests(model, count)
    sync_wholes, sync_streams = await asyncio.to_thread(run_sync, sync_client, bodies[: max(4, count // 4)])
    wholes, streams = await run_async(client, bodies)
    pairs = [*zip(sync_wholes, sync_streams, strict=True), *zip(wholes, streams, strict=True)]
    pairs += zip(sync_wholes, wholes, strict=False)
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    for a, b in differing[:5]:
        print(f"differs:\n  {a}\n  {b}")
    answer, streamed = await completions(client, model)
    if answer != streamed:
        print(f"completion differs:\n  {answer!r}\n  {streamed!r}")
    wrong = await errors(client, model)
    for line in wrong:
        print(f"error: {line}")
    await client.close()
    figures = {
        "check": "openai",
        "client": openai.__version__,
        "at_once": count,
        "compared": len(pairs) + 1,
        "differing": len(differing) + (answer != streamed),
        "wrong_errors": len(wrong),
        "characters": sum(len(text) for reading, _ in wholes for text, _ in reading),
    }
    return figures | {"ok": not (figures["differing"] or wrong) and bool(figures["characters"])}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find or start an instance and check it."""
    async with serving(args) as where:
        return await check(where, args.count)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, port_base=18620)
    parser.add_argument("--count", type=int, default=16, help="requests at once")
    return report("openai", run(parser.parse_args()), openai.APIError)


if __name__ == "__main__":
    sys.exit(main())
