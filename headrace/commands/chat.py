"""`headrace chat`: talk to a running instance over HTTP, as any client would."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console


class ChatError(Exception):
    """Raised when the instance refuses or breaks off an answer."""


def stream_answer(url: str, messages: list[dict[str, str]], options: dict[str, Any]) -> Iterator[str]:
    """Yield the pieces of an answer as they arrive.

    Raises:
        ChatError: if the request is refused, the stream reports an error, or it ends without `[DONE]`.
    """
    body = {"messages": messages, "stream": True, **options}
    timeout = httpx.Timeout(10.0, read=600.0)
    try:
        with (
            httpx.Client(timeout=timeout, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply,
        ):
            if reply.status_code != 200:
                raise ChatError(_refusal(reply.read(), reply.status_code))
            done = False
            for line in reply.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    done = True
                    break
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(str(event["error"].get("message")))
                for choice in event.get("choices", []):
                    text = choice.get("delta", {}).get("content")
                    if text:
                        yield text
            if not done:
                raise ChatError("the stream ended without its end mark")
    except httpx.HTTPError as exc:
        raise ChatError(f"{url} does not answer: {exc or type(exc).__name__}") from exc


def first_model(url: str) -> str:
    """Return the name of the model that the instance serves.

    Raises:
        ChatError: if it does not say.
    """
    try:
        reply = httpx.get(f"{url}/v1/models", timeout=10.0, trust_env=False)
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, ValueError) as exc:
        raise ChatError(f"{url} does not name a model: {exc}") from exc


def once(url: str, message: str, options: dict[str, Any]) -> None:
    """Print the answer to one message."""
    for piece in stream_answer(url, [{"role": "user", "content": message}], options):
        print(piece, end="", flush=True)
    print()


def converse(url: str, options: dict[str, Any]) -> None:
    """Talk until the end of input; `/new` starts over, `/quit` leaves."""
    console = Console(stderr=True)
    console.print(f"[dim]{options['model']} at {url}; /new starts over, /quit or Ctrl-D leaves[/dim]")
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text == "/quit":
            return
        if text == "/new":
            messages.clear()
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in stream_answer(url, messages, options):
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            console.print("\n[dim](stopped)[/dim]")
        except ChatError as exc:
            console.print(f"\n[red]{exc}[/red]")
        print()
        if answer:
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()


def _refusal(body: bytes, status: int) -> str:
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{status}: {body[:200].decode('utf-8', 'replace')}"
