"""The routes by which who runs the instance pins prefixes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import httpx
import pytest

from edge.actor import EdgeActor
from runtime.actor import Actor
from schemas import messages as m
from schemas.errors import Overloaded
from schemas.subjects import Ref
from tests.support.memory_system import MemorySystem

pytestmark = pytest.mark.anyio

PINS = "/v1/kv/pins"
KEY = {"Authorization": "Bearer open sesame"}
WISH = {"prompt": "a long one", "ttl_s": 60}


class Admission(Actor):
    """Says that everything is pinned, or what it was told to say."""

    kind: ClassVar[str] = "admission"
    error: dict[str, Any] | None = None
    silent = False

    async def start(self) -> None:
        self.wishes: list[m.PinPrompt] = []
        self.state = "ready"

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        if isinstance(message, m.PinPrompt):
            self.wishes.append(message)
            made = m.PromptPinned(ticket=message.ticket, pin=message.pin or "pin-1", tokens=40, blocks=2, until=9.5)
            answer = made if self.error is None else m.PromptPinned(ticket=message.ticket, error=self.error)
            if not self.silent:
                self.context.send(message.reply, answer)


class Store(Actor):
    """Knows one pin."""

    kind: ClassVar[str] = "kv"

    async def start(self) -> None:
        self.state = "ready"

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        match message:
            case m.KvUnpin():
                self.context.send(message.reply, m.KvUnpinned(ticket=message.ticket, known=message.pin == "pin-1"))
            case m.KvStatusQuery():
                row = m.KvPinRow(pin="pin-1", owner=b"\x01" * 8, head=b"\x02" * 32, blocks=2, stored=1, until=9.5)
                self.context.send(message.reply, m.KvStatus(ticket=message.ticket, host="h", pins=[row]))


@asynccontextmanager
async def instance(
    token: str = "open sesame", *, stores: int = 2
) -> AsyncIterator[tuple[httpx.AsyncClient, Admission]]:
    """An edge, an admission actor and stores."""
    async with MemorySystem() as system:
        edge = system.node("edge")
        edge.add("edge", "edge-0", lambda c: EdgeActor(c, models=["tiny"], listen=False, admin_token=token))
        rest = system.node("rest")
        rest.add("admission", "a", Admission)
        for number in range(stores):
            rest.add("kv", str(number), Store)
        await system.start()
        actor, admission = edge.actors[0], rest.actors[0]
        assert isinstance(actor, EdgeActor) and isinstance(admission, Admission)
        await system.until(lambda: len(actor.context.membership.members()) == 2 + stores)
        transport = httpx.ASGITransport(actor.app)
        async with httpx.AsyncClient(base_url="http://edge", transport=transport, timeout=20.0) as http:
            yield http, admission


async def test_a_prompt_is_pinned_listed_and_unpinned() -> None:
    """The wish reaches admission as it is; lists and ends are those of all stores."""
    async with instance() as (http, admission):
        made = await http.post(PINS, json=WISH | {"tenant": "acme", "cache_salt": "s"}, headers=KEY)
        chat = {"messages": [{"role": "user", "content": "x"}], "ttl_s": 1.5, "id": "mine"}
        mine = await http.post(PINS, json=chat, headers=KEY)
        listed = await http.get(PINS, headers=KEY)
        gone = await http.delete(f"{PINS}/pin-1", headers=KEY)
        unknown = await http.delete(f"{PINS}/other", headers=KEY)

    wish, second = admission.wishes
    assert (wish.api, wish.body, wish.ttl_s, wish.tenant) == (
        "completion", {"prompt": "a long one", "cache_salt": "s"}, 60.0, "acme",
    )  # fmt: skip
    assert (second.api, second.pin, second.tenant) == ("chat", "mine", "default")
    assert made.json() == {"id": "pin-1", "object": "kv.pin", "tokens": 40, "blocks": 2, "stored": 0, "until": 9.5}
    assert mine.json()["id"] == "mine"
    assert [row["id"] for row in listed.json()["data"]] == ["pin-1", "pin-1"]
    assert listed.json()["data"][0]["head"] == "02" * 32
    assert gone.json()["deleted"] is True and unknown.status_code == 404


async def test_only_who_has_the_token_may() -> None:
    """Without a token in the settings nobody; nothing reaches the bus."""
    async with instance() as (http, admission):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "open sesame"}):
            for response in (
                await http.post(PINS, json=WISH, headers=headers),
                await http.get(PINS, headers=headers),
                await http.delete(f"{PINS}/pin-1", headers=headers),
            ):
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert admission.wishes == []
    async with instance("") as (http, admission):
        assert (await http.post(PINS, json=WISH, headers={"Authorization": "Bearer "})).status_code == 403
        assert admission.wishes == []


async def test_what_is_wrong_is_said_with_its_status() -> None:
    """The envelope of all other routes."""
    async with instance(stores=0) as (http, admission):
        for body, param in (
            ({"prompt": "x"}, "ttl_s"),
            ({"prompt": "x", "ttl_s": True}, "ttl_s"),
            ({"ttl_s": 5}, "prompt"),
            ({"prompt": "x", "messages": [], "ttl_s": 5}, "prompt"),
            (WISH | {"tenant": 3}, "tenant"),
        ):
            response = await http.post(PINS, json=body, headers=KEY)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert (await http.get(PINS, headers=KEY)).json() == {"object": "list", "data": []}
        admission.error = Overloaded("pins may hold half of the tier", code="tier_share").info()
        full = await http.post(PINS, json=WISH, headers=KEY)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "tier_share")
