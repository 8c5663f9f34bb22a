"""The traffic of a soak: two tenants whose conversations grow, and documents that nobody asks for again. Pure.

A request is a function of its name, so its text is one too: equal names get equal answers, of whichever tenant, with or
without a store. What is asked, in which order and by whom follows from the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.questions import long_text
from chaos.gremlin import draw

TENANTS = ("north", "south")
TENANT_HEADER = "X-Tenant"
TURNS = 5
TURN_TOKENS, REPLY_TOKENS = 90, 100  # of a user's turn, and of the reply to it that later turns resend
TALK_TOKENS = TURNS * TURN_TOKENS + (TURNS - 1) * REPLY_TOKENS
DOCUMENT_TOKENS = 700
OUTPUT_TOKENS = 12
APART = 100  # numbers of texts of one conversation
FIRST_DOCUMENT = 1_000_000
DOCUMENTS, AGAIN, LEFT = 0.14, 0.18, 0.2  # shares: documents, turns out of their order, streams that are given up
LEAVE_AFTER = 3  # texts
RECENT = 4  # conversations that a tenant comes back to: some are in host memory, some only on the disk


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        key: equal keys are equal requests.
        chain: what its prompt begins with; prompts of two chains have no block in common.
        body: of the chat.
        choices: how many texts it has.
    """

    key: str
    chain: str
    body: Mapping[str, Any]
    choices: int

    @property
    def stream(self) -> bool:
        """Whether the answer is streamed."""
        return bool(self.body["stream"])


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, for whom, and whether its client leaves in the middle."""

    request: Request
    tenant: str
    leaves: bool


def _request(model: str, key: str, chain: str, messages: list[dict[str, str]], number: int) -> Request:
    """Give a request its kind: greedy or seeded, one or two choices, streamed or whole."""
    seeded, choices = number % 3 == 1, 2 if number % 4 == 1 else 1
    body: dict[str, Any] = {
        "model": model, "messages": messages, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True,
        "n": choices, "stream": number % 5 not in (2, 4),
    }  # fmt: skip
    # Without a seed the choices of one request would all be the same greedy text.
    drawn = seeded or choices > 1
    body |= {"temperature": 0.8, "top_p": 0.95, "seed": number} if drawn else {"temperature": 0.0}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return Request(key, chain, body, choices)


def turn(model: str, talk: int, number: int) -> Request:
    """Return the turn of a conversation: all before it is sent again."""
    texts = [long_text(talk * APART + at, REPLY_TOKENS if at % 2 else TURN_TOKENS) for at in range(2 * number + 1)]
    messages = [{"role": "system", "content": f"{talk} is the number of your desk. Be brief."}]
    messages += [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]
    return _request(model, f"talk-{talk}.{number}", f"talk-{talk}", messages, talk + 2 * number)


def document(model: str, number: int) -> Request:
    """Return a question about a long document."""
    messages = [{"role": "system", "content": f"{FIRST_DOCUMENT + number} is the file. Be brief."}]
    messages.append({"role": "user", "content": long_text(FIRST_DOCUMENT + number, DOCUMENT_TOKENS)})
    return _request(model, f"document-{number}", f"document-{number}", messages, number)


@dataclass(slots=True)
class Traffic:
    """What each of several workers asks next; the tenants take turns among the workers.

    Both have the same conversations and the same documents: each one's first request for them must find nothing of the
    other's.
    """

    model: str
    seed: int
    talks: int
    _turns: dict[int, int] = field(default_factory=dict)  # how many requests a worker has made
    _talk: dict[int, tuple[int, int]] = field(default_factory=dict)  # its conversation and the next turn
    _documents: dict[str, int] = field(default_factory=dict)
    _recent: dict[str, list[int]] = field(default_factory=dict)  # a tenant's last conversations

    def next(self, worker: int) -> Sent:
        """Return a worker's next request."""
        at = self._turns.get(worker, 0)
        self._turns[worker] = at + 1
        tenant = TENANTS[worker % len(TENANTS)]
        kind = self._draw(worker, at, "kind")
        if kind < DOCUMENTS:
            number = self._documents.get(tenant, 0)
            self._documents[tenant] = number + 1
            request = document(self.model, number)
        elif kind < DOCUMENTS + AGAIN and (recent := self._recent.get(tenant)):
            talk = recent[int(self._draw(worker, at, "talk") * len(recent))]
            request = turn(self.model, talk, int(self._draw(worker, at, "turn") * TURNS))
        else:
            talk, number = self._talk.get(worker, (0, TURNS))
            if number == TURNS:
                talk, number = int(self._draw(worker, at, "next") * self.talks), 0
                self._recent[tenant] = [*self._recent.get(tenant, ()), talk][-RECENT:]
            self._talk[worker] = (talk, number + 1)
            request = turn(self.model, talk, number)
        return Sent(request, tenant, request.stream and self._draw(worker, at, "leave") < LEFT)

    def _draw(self, worker: int, at: int, what: str) -> float:
        return draw(self.seed, worker, at, what)


def working_set(talks: int) -> int:
    """Return about how many tokens the conversations of all tenants have; documents come on top of it."""
    return len(TENANTS) * talks * TALK_TOKENS


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got. Texts are by choice; of one that left they are the beginning."""

    sent: Sent
    texts: tuple[str, ...]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first: bool = False  # nobody of this tenant had asked for anything of this chain before
    crossed: bool = False  # and the other tenant's had been answered by then
    error: str = ""


def problems(answers: Sequence[Answer], references: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return what is wrong with answers: failures, texts that differ, and what a tenant got of the other one's."""
    out = []
    for answer in answers:
        sent, name = answer.sent, f"{answer.sent.request.key} of {answer.sent.tenant}"
        wanted = references.get(sent.request.key)
        if answer.error:
            out.append(f"{name} failed: {answer.error}")
        elif wanted is None:
            out.append(f"{name} has no reference")
        elif not same(answer, wanted):
            out.append(f"{name} differs: {answer.texts} instead of {wanted}")
        if answer.first and answer.cached_tokens:
            out.append(f"{name} found {answer.cached_tokens} tokens that its tenant had never sent")
    return out


def same(answer: Answer, wanted: Sequence[str]) -> bool:
    """Whether the texts are the right ones; a client that left has the beginning of them."""
    if len(answer.texts) != len(wanted):
        return False
    if answer.sent.leaves:
        return all(whole.startswith(part) for part, whole in zip(answer.texts, wanted, strict=True))
    return answer.texts == tuple(wanted)
