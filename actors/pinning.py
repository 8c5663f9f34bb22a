"""From a prompt to pinned blocks: encode it, ask an engine for the hashes of its blocks, tell the stores to keep them.

Each step is one message and one answer. What does not come within the limit ends the whole with an error; a store that
had taken the pin already forgets it when its time is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.homes import pinned_at
from kvstore.pins import MAX_TTL_S
from runtime.actor import Context
from runtime.membership import Member
from schemas import messages as m
from schemas.errors import BadRequest, HeadraceError, Overloaded, Unavailable, from_info
from schemas.openai import parse_request
from schemas.record import Fence
from schemas.subjects import Ref
from schemas.tenants import MAX_TENANT, owner_of

LIMIT_S = 5.0
MAX_OPEN = 64
MAX_ID = 64
ENGINES = ("both", "decode", "prefill")


@dataclass(slots=True)
class _Asked:
    msg: m.PinPrompt
    pin: str
    cache_salt: str
    until: float
    num_tokens: int = 0
    hashes: list[bytes] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)  # tickets of stores that have not answered
    others: list[Ref] = field(default_factory=list)  # stores that may hold another prefix under this id
    answers: list[m.KvPinned] = field(default_factory=list)


class Pinning:
    """The pins that are being made through one admission actor.

    Args:
        context: of that actor.
        models: names that are served; the first one is meant where none is given.
    """

    def __init__(self, context: Context, models: tuple[str, ...]) -> None:
        self._context, self._models = context, models
        self._open: dict[str, _Asked] = {}  # by request id of the encoding
        self._number = 0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, msg: m.PinPrompt) -> None:
        """Check a wish and encode its prompt."""
        try:
            self._begin(msg)
        except HeadraceError as exc:
            self._context.send(msg.reply, m.PromptPinned(ticket=msg.ticket, error=exc.info()))

    def _begin(self, msg: m.PinPrompt) -> None:
        if len(self._open) >= MAX_OPEN:
            raise Overloaded(f"{MAX_OPEN} prefixes are being pinned already", code="too_many_requests")
        if not 0 < msg.ttl_s <= MAX_TTL_S:
            raise BadRequest(f"ttl_s must be above 0, and {MAX_TTL_S:g} at most", param="ttl_s")
        if not 1 <= len(msg.tenant) <= MAX_TENANT or len(msg.pin) > MAX_ID:
            raise BadRequest("the tenant's name or the pin's id is empty or too long", param="tenant")
        parsed = parse_request(msg.api, {"model": self._models[0], **msg.body}, models=self._models)
        if parsed.num_prompts != 1:
            raise BadRequest("one prompt is pinned at a time", param="prompt")
        context, clock = self._context, self._context.clock
        self._number += 1
        name = f"pin.{context.ref.id}.{context.ref.epoch}.{self._number}"
        pin = msg.pin or f"pin-{clock.random_hex(8)}"
        self._open[name] = _Asked(msg, pin, parsed.cache_salt, clock.now() + LIMIT_S)
        body = {"created": int(clock.wall())}
        prompt = {"messages": list(parsed.messages)} if msg.api == "chat" else {"prompt": list(parsed.prompts)}
        tokenize = m.Tokenize(
            request_id=name,
            fence=Fence(0, f"{context.ref.id}.{context.ref.epoch}", 0),
            deadline=clock.wall() + LIMIT_S,
            api=msg.api,
            body=body | prompt,
            reply=context.ref,
        )
        context.anycast("tokenize", tokenize)

    def on_tokenized(self, msg: m.Tokenized) -> bool:
        """A prompt is encoded; false if it is not one of these."""
        asked = self._open.get(msg.request_id)
        if asked is None:
            return False
        if msg.error is not None:
            self._end(msg.request_id, from_info(msg.error))
            return True
        engine = next((e for kind in ENGINES for e in self._live(kind)), None)
        if engine is None:
            self._end(msg.request_id, Unavailable("no engine is ready", code="not_ready", retry_after_s=1.0))
            return True
        ids = msg.prompt_ids[0]
        asked.num_tokens = len(ids)
        query = m.ChainQuery(
            ticket=msg.request_id,
            prompt_ids=ids,
            tenant=asked.msg.tenant,
            cache_salt=asked.cache_salt,
            reply=self._context.ref,
        )
        self._context.send(engine, query)
        return True

    def on_chain(self, msg: m.Chain) -> None:
        """The hashes of a prompt's blocks are known: on every host the store that is their home shall keep them."""
        asked = self._open.get(msg.ticket)
        if asked is None or asked.hashes:
            return
        if not msg.hashes:
            self._end(msg.ticket, BadRequest("the prompt is shorter than a block", param="prompt"))
            return
        hosts: dict[str, list[Ref]] = {}
        for member in self._members("kv"):
            hosts.setdefault(member.host, []).append(member.ref)
        # A store bounds what is pinned in it, stored or not: only those are told that will have the blocks.
        stores = [ref for refs in hosts.values() for ref in pinned_at(refs, msg.hashes)]
        if not stores:
            self._end(msg.ticket, Unavailable("no store is there", code="not_ready", retry_after_s=1.0))
            return
        asked.hashes = msg.hashes
        if asked.msg.pin:
            asked.others = [ref for refs in hosts.values() for ref in refs if ref not in stores]
        for number, store in enumerate(stores):
            ticket = f"{msg.ticket}/{number}"
            asked.waiting.add(ticket)
            pin = m.KvPin(
                ticket=ticket,
                pin=asked.pin,
                hashes=msg.hashes,
                owner=owner_of(asked.msg.tenant),
                ttl_s=asked.msg.ttl_s,
                reply=self._context.ref,
            )
            self._context.send(store, pin)

    def on_pinned(self, msg: m.KvPinned) -> None:
        """A store has answered; with the last one the pin is made, if any of them took it."""
        name = msg.ticket.rpartition("/")[0]
        asked = self._open.get(name)
        if asked is None or msg.ticket not in asked.waiting:
            return
        asked.waiting.discard(msg.ticket)
        asked.answers.append(msg)
        if not asked.waiting:
            self._settle(name, asked)

    def _settle(self, name: str, asked: _Asked) -> None:
        good = [answer for answer in asked.answers if answer.error is None]
        if not good:
            bad = next((a.error for a in asked.answers if a.error is not None), None)
            self._end(name, Unavailable("no store has answered") if bad is None else from_info(bad))
            return
        del self._open[name]
        for other in asked.others:  # as a store does itself: what is pinned under a known id takes the old one's place
            self._context.send(other, m.KvUnpin(ticket=name, pin=asked.pin, reply=self._context.ref))
        answer = m.PromptPinned(
            ticket=asked.msg.ticket,
            pin=asked.pin,
            tokens=asked.num_tokens,
            blocks=len(asked.hashes),
            stored=max(answer.stored for answer in good),
            until=min(answer.until for answer in good),
        )
        self._context.send(asked.msg.reply, answer)

    def tick(self, now: float) -> None:
        """End what takes too long; stores that have answered by then are enough."""
        for name, asked in list(self._open.items()):
            if now >= asked.until:
                self._settle(name, asked)

    def _end(self, name: str, error: HeadraceError) -> None:
        asked = self._open.pop(name)
        self._context.send(asked.msg.reply, m.PromptPinned(ticket=asked.msg.ticket, error=error.info()))

    def _live(self, kind: str) -> list[Ref]:
        return [member.ref for member in self._members(kind)]

    def _members(self, kind: str) -> list[Member]:
        return [member for member in self._context.membership.members(kind) if not member.silent]
