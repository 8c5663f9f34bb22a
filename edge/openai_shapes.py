"""What a request's answer looks like on the wire: chunks of a stream, and the whole object. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from edge.inflight import Delta, Finish, Usage

PREFIX: dict[str, str] = {"chat": "chatcmpl-", "completion": "cmpl-"}
CHUNK_OBJECT: dict[str, str] = {"chat": "chat.completion.chunk", "completion": "text_completion"}
WHOLE_OBJECT: dict[str, str] = {"chat": "chat.completion", "completion": "text_completion"}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@dataclass(slots=True)
class Shape:
    """Builds the objects of one answer, all with one id, creation time and model."""

    api: Literal["chat", "completion"]
    request_id: str
    created: int
    model: str
    _opened: set[int] = field(default_factory=set)  # choices that have shown their role

    def _base(self, kind: dict[str, str], choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": PREFIX[self.api] + self.request_id,
            "object": kind[self.api],
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def chunks(self, events: list[Delta | Finish]) -> list[dict[str, Any]]:
        """Return the chunks for new events: none for a delta without text, one per finished choice."""
        out = []
        for event in events:
            if isinstance(event, Delta):
                if event.text:
                    out.append(self._base(CHUNK_OBJECT, [self._delta(event.choice, event.text, None)]))
                continue
            if self.api == "chat" and event.choice not in self._opened:
                # A choice without any text still says whose it is.
                out.append(self._base(CHUNK_OBJECT, [self._delta(event.choice, "", None)]))
            out.append(self._base(CHUNK_OBJECT, [self._delta(event.choice, None, event.reason)]))
        return out

    def _delta(self, choice: int, text: str | None, reason: str | None) -> dict[str, Any]:
        if self.api == "completion":
            return {"index": choice, "text": text or "", "logprobs": None, "finish_reason": reason}
        delta: dict[str, Any] = {}
        if choice not in self._opened:
            self._opened.add(choice)
            delta["role"] = "assistant"
        if text is not None:
            delta["content"] = text
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last chunk of a stream that asked for usage."""
        return {**self._base(CHUNK_OBJECT, []), "usage": usage_object(usage)}

    def whole(self, texts: list[str], reasons: list[str], usage: Usage) -> dict[str, Any]:
        """Return the answer as one object."""
        choices: list[dict[str, Any]] = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            if self.api == "chat":
                message = {"role": "assistant", "content": text, "refusal": None}
                choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": reason})
            else:
                choices.append({"index": index, "text": text, "logprobs": None, "finish_reason": reason})
        return {**self._base(WHOLE_OBJECT, choices), "usage": usage_object(usage)}
