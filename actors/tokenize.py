"""The tokenize hop: chat template and encoding in worker threads. Stateless; any one of them answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Protocol

from runtime.actor import Actor, Context
from schemas import messages as m
from schemas.errors import BadRequest, HeadraceError, InternalError, TooLarge
from schemas.openai import check_context
from schemas.openai_sampling import check_ids
from schemas.subjects import Ref

MAX_QUEUED = 1024
# Characters of a prompt that is encoded on the loop: a part of a millisecond; a thread and back takes longer.
SHORT = 2048


class Encoder(Protocol):
    """What the hop needs of a model's tokenizer and template; called from several threads."""

    def chat_ids(self, messages: list[Mapping[str, Any]], *, created: int | None = None) -> list[int]:
        """Render messages by the chat template, ready for the assistant's turn."""
        ...

    def text_ids(self, text: str) -> list[int]:
        """Encode a raw prompt; control tokens in it count, and one begin-of-text is added where the model wants it."""
        ...

    @property
    def vocab_size(self) -> int: ...


class TokenizeActor(Actor):
    """Encodes prompts; a repeat of a request in progress is not started twice.

    Args:
        load_encoder: called once in a thread; the actor is ready when it returns.
    """

    kind: ClassVar[str] = "tokenize"
    anycast: ClassVar[bool] = True

    def __init__(self, context: Context, *, load_encoder: Callable[[], Encoder], threads: int = 1) -> None:
        super().__init__(context)
        self._load_encoder = load_encoder
        self._encoder: Encoder | None = None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._running: dict[str, m.Tokenize] = {}
        self._dropped = context.telemetry.counter(
            "tokenize_dropped_total", "Prompts that nobody wanted any more when their turn to be encoded came"
        )
        self._seconds = context.telemetry.histogram(
            "tokenize_seconds", "Time to render and encode one request",
            buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.02, 0.1),
        )  # fmt: skip

    async def start(self) -> None:
        """Load the tokenizer."""
        self._encoder = await asyncio.get_running_loop().run_in_executor(self._pool, self._load_encoder)
        self.state = "ready"

    async def stop(self) -> None:
        """End the worker threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def idle(self) -> bool:
        """Whether no answer is owed."""
        return not self._running

    def load(self) -> dict[str, Any]:
        """Requests in the worker threads."""
        return {"running": len(self._running), "waiting": 0, "requests": list(self._running)[:64]}

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        """Start encoding, unless it is told to stop; `Tokenized` follows."""
        if isinstance(message, m.Close):
            running = self._running.get(message.request_id)
            if running is not None and running.fence <= message.fence:
                del self._running[message.request_id]
            return
        if not isinstance(message, m.Tokenize):
            self.context.telemetry.log.warning("unexpected message", type=type(message).__name__)
            return
        if self._encoder is None or len(self._running) >= MAX_QUEUED:
            return  # repeated by the owner, to another member of the group perhaps
        if message.request_id in self._running:
            return
        started, wall = self.clock.now(), self.clock.wall()
        if is_short(message):
            self._answer(message, self._encode(message, self._encoder), started, wall)
            return
        self._running[message.request_id] = message
        self.context.spawn(
            self._encode_elsewhere(message, self._encoder, started, wall), name=f"tokenize {message.request_id}"
        )

    async def _encode_elsewhere(self, msg: m.Tokenize, encoder: Encoder, started: float, wall: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._pool, self._encode_if_wanted, msg, encoder)
        finally:
            wanted = self._running.get(msg.request_id) is msg
            if wanted:
                del self._running[msg.request_id]
        if wanted and found is not None:
            self._answer(msg, found, started, wall)

    def _encode_if_wanted(self, msg: m.Tokenize, encoder: Encoder) -> list[list[int]] | HeadraceError | None:
        """Encode, in a worker thread; nothing for a prompt that was closed or whose time ran out while it waited."""
        late = 0 < msg.deadline < self.clock.wall()
        if late or self._running.get(msg.request_id) is not msg:
            self._dropped.inc()
            return None
        return self._encode(msg, encoder)

    def _encode(self, msg: m.Tokenize, encoder: Encoder) -> list[list[int]] | HeadraceError:
        try:
            return encode(encoder, msg)
        except HeadraceError as exc:
            return exc
        except Exception as exc:  # a fault in one prompt must not take its neighbours along
            self.context.telemetry.log.exception("encoding failed", request_id=msg.request_id)
            return InternalError(f"the prompt could not be encoded ({type(exc).__name__})")

    def _answer(self, msg: m.Tokenize, found: list[list[int]] | HeadraceError, started: float, wall: float) -> None:
        error, prompt_ids = (found, []) if isinstance(found, HeadraceError) else (None, found)
        elapsed = self.clock.now() - started
        self._seconds.observe(elapsed)
        self.context.telemetry.hop("hop.tokenize", msg.traceparent, wall, self.clock.wall(), request_id=msg.request_id)
        answer = m.Tokenized(
            request_id=msg.request_id,
            fence=msg.fence,
            deadline=msg.deadline,
            traceparent=msg.traceparent,
            prompt_ids=prompt_ids,
            error=error.info() if error else None,
            elapsed_s=elapsed,
        )
        try:
            self.context.send(msg.reply, answer)
        except TooLarge as exc:
            self.context.send(msg.reply, answer.model_copy(update={"prompt_ids": [], "error": exc.info()}))


def is_short(msg: m.Tokenize) -> bool:
    """Whether a request is a few short texts and nothing else."""
    if msg.api == "chat":
        texts = [one.get("content") if isinstance(one, dict) else None for one in msg.body["messages"]]
        plain = not msg.body.get("tools")
    else:
        prompt = msg.body["prompt"]
        texts, plain = [prompt] if isinstance(prompt, str) else list(prompt), True
    room = SHORT
    for text in texts:
        if not plain or not isinstance(text, str):
            return False
        room -= len(text) + 16
        if room < 0:
            return False
    return True


def encode(encoder: Encoder, msg: m.Tokenize) -> list[list[int]]:
    """Return a request's prompts as ids.

    Raises:
        BadRequest: if the template refuses the messages, a prompt is empty, an id is out of range, or no `min_tokens`
            are left to answer.
        ContextTooLong: if a prompt, or with `max_tokens`, does not fit.
    """
    check_ids(msg.body.get("named_ids", {}), encoder.vocab_size)
    if msg.api == "chat":
        prompts = [encoder.chat_ids(msg.body["messages"], created=msg.body.get("created"))]
    else:
        prompts = [_raw(encoder, p) for p in _listed(msg.body["prompt"])]
    for number, ids in enumerate(prompts):
        if not ids:
            raise BadRequest(f"prompt {number} is empty", param="prompt")
        if msg.limit:
            left = check_context(len(ids), msg.max_tokens, msg.limit)
            if msg.body.get("min_tokens", 0) > left:
                raise BadRequest(f"min_tokens asks for more than the {left} tokens that are left", param="min_tokens")
    return prompts


def _listed(prompt: Any) -> list[Any]:
    """Return the four forms of `prompt` as a list of texts or id lists."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _raw(encoder: Encoder, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return encoder.text_ids(prompt)
    for token_id in prompt:
        if not 0 <= token_id < encoder.vocab_size:
            raise BadRequest(f"token id {token_id} is outside the vocabulary of {encoder.vocab_size}", param="prompt")
    return list(prompt)
