"""Which stored prefixes are found again and again: a bounded table by the first block of each chain. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_PREFIXES = 256


@dataclass(slots=True)
class Prefix:
    """A prefix as lookups found it: the hash of its first block, whose it is, the most tokens that one lookup found."""

    head: bytes
    owner: bytes
    tokens: int
    hits: int
    last: float  # seconds on the caller's clock


class Popular:
    """Counts lookups that found something. When full, the prefix that was found longest ago is forgotten."""

    def __init__(self, most: int = MAX_PREFIXES) -> None:
        """Start empty."""
        self._most = most
        self._found: OrderedDict[bytes, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def hit(self, head: bytes, owner: bytes, tokens: int, now: float) -> None:
        """A lookup found a prefix of so many tokens that begins with this block."""
        known = self._found.get(head)
        if known is None:
            if len(self._found) >= self._most:
                self._found.popitem(last=False)
            self._found[head] = Prefix(head, owner, tokens, 1, now)
            return
        known.hits, known.last, known.tokens = known.hits + 1, now, max(known.tokens, tokens)
        self._found.move_to_end(head)

    def top(self, count: int) -> list[Prefix]:
        """Return those with the most hits, and of equal ones the latest."""
        return sorted(self._found.values(), key=lambda prefix: (-prefix.hits, -prefix.last))[:count]
