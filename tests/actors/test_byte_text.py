"""Bytes as tokens: what the engines without a model speak."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.byte_text import EOS, ByteText


@given(st.text(alphabet=st.characters(exclude_characters=chr(EOS), exclude_categories=("Cs",))))
def test_a_text_survives_its_bytes(text: str) -> None:
    """Encoding and showing are inverse to each other."""
    tokens = ByteText()

    shown = b"".join(tokens.visible_bytes(i) for i in tokens.text_ids(text)).decode()

    assert shown == text


def test_the_end_shows_nothing() -> None:
    """The id that ends a text has no text."""
    assert ByteText().visible_bytes(EOS) == b""


def test_ids_beyond_the_bytes_show_themselves() -> None:
    """A script may use any id; its output stays readable."""
    assert ByteText().visible_bytes(300) == b"<300>"


def test_a_chat_ends_with_the_assistants_turn() -> None:
    """Text parts are joined, other parts ignored."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]

    assert bytes(ByteText().chat_ids(messages)) == b"user: ab\nassistant: "
