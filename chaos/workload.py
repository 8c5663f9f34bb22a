"""The requests that run while something breaks: greedy and seeded, streamed and not, over HTTP and over NATS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

SUBJECTS = (
    "a lighthouse keeper who counts ships", "the history of a small bridge", "how bread rises", "a letter to a river",
    "why leaves turn red", "a train that is always late", "the rules of an invented game", "a market on a rainy day",
)
# Of a prompt with this the scripted engine of a private instance dies, after a few tokens.
POISON = "chaos: no engine survives this"
FILLER = "The committee met again and wrote down what each of the members had seen along the river that week. "


@dataclass(frozen=True, slots=True)
class Load:
    """One request of the workload; `key` names it, and equal keys are equal requests."""

    key: str
    client: Literal["http", "native"]
    body: dict[str, Any]
    api: Literal["chat", "completion"] = "chat"
    stops: bool = False  # its stop string is cut out of what an undisturbed run without one says
    items: int = 0  # how many there are, once an undisturbed run has shown it

    @property
    def total(self) -> int:
        """Tokens per choice: the requests ignore the end-of-text token, so that each runs to its limit."""
        return self.items or int(self.body["max_tokens"])

    def stopped_by(self, text: str) -> Load:
        """Return the request with a long stop string from the middle of this text: a fault may well cut it in two."""
        middle = len(text) // 2
        return replace(self, body={**self.body, "stop": [text[middle - len(text) // 8 : middle + len(text) // 8]]})


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


def completion(model: str, text: str, tokens: int, *, seed: int | None, stream: bool) -> dict[str, Any]:
    """Return one body of the text completions; greedy without a seed."""
    body = chat(model, "", tokens, seed=seed, stream=stream)
    del body["messages"]
    return {**body, "prompt": text}


def _mixed(model: str, tokens: int) -> list[Load]:
    return streams(model, 4, tokens)


def _http(model: str, tokens: int) -> list[Load]:
    return [replace(load, key=f"http-{load.key}", client="http") for load in streams(model, 4, tokens)]


def _choices(model: str, tokens: int) -> list[Load]:
    loads = streams(model, 4, tokens)
    return [
        replace(load, key=f"choices-{load.key}", body={**load.body, "n": n})
        for load, n in zip(loads, (3, 2, 3, 2), strict=True)
    ]


def _stops(model: str, tokens: int) -> list[Load]:
    return [replace(load, key=f"stops-{load.key}", stops=True) for load in streams(model, 3, 2 * tokens)]


def _completions(model: str, tokens: int) -> list[Load]:
    out = []
    for load in streams(model, 4, tokens):
        body = completion(model, str(load.body["messages"][0]["content"]), tokens, seed=load.body.get("seed"),
                          stream=bool(load.body["stream"]))  # fmt: skip
        out.append(replace(load, key=f"completion-{load.key}", body=body, api="completion"))
    return out


def _repeats(model: str, tokens: int) -> list[Load]:
    """Return requests whose answers repeat their prompts, so that guessed ids are accepted."""
    out = []
    for load in streams(model, 4, tokens):
        text = f"Copy this text again and again, word by word: {FILLER * 2}"
        body = {**load.body, "messages": [{"role": "user", "content": text}]}
        out.append(replace(load, key=f"repeats-{load.key}", body=body))
    return out


LOADS: dict[str, Callable[[str, int], list[Load]]] = {
    "mixed": _mixed,
    "http": _http,
    "choices": _choices,
    "stops": _stops,
    "completions": _completions,
    "repeats": _repeats,
}
