"""Text to ids and ids to bytes, for byte-level vocabularies of any file format. Never imports torch.

Control tokens (end of turn, beginning of text, …) are recognized in a text only where the caller says so; text that
people wrote is encoded with `parse_special=False` and can spell no control token. User-defined tokens are ordinary
text with an id of their own and are always recognized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Tokenizer

MAX_PIECES = 256  # the least recently used goes


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer is made of. Readers of file formats fill it in."""

    tokens: Sequence[bytes]  # what each id shows; nothing for control tokens
    control: Mapping[int, str]  # ids of control tokens, and how they are spelled
    user_defined: Mapping[int, str]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]  # all that end a text
    add_bos: bool  # a prompt begins with `bos_id`
    core: Tokenizer  # encodes text in which no token of the two kinds above stands; it knows none of them
    unknown_id: int | None = None  # what the core gives for bytes that no token stands for


class ModelTokenizer:
    """Encodes text and gives the bytes of each token. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Take a vocabulary; see `read_gguf_tokenizer` and `models.hf_tokenizer`."""
        self._bytes = vocabulary.tokens
        self.vocab_size = len(vocabulary.tokens)
        self.control_ids = frozenset(vocabulary.control)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eos_ids = vocabulary.eos_ids
        self.add_bos = vocabulary.add_bos
        self.special_texts = {i: text for i, text in vocabulary.control.items() if text}
        user_defined = {i: text for i, text in vocabulary.user_defined.items() if text}
        self._ids = {text: i for i, text in (user_defined | self.special_texts).items()}
        self._with_control = _alternatives(self._ids)
        self._without_control = _alternatives(user_defined.values())
        self._core = vocabulary.core
        self._unknown_id = vocabulary.unknown_id
        self._remembered = lru_cache(MAX_PIECES)(lambda text, special: tuple(self.encode(text, special)))

    def encode(self, text: str, parse_special: bool = False, *, remember: bool = False) -> list[int]:
        """Return the ids of a text, without any token put before it.

        Args:
            parse_special: recognize control tokens; False for everything that people wrote.
            remember: keep the ids for the next time. For texts that are nobody's alone: how soon an answer comes would
                tell others who wrote what.
        """
        if remember:
            return list(self._remembered(text, parse_special))
        pattern = self._with_control if parse_special else self._without_control
        if pattern is None:
            return self._encode_plain(text)
        ids: list[int] = []
        for number, piece in enumerate(pattern.split(text)):
            if number % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids.extend(self._encode_plain(piece))
        return ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """Return ids with exactly one beginning-of-text token in front if the model wants one."""
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; none for a control token or an id outside the vocabulary."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids if self._unknown_id is None else [i for i in ids if i != self._unknown_id]


def byte_alphabet() -> dict[str, int]:
    """Return the printable stand-in of each byte in byte-level vocabularies, and the byte it stands for."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


def shown_bytes(tokens: Iterable[str]) -> list[bytes]:
    """Return the bytes that tokens of a byte-level vocabulary show; a token with another character is its own text."""
    alphabet = byte_alphabet()
    return [
        bytes(alphabet[c] for c in text)
        if all(c in alphabet for c in text)
        else text.encode("utf-8", "surrogateescape")
        for text in tokens
    ]


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that captures any of the texts, the longest first."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None
