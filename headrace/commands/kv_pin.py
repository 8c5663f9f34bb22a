"""`headrace kv pin`, `unpin`, `pins`: which prefixes are kept for a while, asked over the bus."""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.table import Column, Table

from headrace import bus_access
from headrace.commands.kv_show import ANSWER_S, answered, listen, wide_console
from runtime.clock import SystemClock
from schemas import codec
from schemas.errors import Unavailable, from_info
from schemas.messages import KvStatus, KvStatusQuery, KvUnpin, KvUnpinned, Message, PinPrompt, PromptPinned
from schemas.settings import Settings
from schemas.subjects import Ref

PIN_S = 6.0  # making a pin has a limit of its own, below this


async def ask(
    settings: Settings, kind: str, wish: Message, limit_s: float, *, one: bool = False
) -> list[Message | None]:
    """Send a question to every actor of a kind that is ready, or to one; returns their answers, None from who is late.

    The question's ticket and reply are set here.

    Raises:
        BusUnavailable: if the bus does not answer.
        Unavailable: if there is no such actor.
    """
    clock = SystemClock()
    bus = await bus_access.connect(settings, clock=clock, name="headrace-kv", wait_s=3.0)
    try:
        seen, me = await listen(bus, clock)
        beats = [beat for beat in seen.of(kind) if beat.state == "ready"][: 1 if one else None]
        if not beats:
            raise Unavailable(f"no {kind} actor is ready")
        tickets = [f"{number}.{clock.random_hex(4)}" for number in range(len(beats))]
        for ticket, beat in zip(tickets, beats, strict=True):
            bus.publish(beat.ref.subject, codec.encode(wish.model_copy(update={"ticket": ticket, "reply": me})))
        await answered(seen, tickets, clock, limit_s)
    finally:
        await bus.close()
    return [seen.answers.get(ticket) for ticket in tickets]


NOBODY = Ref("tool", "kv", "0")  # replaced before anything is sent


def pin(settings: Settings, body: Mapping[str, Any], *, ttl_s: float, tenant: str, name: str, as_json: bool) -> int:
    """Pin a prompt and say what is held; returns the exit code.

    Raises:
        HeadraceError: if it is refused or nobody answers.
    """
    api = "chat" if "messages" in body else "completion"
    wish = PinPrompt(ticket="", api=api, body=dict(body), ttl_s=ttl_s, tenant=tenant, pin=name, reply=NOBODY)
    answers = asyncio.run(ask(settings, "admission", wish, PIN_S, one=True))
    answer = answers[0] if answers else None
    if not isinstance(answer, PromptPinned):
        raise Unavailable("no answer came in time")
    if answer.error is not None:
        raise from_info(answer.error)
    if as_json:
        print(json.dumps(answer.model_dump(exclude={"ticket", "error"})))
    else:
        print(f"{answer.pin}: {answer.blocks} blocks of {answer.tokens} tokens until {_time(answer.until)}, "
              f"{answer.stored} of them stored")  # fmt: skip
    return 0


def unpin(settings: Settings, name: str) -> int:
    """End a pin in every store; returns 1 if none knew it.

    Raises:
        HeadraceError: if there is no store.
    """
    answers = asyncio.run(ask(settings, "kv", KvUnpin(ticket="", pin=name, reply=NOBODY), ANSWER_S))
    if any(isinstance(answer, KvUnpinned) and answer.known for answer in answers):
        return 0
    print(f"error: no store knows a pin {name}", file=sys.stderr)
    return 1


def pins(settings: Settings, *, as_json: bool) -> int:
    """List the pins of every store; returns the exit code.

    Raises:
        HeadraceError: if there is no store.
    """
    answers = asyncio.run(ask(settings, "kv", KvStatusQuery(ticket="", reply=NOBODY, top=0), ANSWER_S))
    rows = [(a.host, row) for a in answers if isinstance(a, KvStatus) for row in a.pins]
    if as_json:
        print(json.dumps([
            row.model_dump() | {"host": host, "owner": row.owner.hex(), "head": row.head.hex()} for host, row in rows
        ]))  # fmt: skip
        return 0
    # The id is what people need to end a pin: it is never cut.
    table = Table(
        Column("pin", no_wrap=True, min_width=20),
        "host",
        "tenant",
        "prefix",
        "blocks",
        "stored",
        "until",
        box=None,
        pad_edge=False,
    )
    for host, row in rows:
        table.add_row(row.pin, host, row.owner.hex(), row.head.hex()[:16], str(row.blocks), str(row.stored),
                      _time(row.until))  # fmt: skip
    wide_console().print(table)
    return 0


def _time(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")
