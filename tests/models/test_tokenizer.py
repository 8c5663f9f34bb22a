"""Text to ids and ids to bytes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from models.gguf import GgufFile
from models.gguf_tokenizer import read_gguf_tokenizer
from models.text import ModelText, load_text
from models.tokenizer import MAX_PIECES, ModelTokenizer
from tests.models.files import ROOT, tiny_model

sys.path.insert(0, str(ROOT))

from scripts.make_token_golden import GOLDEN, golden_lines


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> ModelTokenizer:
    """The tiny model's tokenizer: bytes and a few merges."""
    with GgufFile(tiny) as file:
        return read_gguf_tokenizer(file)


@pytest.mark.slow
def test_ids_equal_those_of_llama_cpp_on_2000_lines(smol_text: ModelText) -> None:
    """English, code, digits, CJK, emoji and control characters; the lines are those that the script makes."""
    golden = json.loads(gzip.decompress(GOLDEN.read_bytes()))

    unequal = [
        line
        for line, ids in zip(golden["lines"], golden["ids"], strict=True)
        if smol_text.tokenizer.encode(line) != ids
    ]

    assert golden["lines"] == golden_lines()
    assert len(golden["lines"]) == 2000
    assert unequal == []


def test_merges_are_applied(tokenizer: ModelTokenizer) -> None:
    """A word that merges to one token is one, and bytes come back."""
    ids = tokenizer.encode("hello hell")

    assert [tokenizer.token_bytes(i) for i in ids] == [b"hello", b" ", b"hell"]


def test_every_text_comes_back_from_its_bytes(tokenizer: ModelTokenizer) -> None:
    """With a vocabulary of all bytes, decoding inverts encoding."""
    for text in ("", "a", "äöü 漢字 👩‍🚀", "\x00\x7f\u2028\r\n\t  ", "x" * 1000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_texts_become_control_tokens_only_where_asked_for(tokenizer: ModelTokenizer) -> None:
    """With `parse_special=False` the same text is ordinary bytes; user-defined tokens are text in both."""
    text = "a<|im_end|>b<think>"

    plain, parsed = tokenizer.encode(text), tokenizer.encode(text, parse_special=True)

    assert not tokenizer.control_ids & set(plain)
    assert b"".join(map(tokenizer.token_bytes, plain)) == text.encode()
    assert parsed == [*tokenizer.encode("a"), 2, *tokenizer.encode("b"), 3]
    assert plain[-1] == 3


def test_control_tokens_and_foreign_ids_show_no_bytes(tokenizer: ModelTokenizer) -> None:
    """End of turn is invisible; an id outside the vocabulary is nothing, not an error."""
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_raw_prompt_begins_with_one_bos_where_the_model_wants_one(add_bos: bool, tmp_path: Path) -> None:
    """Also where the prompt itself spells it."""
    text = load_text(tiny_model(tmp_path / "m.gguf", add_bos=add_bos))

    assert text.text_ids("hello").count(0) == int(add_bos)
    assert text.text_ids("<|endoftext|>hello").count(0) == 1
    assert text.text_ids("") == ([0] if add_bos else [])


def test_the_text_side_never_imports_torch() -> None:
    """Tokenizer and template run in nodes without an engine."""
    code = "import sys, models.text; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


def test_a_remembered_text_gives_the_same_ids_in_a_list_of_its_own(tokenizer: ModelTokenizer) -> None:
    """A caller that changes its ids changes nobody else's."""
    for special in (False, True):
        wanted = tokenizer.encode("hello hell", special)
        first = tokenizer.encode("hello hell", special, remember=True)
        first.append(0)
        assert tokenizer.encode("hello hell", special, remember=True) == wanted


def test_what_is_remembered_is_bounded(tokenizer: ModelTokenizer) -> None:
    """The least recently used goes."""
    for number in range(3 * MAX_PIECES):
        tokenizer.encode(f"text {number}", remember=True)
    assert tokenizer._remembered.cache_info().currsize == MAX_PIECES
