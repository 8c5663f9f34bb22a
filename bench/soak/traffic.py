"""Sends the traffic of a soak to an instance, and afterwards the same requests to one without a store."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from bench.client import LoadFailed
from bench.servers import Server
from bench.soak.plan import LEAVE_AFTER, TENANT_HEADER, Answer, Request, Sent, Traffic

WORKERS = 4
LIMIT_S = 900.0  # for a request
MAX_FAILURES = 20  # then the run is over: there is nothing to be learnt from more


def client(server: Server) -> httpx.AsyncClient:
    """Return a client with a connection for each worker."""
    return httpx.AsyncClient(base_url=server.base, timeout=httpx.Timeout(LIMIT_S, connect=10.0))


async def ask(http: httpx.AsyncClient, sent: Sent, *, salt: str) -> Answer:
    """Send one request; whatever goes wrong is in the answer."""
    body = {**sent.request.body, "cache_salt": salt}
    try:
        if sent.request.stream:
            return await _stream(http, sent, body)
        response = await http.post("/v1/chat/completions", json=body, headers={TENANT_HEADER: sent.tenant})
        if response.status_code != 200:
            return Answer(sent, (), error=f"{response.status_code}: {response.text[:300]}")
        reply = response.json()
    except (httpx.HTTPError, OSError, ValueError) as exc:
        return Answer(sent, (), error=f"{type(exc).__name__}: {exc}")
    texts = [""] * sent.request.choices
    for choice in reply["choices"]:
        texts[int(choice["index"])] = str(choice["message"]["content"])
    return _answer(sent, texts, reply["usage"])


async def _stream(http: httpx.AsyncClient, sent: Sent, body: dict[str, Any]) -> Answer:
    texts, seen = [""] * sent.request.choices, 0
    usage: dict[str, Any] = {}
    headers = {TENANT_HEADER: sent.tenant}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            return Answer(sent, (), error=f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                return _answer(sent, texts, usage)
            chunk = json.loads(data)
            if "error" in chunk:
                return Answer(sent, tuple(texts), error=str(chunk["error"]))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                part = (choice.get("delta") or {}).get("content")
                if part:
                    texts[int(choice["index"])] += part
                    seen += 1
            if sent.leaves and seen >= LEAVE_AFTER:
                return _answer(sent, texts, usage)
    return Answer(sent, tuple(texts), error="the stream closed without its end")


def _answer(sent: Sent, texts: list[str], usage: dict[str, Any]) -> Answer:
    details = usage.get("prompt_tokens_details") or {}
    return Answer(sent, tuple(texts), int(usage.get("prompt_tokens", 0)), int(details.get("cached_tokens") or 0))


async def run(
    server: Server, traffic: Traffic, seconds: float, on_answer: Callable[[Answer], None] = lambda _: None
) -> list[Answer]:
    """Let the workers ask for so long; the answers in the order in which they came.

    A request that fails is among the answers; after twenty of them the run is over.
    """
    answers: list[Answer] = []
    begun: set[tuple[str, str]] = set()  # by tenant and chain
    answered: set[tuple[str, str]] = set()
    end = time.monotonic() + seconds

    async def work(worker: int, http: httpx.AsyncClient) -> None:
        while time.monotonic() < end and sum(bool(a.error) for a in answers) < MAX_FAILURES:
            sent = traffic.next(worker)
            mine = (sent.tenant, sent.request.chain)
            first, crossed = mine not in begun, any(c == mine[1] and t != mine[0] for t, c in answered)
            begun.add(mine)
            got = await ask(http, sent, salt=f"salt of {sent.tenant}")
            answered.add(mine)
            answers.append(
                Answer(sent, got.texts, got.prompt_tokens, got.cached_tokens, first, first and crossed, got.error)
            )
            on_answer(answers[-1])

    async with client(server) as http, asyncio.TaskGroup() as group:
        for worker in range(WORKERS):
            group.create_task(work(worker, http))
    return answers


async def refer(server: Server, requests: Iterable[Request]) -> dict[str, tuple[str, ...]]:
    """Return the texts of requests, each computed from its first token on.

    Raises:
        LoadFailed: if one fails, or finds a token of its prompt computed already.
    """
    out: dict[str, tuple[str, ...]] = {}

    async def work(numbered: Iterator[tuple[int, Request]], http: httpx.AsyncClient) -> None:
        for number, request in numbered:
            # A salt of its own: not even the engine's own pool has anything for it.
            got = await ask(http, Sent(request, "reference", leaves=False), salt=f"reference {number}")
            if got.error or got.cached_tokens:
                raise LoadFailed(f"the reference of {request.key}: {got.error or f'{got.cached_tokens} cached tokens'}")
            out[request.key] = got.texts

    numbered = iter(enumerate(requests))
    async with client(server) as http, asyncio.TaskGroup() as group:
        for _ in range(WORKERS):
            group.create_task(work(numbered, http))
    return out
