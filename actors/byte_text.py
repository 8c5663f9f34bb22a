"""Text for engines without a model: token id `b` below 256 is the byte `b`. For the scripted and null engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

EOS = 2  # a control character that no text needs


class ByteText:
    """Both sides of the text hop, for `actors.tokenize` and `actors.detokenize`."""

    vocab_size = 49_152

    def __init__(self, eos_ids: Iterable[int] = (EOS,)) -> None:
        self._eos = frozenset(eos_ids)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        return self._eos

    def chat_ids(self, messages: list[Mapping[str, Any]], *, created: int | None = None) -> list[int]:
        """Render messages as lines of `role: content`, then the assistant's turn."""
        lines = [f"{m.get('role')}: {_plain(m.get('content'))}\n" for m in messages]
        return self.text_ids("".join(lines) + "assistant: ")

    def text_ids(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text."""
        return list(text.encode("utf-8", "replace"))

    def visible_bytes(self, token_id: int) -> bytes:
        """Return the byte of an id; ids from 256 on show as `<id>`, those that end a text not at all."""
        if token_id in self._eos:
            return b""
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return ""
