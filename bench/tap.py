"""Looks on at what the actors of a running instance say to each other, as one more subscriber of their bus."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from schemas.codec import DecodeError, decode, split
from schemas.items import ITEMS, ItemBatch, parse_items
from schemas.messages import Message
from schemas.subjects import EXIT, Ref

CONTROL = ("actor.*.*.*", "actor.tokenize", EXIT)
ITEMS_TO = "actor.detokenize.*.*.hot"


@dataclass(frozen=True, slots=True)
class Heard:
    """One message: when it was heard (monotonic seconds), who said it to whom, and what."""

    t: float
    subject: str
    sender: Ref | None
    message: Message


@dataclass(frozen=True, slots=True)
class HeardItems:
    """Items of one request on their way to its detokenizer."""

    t: float
    sender: Ref | None
    batch: ItemBatch


class Tap:
    """Calls `on_message` for each control message and, if it is given, `on_items` for each request's items."""

    def __init__(
        self, on_message: Callable[[Heard], None], on_items: Callable[[HeardItems], None] | None = None
    ) -> None:
        self._on_message = on_message
        self._on_items = on_items

    async def start(self, nats: Nats) -> None:
        """Listen from now on."""
        for subject in CONTROL:
            await nats.subscribe(subject, cb=self._control)
        if self._on_items is not None:
            await nats.subscribe(ITEMS_TO, cb=self._hot)
        await nats.flush()

    async def _control(self, message: Msg) -> None:
        t = time.monotonic()
        try:
            said, sender = decode(message.data)
        except DecodeError:
            return
        self._on_message(Heard(t, message.subject, sender, said))

    async def _hot(self, message: Msg) -> None:
        t = time.monotonic()
        try:
            _, kind, origin, body = split(message.data)
            batches = parse_items(body) if kind == ITEMS else []
        except (DecodeError, ValueError, TypeError):
            return
        sender = _ref(origin)
        if self._on_items is not None:
            for batch in batches:
                self._on_items(HeardItems(t, sender, batch))


def _ref(origin: Any) -> Ref | None:
    return None if origin is None else Ref(*origin)
