"""The two clients that write histories: OpenAI over HTTP (sees texts), and native over NATS (sees item indices)."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from chaos.history import Recorder

WINDOW = 64
ACK_PERIOD_S = 0.2
SILENCE_S = 2.0  # a native client of whose request nobody has said a word for so long asks again; twice as long next
LOST_S = 5.0  # and one that was taken, without an item yet, when not even a keepalive has come for so long
NOBODY_S = 0.2  # and so long after the bus has said that nobody listens
NOBODY_LIMIT_S = 5.0  # after which it believes it
SLACK_S = 5.0  # a client waits this much past the deadline before it calls a request hung


async def http_chat(
    recorder: Recorder,
    http: httpx.AsyncClient,
    name: str,
    key: str,
    body: dict[str, Any],
    *,
    path: str = "/v1/chat/completions",
    deadline_s: float = 120.0,
) -> None:
    """Send one request over HTTP, streamed if its body says so, and record all that comes back.

    A request that hangs past its deadline and the slack is left without a terminal: the checker finds it.
    """
    choices = int(body.get("n", 1))
    recorder.add(name, "sent", client="http", key=key, choices=choices, deadline_s=deadline_s, indexed=False)
    body = {**body, "deadline_ms": round(deadline_s * 1000)}
    try:
        async with asyncio.timeout(deadline_s + SLACK_S):
            if body.get("stream"):
                await _http_stream(recorder, http, name, path, body)
            else:
                await _http_whole(recorder, http, name, path, body)
    except TimeoutError:
        return
    except httpx.HTTPError as exc:
        recorder.add(name, "terminal", error={"kind": type(exc).__name__, "message": str(exc)}, usage=None)


async def _http_whole(
    recorder: Recorder, http: httpx.AsyncClient, name: str, path: str, body: dict[str, Any]
) -> None:
    response = await http.post(path, json=body)
    if response.status_code != 200:
        recorder.add(name, "terminal", error=_error(response.status_code, response.text), usage=None)
        return
    reply = response.json()
    recorder.add(name, "accepted", id=reply["id"])
    for choice in reply["choices"]:
        index = int(choice["index"])
        recorder.add(name, "item", choice=index, index=None, id=None, text=_text(choice))
        recorder.add(name, "finish", choice=index, reason=choice["finish_reason"], total=None)
    recorder.add(name, "terminal", error=None, usage=reply.get("usage"))


async def _http_stream(
    recorder: Recorder, http: httpx.AsyncClient, name: str, path: str, body: dict[str, Any]
) -> None:
    async with http.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            recorder.add(name, "terminal", error=_error(response.status_code, text), usage=None)
            return
        usage, accepted, ended = None, False, False
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                recorder.add(name, "terminal", error=None, usage=usage)
                ended = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                recorder.add(name, "terminal", error=chunk["error"], usage=usage)
                ended = True
                continue
            if not accepted:
                accepted = True
                recorder.add(name, "accepted", id=chunk["id"])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                index, text = int(choice["index"]), _text(choice)
                if text:
                    recorder.add(name, "item", choice=index, index=None, id=None, text=text)
                if choice.get("finish_reason"):
                    recorder.add(name, "finish", choice=index, reason=choice["finish_reason"], total=None)
        if not ended:
            recorder.add(name, "terminal", error={"message": "the stream closed without its end"}, usage=usage)


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or choice
    return str(part.get("content") or part.get("text") or "")


def _error(status: int, text: str) -> dict[str, Any]:
    try:
        error = dict(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        error = {"message": text[:200]}
    return {**error, "status": status}


def bare_id(request_id: str) -> str:
    """Return a request id without the prefix that the HTTP API puts before it."""
    return request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")


class NativeStream:
    """One request of a native client: collects frames, drops what is out of order, acknowledges."""

    def __init__(self, recorder: Recorder, nats: Nats, name: str, choices: int) -> None:
        self._recorder = recorder
        self._nats = nats
        self._name = name
        self._next = [0] * choices
        self._ack_to = ""
        self._finished: set[int] = set()
        self.accepted = False
        self.taken = False  # somebody has answered, whatever it was
        self._heard_at = time.monotonic()
        self.done = asyncio.Event()
        self.nobody = asyncio.Event()

    async def on_frame(self, message: Msg) -> None:
        """Handle one frame as it arrives."""
        if message.headers and message.headers.get("Status") == "503":
            if not self.taken:
                self.nobody.set()
            return
        self.taken = True
        self._heard_at = time.monotonic()
        frame = json.loads(message.data)
        if message.reply:
            self._ack_to = message.reply
        if not self.done.is_set():
            self._take(frame)
        await self.acknowledge()

    def _take(self, frame: dict[str, Any]) -> None:
        if "accepted" in frame and not self.accepted:
            self.accepted = True
            self._recorder.add(self._name, "accepted", id=frame["id"])
        for choice, index, token, text, _logprob in frame.get("items", []):
            self._recorder.add(self._name, "item", choice=choice, index=index, id=token, text=text)
            while len(self._next) <= choice:
                self._next.append(0)
            if index == self._next[choice]:
                self._next[choice] += 1
        for choice, reason, total in frame.get("finish", []):
            if choice not in self._finished:
                self._finished.add(choice)
                self._recorder.add(self._name, "finish", choice=choice, reason=reason, total=total)
        if "terminal" in frame and self._complete(frame):
            terminal = frame["terminal"]
            self._recorder.add(self._name, "terminal", error=terminal.get("error"), usage=terminal.get("usage"))
            self.done.set()

    def _complete(self, frame: dict[str, Any]) -> bool:
        # A terminal that overtook lost items is not the end yet: they are sent again, and it after them.
        terminal = frame["terminal"]
        return terminal.get("error") is not None or self._next == terminal["items"]

    def lost(self, silence_s: float) -> bool:
        """Whether it is to be asked again; never once an item has come."""
        if any(self._next) or self._finished:
            return False
        return time.monotonic() - self._heard_at >= (max(silence_s, LOST_S) if self.taken else silence_s)

    async def acknowledge(self) -> None:
        """Tell the sender what has arrived."""
        if self._ack_to:
            ack: dict[str, Any] = {"next": self._next, "window": WINDOW}
            await self._nats.publish(self._ack_to, json.dumps(ack).encode())


async def native_chat(
    recorder: Recorder,
    nats: Nats,
    name: str,
    key: str,
    body: dict[str, Any],
    *,
    subject: str = "requests.chat",
    deadline_s: float = 120.0,
) -> None:
    """Send one request over NATS in JSON and record every frame until the terminal.

    Before a word has come nothing was promised: the request may have died with the admission actor that had just got
    it, or none was running. It is then sent again, to an inbox of its own; whoever works for the one before finds that
    nobody listens there. So it is when all who had accepted it died before anybody else knew of it: keepalives, which
    come once per second until the first item, do not come.
    """
    choices = int(body.get("n", 1))
    recorder.add(name, "sent", client="native", key=key, choices=choices, deadline_s=deadline_s, indexed=True)
    began, silence_s = time.monotonic(), SILENCE_S
    try:
        async with asyncio.timeout(deadline_s + SLACK_S):
            while True:
                stream = NativeStream(recorder, nats, name, choices)
                left_s = deadline_s - (time.monotonic() - began)
                payload = json.dumps({**body, "deadline_ms": max(1, round(left_s * 1000))}).encode()
                if await _try(nats, stream, subject, payload, silence_s):
                    return
                silence_s *= 2
                if stream.nobody.is_set():
                    if time.monotonic() - began >= NOBODY_LIMIT_S:
                        error = {"kind": "Unavailable", "message": "nobody listens for requests"}
                        recorder.add(name, "terminal", error=error, usage=None)
                        return
                    await asyncio.sleep(NOBODY_S)
    except TimeoutError:
        pass  # hung: the checker finds a request without a terminal


async def _try(nats: Nats, stream: NativeStream, subject: str, payload: bytes, silence_s: float) -> bool:
    """Publish a request and follow it to its end; false if it is to be asked again."""
    inbox = nats.new_inbox()
    subscription = await nats.subscribe(inbox, cb=stream.on_frame)
    try:
        await nats.publish(subject, payload, reply=inbox, headers={"Content-Type": "application/json"})
        while not stream.done.is_set():
            if stream.nobody.is_set() or stream.lost(silence_s):
                return False
            try:
                async with asyncio.timeout(ACK_PERIOD_S):
                    await stream.done.wait()
            except TimeoutError:
                await stream.acknowledge()
        return True
    finally:
        await subscription.unsubscribe()
