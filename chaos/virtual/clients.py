"""Clients of a storm: native ones that follow the three lines, and ones behind an edge; both write histories."""

from __future__ import annotations

import json
from typing import Any

from chaos.history import Recorder
from chaos.virtual.nodes import MODEL
from chaos.virtual.plan import Arrival
from edge.actor import EdgeActor
from edge.exchange import OpenRequest
from edge.inflight import Delta
from engine.scripted_runner import Rules
from runtime.bus import Bus, BusMessage
from runtime.clock import Clock
from schemas.errors import HeadraceError
from schemas.openai import parse_request
from schemas.record import Sampling

SCRIPT = Rules({})
ACK_PERIOD_S = 0.2
WINDOW = 64
HUNG_S = 5.0  # past the deadline, before a request counts as hung
ACCEPT_LIMIT_S = 6.0  # a native client that nobody accepts gives up: nothing was promised to it
TEMPERATURE = 0.7
WORDS = "the water that turns the wheel comes down the headrace "


def prompt_of(arrival: Arrival) -> str:
    """Return the prompt of a request: much of it is shared with others, so that there is something to find stored."""
    text = (WORDS * (arrival.prompt_len // len(WORDS) + 1))[: arrival.prompt_len]
    return text + (arrival.key if hash_of(arrival.key) % 3 else "")


def hash_of(key: str) -> int:
    """Return the number in a request's key."""
    return int(key[1:])


def body_of(arrival: Arrival) -> dict[str, Any]:
    """Return the body that its client sends."""
    body: dict[str, Any] = {
        "model": MODEL, "prompt": prompt_of(arrival), "max_tokens": arrival.tokens, "n": arrival.choices,
        "deadline_ms": round(arrival.deadline_s * 1000), "temperature": 0.0, "stream": True,
    }  # fmt: skip
    if arrival.seed is not None:
        body |= {"temperature": TEMPERATURE, "seed": arrival.seed}
    if arrival.stop_at:
        body["stop"] = [undisturbed(arrival, 0)[arrival.stop_at : arrival.stop_at + 4]]
    return body


def undisturbed(arrival: Arrival, choice: int) -> str:
    """Return what the script says to a request, its stop string left out of account."""
    sampling = Sampling(temperature=0.0)
    if arrival.seed is not None:
        sampling = Sampling(temperature=TEMPERATURE, seed=arrival.seed)
    ids = list(prompt_of(arrival).encode())
    return "".join(chr(SCRIPT(ids, choice, index, sampling)) for index in range(arrival.tokens))


def reference(arrival: Arrival) -> tuple[list[str], list[str]]:
    """Return the texts and finish reasons of an undisturbed run."""
    whole = [undisturbed(arrival, choice) for choice in range(arrival.choices)]
    if not arrival.stop_at:
        return whole, ["length"] * arrival.choices
    (stop,) = body_of(arrival)["stop"]
    return [text.split(stop)[0] for text in whole], ["stop" if stop in text else "length" for text in whole]


def announce(recorder: Recorder, arrival: Arrival) -> None:
    """Record that a request is sent, and what it must say."""
    texts, reasons = reference(arrival)
    recorder.add("", "reference", key=arrival.key, texts=texts, reasons=reasons)
    recorder.add(
        arrival.key, "sent", client=arrival.client, key=arrival.key, choices=arrival.choices,
        deadline_s=arrival.deadline_s, indexed=arrival.client == "native", may_expire=arrival.may_expire,
        may_be_refused=True,
    )  # fmt: skip


class NativeClient:
    """One request of a native client on the in-memory bus."""

    def __init__(self, recorder: Recorder, bus: Bus, clock: Clock, arrival: Arrival) -> None:
        self._recorder, self._bus, self._clock, self._arrival = recorder, bus, clock, arrival
        self._next = [0] * arrival.choices
        self._finished: set[int] = set()
        self._ack_to = ""
        self._paused_until = 0.0
        self._accepted = self._over = False

    async def run(self) -> None:
        """Send, take frames, acknowledge; leave when it is time."""
        arrival, clock = self._arrival, self._clock
        inbox = self._bus.new_inbox()
        subscription = await self._bus.subscribe(inbox, self._take)
        announce(self._recorder, arrival)
        began = clock.now()
        payload = json.dumps(body_of(arrival)).encode()
        self._bus.publish("requests.completion", payload, reply=inbox)
        while not self._over and clock.now() < began + arrival.deadline_s + HUNG_S:
            await clock.sleep(ACK_PERIOD_S)
            self._acknowledge()
            gone = arrival.leaves_s and clock.now() >= began + arrival.leaves_s
            if not self._over and (gone or (not self._accepted and clock.now() >= began + ACCEPT_LIMIT_S)):
                self._leave()
        if not self._over and not self._accepted:
            self._leave()
        if not (arrival.silent and arrival.leaves_s):
            # Whoever repeats its terminal is told once more.
            await clock.sleep(2.0)
        await subscription.unsubscribe()

    def _leave(self) -> None:
        self._over = True
        self._recorder.add(self._arrival.key, "left")
        if not self._arrival.silent:
            self._acknowledge()

    def _take(self, message: BusMessage) -> None:
        if message.no_responders:
            return
        frame = json.loads(message.payload)
        self._ack_to = message.reply or self._ack_to
        if not self._over and self._clock.now() >= self._paused_until:
            self._record(frame)
            self._acknowledge()
        elif self._over and not (self._arrival.silent and self._arrival.leaves_s):
            self._acknowledge()

    def _record(self, frame: dict[str, Any]) -> None:
        add, key = self._recorder.add, self._arrival.key
        if "accepted" in frame and not self._accepted:
            self._accepted = True
            promised = float(frame["accepted"]["deadline"]) - self._clock.wall() + self._clock.now()
            add(key, "accepted", id=frame["id"], until=round(promised, 6))
        for choice, index, token, text, _ in frame.get("items", ()):
            add(key, "item", choice=choice, index=index, id=token, text=text)
            if index == self._next[choice]:
                self._next[choice] += 1
                if self._arrival.pause_s and sum(self._next) == 1:
                    self._paused_until = self._clock.now() + self._arrival.pause_s
        for choice, reason, total in frame.get("finish", ()):
            if choice not in self._finished and total == self._next[choice]:
                self._finished.add(choice)
                add(key, "finish", choice=choice, reason=reason, total=total)
        terminal = frame.get("terminal")
        if terminal is not None and ("error" in terminal or terminal["items"] == self._next):
            add(key, "terminal", error=terminal.get("error"), usage=terminal.get("usage"))
            self._over = True

    def _acknowledge(self) -> None:
        if not self._ack_to or self._clock.now() < self._paused_until:
            return
        ack: dict[str, Any] = {"next": self._next, "window": WINDOW}
        if self._over:
            ack["done"] = True
        self._bus.publish(self._ack_to, json.dumps(ack).encode())


class EdgeClient:
    """One request that came in over HTTP: what the edge's routes do with it, without the sockets."""

    def __init__(self, recorder: Recorder, edge: EdgeActor, clock: Clock, arrival: Arrival) -> None:
        self._recorder, self._edge, self._clock, self._arrival = recorder, edge, clock, arrival
        self._exchange = edge.exchange
        self._accepted = False

    async def run(self) -> None:
        """Submit, read until the end, close; leave when it is time."""
        arrival, clock = self._arrival, self._clock
        announce(self._recorder, arrival)
        began = clock.now()
        body = body_of(arrival)
        parsed = parse_request("completion", body, models=(MODEL,))
        try:
            await self._edge.ready(arrival.deadline_s)
            request = self._exchange.open(
                parsed, body, received_at=began, deadline_s=arrival.deadline_s, request_class="interactive",
                traceparent="",
            )  # fmt: skip
        except HeadraceError as exc:
            self._recorder.add(arrival.key, "terminal", error={"code": exc.code}, usage=None)
            return
        leaves_at = began + arrival.leaves_s if arrival.leaves_s else float("inf")
        read = 0
        while not request.inflight.ended or request.inflight.has_events:
            await request.wait(max(0.001, min(leaves_at - clock.now(), 5.0)))
            if clock.now() >= leaves_at:
                self._recorder.add(arrival.key, "left")
                self._exchange.close(request)
                return
            read += self._read(request)
            if arrival.pause_s and 0 < read < 20:
                await clock.sleep(arrival.pause_s / 4)
            if clock.now() > began + arrival.deadline_s + HUNG_S:
                break
        if request.inflight.ended:
            error = request.inflight.error
            told = None if error is None else {"code": error.code}
            self._recorder.add(arrival.key, "terminal", error=told, usage=None)
        self._exchange.close(request)

    def _read(self, request: OpenRequest) -> int:
        key, count = self._arrival.key, 0
        if request.inflight.accepted is not None and not self._accepted:
            self._accepted = True
            self._recorder.add(key, "accepted", id=request.id)
        for event in request.inflight.take():
            if isinstance(event, Delta):
                count += event.num_items
                self._recorder.add(key, "item", choice=event.choice, index=None, id=None, text=event.text)
            else:
                self._recorder.add(key, "finish", choice=event.choice, reason=event.reason, total=None)
        self._exchange.taken(request)
        return count
