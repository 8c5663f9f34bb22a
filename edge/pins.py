"""`/v1/kv/pins`: keep a prompt's stored prefix for a while. For who runs the instance, not for its clients.

POST   {"prompt": text} or {"messages": [...]}, "ttl_s", and maybe "model", "tenant", "cache_salt", "id"
GET    all pins of all stores
DELETE /v1/kv/pins/{id}
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from edge.reading import check_content, read_body
from runtime.actor import Context
from schemas.errors import BadRequest, Forbidden, NotFound, Unauthorized, Unavailable, from_info
from schemas.messages import KvStatus, KvStatusQuery, KvUnpin, KvUnpinned, Message, PinPrompt, PromptPinned
from schemas.openai import load_json
from schemas.openai_fields import read_string
from schemas.subjects import Ref
from schemas.tenants import DEFAULT_TENANT

ANSWER_S = 6.0  # making a pin has a limit of its own, below this
STORE_S = 1.0
MAX_BODY = 1 << 20
MAX_ID = 64
OPTIONS = ("ttl_s", "tenant", "id")


class PinRoutes:
    """The three routes.

    Args:
        context: of the edge.
        token: what `Authorization: Bearer` must say; empty: nobody may.
    """

    def __init__(self, context: Context, token: str) -> None:
        self._context, self._token = context, token
        self._waiting: dict[str, asyncio.Future[Message]] = {}

    def report(self, message: PromptPinned | KvStatus | KvUnpinned) -> None:
        """Take an answer."""
        future = self._waiting.get(message.ticket)
        if future is not None and not future.done():
            future.set_result(message)

    async def collection(self, request: Request) -> Response:
        """Pin, or list: one path, two methods."""
        return await (self._create(request) if request.method == "POST" else self._list(request))

    async def _create(self, request: Request) -> Response:
        """Pin a prompt."""
        self._check(request)
        check_content(request.headers, MAX_BODY)
        body = load_json(await read_body(request.receive, max_body=MAX_BODY, limit_s=10.0))
        ttl_s = body.get("ttl_s")
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)):
            raise BadRequest("ttl_s must be a number of seconds", param="ttl_s")
        if ("messages" in body) == ("prompt" in body):
            raise BadRequest("either messages or prompt is pinned", param="prompt")
        wish = PinPrompt(
            ticket=self._ticket(),
            api="chat" if "messages" in body else "completion",
            body={name: value for name, value in body.items() if name not in OPTIONS},
            ttl_s=float(ttl_s),
            tenant=read_string(body, "tenant") or DEFAULT_TENANT,
            pin=read_string(body, "id") or "",
            reply=self._context.ref,
        )
        owners = self._live("admission")
        if not owners:
            raise Unavailable("no admission actor is running")
        (answer,) = await self._ask({owners[0]: wish}, ANSWER_S)
        if not isinstance(answer, PromptPinned):
            raise Unavailable("no answer came in time")
        if answer.error is not None:
            raise from_info(answer.error)
        return _json(answer.model_dump(exclude={"ticket", "error", "pin"}) | {"id": answer.pin, "object": "kv.pin"})

    async def _list(self, request: Request) -> Response:
        """List the pins of all stores."""
        self._check(request)
        context = self._context
        stores = self._live("kv")
        answers = await self._ask(
            {kv: KvStatusQuery(ticket=self._ticket(), reply=context.ref, top=0) for kv in stores}, STORE_S
        )
        rows = [
            {"id": p.pin, "object": "kv.pin", "host": a.host, "store": kv.id, "tenant": p.owner.hex(),
             "head": p.head.hex(), "blocks": p.blocks, "stored": p.stored, "until": p.until}
            for kv, a in zip(stores, answers, strict=True) if isinstance(a, KvStatus) for p in a.pins
        ]  # fmt: skip
        return _json({"object": "list", "data": rows})

    async def delete(self, request: Request) -> Response:
        """End a pin in all stores."""
        self._check(request)
        name = request.path_params["pin"]
        if not 1 <= len(name) <= MAX_ID:
            raise NotFound("there is no such pin")
        reply = self._context.ref
        wishes = {kv: KvUnpin(ticket=self._ticket(), pin=name, reply=reply) for kv in self._live("kv")}
        answers = await self._ask(wishes, STORE_S)
        if not any(isinstance(a, KvUnpinned) and a.known for a in answers):
            raise NotFound("there is no such pin")
        return _json({"id": name, "object": "kv.pin", "deleted": True})

    def _check(self, request: Request) -> None:
        if not self._token:
            raise Forbidden("pins over HTTP are off: admin_token is not set")
        given = request.headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise Unauthorized("the admin token is missing or wrong")

    def _ticket(self) -> str:
        return self._context.clock.random_hex(8)

    def _live(self, kind: str) -> list[Ref]:
        return [member.ref for member in self._context.membership.members(kind) if not member.silent]

    async def _ask(self, wishes: dict[Ref, Any], limit_s: float) -> list[Message | None]:
        """Send to each and return the answers that came in time, None for the others."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Message]] = []
        try:
            for to, wish in wishes.items():
                futures.append(loop.create_future())
                self._waiting[wish.ticket] = futures[-1]
                self._context.send(to, wish)
            if futures:
                await asyncio.wait(futures, timeout=limit_s)
            return [future.result() if future.done() else None for future in futures]
        finally:
            for wish in wishes.values():
                self._waiting.pop(wish.ticket, None)


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
