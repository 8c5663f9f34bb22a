"""The requests that run while something breaks: greedy and seeded, streamed and not, over HTTP and over NATS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SUBJECTS = (
    "a lighthouse keeper who counts ships", "the history of a small bridge", "how bread rises", "a letter to a river",
    "why leaves turn red", "a train that is always late", "the rules of an invented game", "a market on a rainy day",
)
FILLER = "The committee met again and wrote down what each of the members had seen along the river that week. "


@dataclass(frozen=True, slots=True)
class Load:
    """One request of the workload; `key` names it, and equal keys are equal requests."""

    key: str
    client: Literal["http", "native"]
    body: dict[str, Any]

    @property
    def total(self) -> int:
        """Tokens per choice: the requests ignore the end-of-text token, so that each runs to its limit."""
        return int(self.body["max_tokens"])


def chat(model: str, text: str, tokens: int, *, seed: int | None, stream: bool) -> dict[str, Any]:
    """Return one chat body; greedy without a seed."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    body |= {"temperature": 0.0} if seed is None else {"temperature": 0.8, "top_p": 0.95, "seed": seed}
    return body


def streams(model: str, count: int, tokens: int) -> list[Load]:
    """Return `count` different requests: by turns native greedy, HTTP streamed, native seeded, HTTP whole."""
    out = []
    for at in range(count):
        text = f"Write at length about {SUBJECTS[at % len(SUBJECTS)]}, part {at // len(SUBJECTS) + 1}."
        client: Literal["http", "native"] = "native" if at % 2 == 0 else "http"
        seeded, stream = at % 4 in (1, 2), at % 4 != 3
        body = chat(model, text, tokens, seed=1000 + at if seeded else None, stream=stream)
        out.append(Load(f"stream-{at}-{client}-{'seeded' if seeded else 'greedy'}", client, body))
    return out


def long_prompts(model: str, count: int, *, words: int, tokens: int = 8, first: int = 0) -> list[Load]:
    """Return requests whose prompts take long to compute; each begins differently, so that none is in a cache."""
    out = []
    for at in range(first, first + count):
        text = f"Report number {at}. " + FILLER * max(1, words // 20) + "Sum it up."
        out.append(Load(f"long-{at}", "native", chat(model, text, tokens, seed=None, stream=True)))
    return out
