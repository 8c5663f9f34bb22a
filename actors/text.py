"""Ids to text, one choice at a time: a pure function of the ids, whatever messages carried them.

Bytes that are not yet a character wait for the next token. Text that may become a stop string waits too, and never
longer than the longest stop prefix that it really ends with. Of several stop strings the one that is complete first
wins, character by character, so that token borders do not matter; of those complete at once, the longest.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, field

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class TextRules:
    """What one request asks of its text; stop strings are not looked for in its first `min_tokens` tokens."""

    stop: tuple[str, ...]
    max_tokens: int
    ignore_eos: bool
    eos_ids: frozenset[int]
    min_tokens: int = 0


@dataclass(slots=True)
class ChoiceText:
    """The text of one choice so far."""

    rules: TextRules
    token_bytes: TokenBytes
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    _held: str = ""
    _cut: bool = False  # a stop string was found: what follows it is gone
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that it releases; sets `finish_reason` when it is the last.

        An end-of-text id releases what was held; a completed stop string ends the text before it.
        """
        assert self.finish_reason is None, "the choice has finished"
        self.ids.append(token_id)
        if token_id in self.rules.eos_ids and not self.rules.ignore_eos:
            self.finish_reason = "stop"
            return self._flush()
        fresh = self._decoder.decode(self.token_bytes(token_id))
        text = self._take(fresh)
        if self.finish_reason is None and len(self.ids) >= self.rules.max_tokens:
            self.finish_reason = "length"
            tail = self._flush()
            return text + tail
        return text

    def _flush(self) -> str:
        text = self._take(self._decoder.decode(b"", final=True))
        if not self._cut:
            text, self._held = text + self._held, ""
        return text

    def _take(self, fresh: str) -> str:
        if not self.rules.stop or len(self.ids) <= self.rules.min_tokens:
            return fresh
        if not fresh:
            return ""
        text = self._held + fresh
        hit = first_stop(text, len(self._held), self.rules.stop)
        if hit is not None:
            self.finish_reason, self._cut, self._held = "stop", True, ""
            return text[:hit]
        keep = live_prefix(text, self.rules.stop)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text


def first_stop(text: str, searched: int, stops: tuple[str, ...]) -> int | None:
    """Return where the text must end, or None: the start of the stop string that is complete first.

    Args:
        searched: characters at the head in which no stop string is complete.
    """
    best: tuple[int, int] | None = None
    for stop in stops:
        at = text.find(stop, max(0, searched - len(stop) + 1))
        if at >= 0:
            key = (at + len(stop), at)
            best = key if best is None else min(best, key)
    return None if best is None else best[1]


def live_prefix(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest tail of `text` that is a proper prefix of some stop string."""
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
