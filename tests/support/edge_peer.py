"""A scripted stand-in for everything behind the edge: it speaks the protocol and says what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

from edge.actor import EdgeActor
from edge.generate import Limits
from runtime.actor import Actor, Context
from runtime.clock import Clock
from runtime.node import Node
from schemas.errors import HeadraceError
from schemas.items import ACKS, FRAMES, Ack, TextItem, frame, parse_acks
from schemas.messages import CancelAck, Close, Message, Submit, SubmitCancel
from schemas.record import Fence
from schemas.subjects import Ref, parse_mailbox
from tests.support.memory_system import MemorySystem

MODEL = "tiny"
RESEND_S = 0.3


@dataclass(slots=True)
class Answer:
    """What a peer says to one request: item texts and a finish reason per choice, and how it misbehaves."""

    texts: list[list[str]] = field(default_factory=lambda: [["Hel", "lo", "!"]])
    reasons: list[str] = field(default_factory=list)
    prompt_tokens: int = 5
    cached_tokens: int = 0
    refuse: HeadraceError | None = None  # instead of acceptance
    silent: bool = False  # not even an acceptance
    hold_at: int | None = None  # say no more than so many items per choice until `release`
    fail_at: tuple[int, HeadraceError] | None = None  # after so many items of choice 0
    first_id: int = 100


@dataclass(slots=True)
class Session:
    """One request at the peer."""

    submit: Submit
    answer: Answer
    fence: Fence
    sent: list[int]
    acked: list[int]
    window: int = 256
    finished: set[int] = field(default_factory=set)
    ended: bool = False
    done: bool = False
    sent_at: float = 0.0


class ScriptedPeer(Actor):
    """Admission and detokenizer in one; sends one item per choice and message, within the credit it was given."""

    kind: ClassVar[str] = "admission"

    def __init__(self, context: Context, *, answer: Callable[[Submit], Answer]) -> None:
        super().__init__(context)
        self.answer = answer
        self.submits: list[Submit] = []
        self.cancels: list[SubmitCancel] = []
        self.closes: list[Close] = []
        self.acks: list[Ack] = []
        self.sessions: dict[str, Session] = {}
        self.answer_cancels = True
        self.lose: Callable[[dict[str, Any]], bool] = lambda _frame: False
        self.own: bool = True

    def receive(self, message: Message, sender: Ref | None) -> None:
        """Serve or cancel."""
        match message:
            case Submit():
                self.submits.append(message)
                self._serve(message)
            case SubmitCancel():
                self.cancels.append(message)
                self.sessions.pop(message.request_id, None)
                if self.answer_cancels and sender is not None:
                    self.context.send(sender, CancelAck(request_id=message.request_id))
            case Close():
                self.closes.append(message)
                self.sessions.pop(message.request_id, None)

    def _serve(self, submit: Submit) -> None:
        answer = self.answer(submit)
        if answer.silent:
            return
        fence = Fence(submit.term, self.ref.id, 0)
        if answer.refuse is not None:
            self._frames(submit, [frame(submit.request_id, fence, terminal={"error": answer.refuse.info()})])
            return
        zeros = [0] * len(answer.texts)
        session = Session(submit, answer, fence, list(zeros), list(zeros))
        self.sessions[submit.request_id] = session
        accepted = {
            "id": submit.request_id,
            "seed": submit.seed,
            "created": submit.created,
            "deadline": submit.deadline,
            "owner": self.ref.wire(),
        }
        self._frames(submit, [frame(submit.request_id, fence, accepted=accepted)])
        self._pump(session)

    def _frames(self, submit: Submit, frames: list[dict[str, Any]]) -> None:
        kept = [f for f in frames if not self.lose(f)]
        if kept:
            self.context.send_hot(parse_mailbox(submit.reply.subject), FRAMES, kept)

    def release(self, limit: int | None = None) -> None:
        """Let held answers go on, up to `limit` items per choice."""
        for session in list(self.sessions.values()):
            session.answer.hold_at = limit
            self._pump(session)

    def _pump(self, session: Session) -> None:
        answer = session.answer
        while not session.ended:
            items: list[TextItem] = []
            finish: list[tuple[int, str, int]] = []
            for c, texts in enumerate(answer.texts):
                at = session.sent[c]
                limit = min(len(texts), session.acked[c] + session.window)
                if answer.hold_at is not None:
                    limit = min(limit, answer.hold_at)
                if at < limit:
                    items.append(TextItem(c, at, answer.first_id + at, texts[at], None))
                    session.sent[c] += 1
                elif at >= len(texts) and c not in session.finished:
                    reason = answer.reasons[c] if answer.reasons else "stop"
                    finish.append((c, reason, len(texts)))
                    session.finished.add(c)
            terminal: dict[str, Any] | None = None
            if answer.fail_at is not None and session.sent[0] >= answer.fail_at[0]:
                terminal = {"error": answer.fail_at[1].info()}
            elif len(session.finished) == len(answer.texts):
                total = sum(len(t) for t in answer.texts)
                usage = {
                    "prompt_tokens": answer.prompt_tokens,
                    "completion_tokens": total,
                    "cached_tokens": answer.cached_tokens,
                }
                terminal = {"usage": usage}
            if not items and not finish and terminal is None:
                return
            session.ended = terminal is not None
            session.sent_at = self.clock.now()
            out = frame(session.submit.request_id, session.fence, items=items, finish=finish, terminal=terminal)
            self._frames(session.submit, [out])

    def receive_hot(self, kind: str, body: list[Any], sender: Ref | None) -> None:
        """Take acknowledgements."""
        if kind != ACKS:
            return
        for ack in parse_acks(body):
            self.acks.append(ack)
            session = self.sessions.get(ack.request_id)
            if session is None:
                continue
            if ack.status != "ok":
                session.done = True
                del self.sessions[ack.request_id]
                continue
            session.acked = [max(a, n) for a, n in zip(session.acked, ack.next, strict=True)]
            if ack.window > 0:
                session.window = ack.window
            self._pump(session)

    def tick(self) -> None:
        """Repeat what was not acknowledged."""
        for session in list(self.sessions.values()):
            behind = session.acked != session.sent or session.ended
            if behind and self.clock.now() - session.sent_at >= RESEND_S:
                session.sent, session.finished, session.ended = list(session.acked), set(), False
                self._pump(session)


class _Present(Actor):
    """An actor that is merely there."""

    def receive(self, message: Message, sender: Ref | None) -> None:
        """Take nothing."""


class TokenizePresent(_Present):
    kind: ClassVar[str] = "tokenize"


class DetokenizePresent(_Present):
    kind: ClassVar[str] = "detokenize"


class DecodePresent(_Present):
    kind: ClassVar[str] = "decode"


@dataclass(slots=True)
class EdgeSetup:
    """An edge, its peers, and a client that talks to it over a real socket."""

    system: MemorySystem
    edge_node: Node
    edge: EdgeActor
    peer_nodes: list[Node]
    peers: list[ScriptedPeer]
    rest: Node
    url: str
    http: httpx.AsyncClient

    @property
    def peer(self) -> ScriptedPeer:
        """The only peer, or the first."""
        return self.peers[0]

    @property
    def submits(self) -> list[Submit]:
        """What all peers were asked, in no order."""
        return [s for p in self.peers for s in p.submits]

    async def until(self, condition: Callable[[], object], limit_s: float = 5.0) -> None:
        """Wait until `condition()` is true."""
        await self.system.until(condition, limit_s=limit_s)

    async def ready(self) -> None:
        """Wait until the edge is ready."""
        await self.until(lambda: self.edge.not_ready() is None)


@asynccontextmanager
async def edge_setup(
    answer: Answer | Callable[[Submit], Answer] | None = None,
    *,
    peers: int = 1,
    limits: Limits | None = None,
    engines: bool = True,
    max_open: int = 4096,
    max_payload: int = 1_048_576,
    clock: Clock | None = None,
    listen: bool = True,
) -> AsyncIterator[EdgeSetup]:
    """Start an edge on a free port with scripted peers behind it; without `listen` it is called in this process."""
    given = answer if answer is not None else Answer()
    choose = given if callable(given) else (lambda _submit: given)
    async with MemorySystem(clock=clock, max_payload=max_payload) as system:
        edge_node = system.node("edge")
        edge_node.add(
            "edge",
            "edge-0",
            lambda c: EdgeActor(c, models=[MODEL, "alias"], port=0, limits=limits, max_open=max_open, listen=listen),
        )
        peer_nodes = [system.node(f"peer-{i}") for i in range(peers)]
        for i, node in enumerate(peer_nodes):
            node.add("admission", f"admission-{i}", lambda c: ScriptedPeer(c, answer=choose))
        rest = system.node("rest")
        rest.add("tokenize", "tokenize-0", TokenizePresent)
        rest.add("detokenize", "detokenize-0", DetokenizePresent)
        if engines:
            rest.add("decode", "decode-0", DecodePresent)
        await system.start()
        edge = edge_node.actors[0]
        assert isinstance(edge, EdgeActor)
        url = f"http://127.0.0.1:{edge.address[1] if edge.address else 80}"
        found = [a for n in peer_nodes for a in n.actors]
        scripted = [a for a in found if isinstance(a, ScriptedPeer)]
        transport = None if listen else httpx.ASGITransport(edge.app)
        async with httpx.AsyncClient(base_url=url, timeout=20.0, transport=transport) as http:
            setup = EdgeSetup(system, edge_node, edge, peer_nodes, scripted, rest, url, http)
            if peers and engines:
                await setup.ready()
                await setup.until(lambda: len(edge.context.membership.members("admission")) == peers)
            yield setup


def chat(**extra: Any) -> dict[str, Any]:
    """A small chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **extra}


def completion(**extra: Any) -> dict[str, Any]:
    """A small completion request."""
    return {"model": MODEL, "prompt": "hi", **extra}


class Reading:
    """A streamed request in the background: what has come so far can be looked at while it goes on."""

    def __init__(self, setup: EdgeSetup, path: str, body: dict[str, Any]) -> None:
        self.status = 0
        self.text = ""
        self._setup = setup
        self._task = asyncio.create_task(self._run(path, body))

    async def _run(self, path: str, body: dict[str, Any]) -> None:
        async with self._setup.http.stream("POST", path, json=body) as response:
            self.status = response.status_code
            async for part in response.aiter_text():
                self.text += part

    @property
    def num_events(self) -> int:
        """Events so far."""
        return self.text.count("data: ")

    async def end(self) -> str:
        """Wait for the end and return all of it."""
        async with asyncio.timeout(20.0):
            await self._task
        return self.text

    async def leave(self) -> None:
        """Close the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
