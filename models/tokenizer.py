"""Text to ids and ids to bytes, built from the metadata of a GGUF file. Never imports torch.

Control tokens (end of turn, beginning of text, …) are recognized in a text only where the caller says so; text that
people wrote is encoded with `parse_special=False` and can spell no control token. Tokens that the file calls
user-defined are ordinary text with an id of their own and are always recognized.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from models.errors import ModelFileError
from models.gguf import GgufFile

_CONTROL, _USER_DEFINED = 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Splits that come before byte-pair merging, by `tokenizer.ggml.pre`; each applies to the pieces of the one before.
_SPLITS: dict[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
}
_MERGES_IGNORED = {"llama-bpe", "llama3"}  # a piece that is a token as a whole is not merged step by step


def _byte_alphabet() -> dict[str, int]:
    """Return the printable stand-in of each byte in byte-level vocabularies, and the byte it stands for."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


class ModelTokenizer:
    """Encodes text and gives the bytes of each token. Safe to use from several threads."""

    def __init__(self, file: GgufFile) -> None:
        """Build from metadata.

        Raises:
            ModelFileError: the vocabulary is missing or inconsistent, or of a kind that is not supported.
        """
        self._file_path = file.path
        meta = file.metadata
        kind = meta.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ModelFileError(file.path, f"tokenizer model {kind!r} is not supported; 'gpt2' is")
        pre = meta.get("tokenizer.ggml.pre", "gpt-2")
        if pre not in _SPLITS:
            raise ModelFileError(file.path, f"pre-tokenizer {pre!r} is not supported; {', '.join(_SPLITS)} are")
        tokens = self._texts(meta, "tokenizer.ggml.tokens")
        merges = self._texts(meta, "tokenizer.ggml.merges")
        types = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
        if not isinstance(types, list) or len(types) != len(tokens):
            raise ModelFileError(file.path, "metadata 'tokenizer.ggml.token_type' does not match the vocabulary")
        self.vocab_size = len(tokens)
        self.control_ids = frozenset(i for i, t in enumerate(types) if t == _CONTROL)
        self.bos_id = self._id(meta, "bos")
        self.eos_id = self._id(meta, "eos")
        self.eot_id = self._id(meta, "eot")
        self.eos_ids = frozenset(i for i in (self.eos_id, self.eot_id, self._id(meta, "eom")) if i is not None)
        self.add_bos = meta.get("tokenizer.ggml.add_bos_token", False) is True
        if self.add_bos and self.bos_id is None:
            raise ModelFileError(file.path, "metadata wants a beginning-of-text token but names none")
        self.special_texts = {i: tokens[i] for i in self.control_ids if tokens[i]}
        user_defined = {i: tokens[i] for i, t in enumerate(types) if t == _USER_DEFINED and tokens[i]}
        self._ids = {text: i for i, text in (user_defined | self.special_texts).items()}
        self._with_control = _alternatives(self._ids)
        self._without_control = _alternatives(user_defined.values())
        self._bytes = self._byte_table(tokens, types)
        self._core = self._build(tokens, merges, pre)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Return the ids of a text, without any token put before it.

        Args:
            parse_special: recognize control tokens; False for everything that people wrote.
        """
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
        return [i for i in ids if i != self.vocab_size]  # bytes that the vocabulary lacks; see `_build`

    def _texts(self, meta: dict[str, Any], key: str) -> list[str]:
        value = meta.get(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise ModelFileError(self._file_path, f"metadata {key!r} is missing or no list of texts")
        return value

    def _id(self, meta: dict[str, Any], name: str) -> int | None:
        value = meta.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < self.vocab_size:
            raise ModelFileError(
                self._file_path, f"metadata 'tokenizer.ggml.{name}_token_id' is {value!r:.80}, outside the vocabulary"
            )
        return value

    def _byte_table(self, tokens: list[str], types: list[Any]) -> list[bytes]:
        alphabet = _byte_alphabet()
        table = []
        for text, kind in zip(tokens, types, strict=True):
            if kind == _CONTROL:
                table.append(b"")
            elif kind == _USER_DEFINED or any(c not in alphabet for c in text):
                table.append(text.encode("utf-8", "surrogateescape"))
            else:
                table.append(bytes(alphabet[c] for c in text))
        return table

    def _build(self, tokens: list[str], merges: list[str], pre: str) -> Tokenizer:
        pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
        # Bytes without a token (this happens for some control characters) are left out, as in llama.cpp; until then
        # a token of ours stands for them, or their neighbours would merge across the gap.
        unknown = "\ue000unknown"
        vocab = {text: i for i, text in enumerate(tokens)} | {unknown: self.vocab_size}
        try:
            bpe = models.BPE(vocab=vocab, merges=pairs, unk_token=unknown, ignore_merges=pre in _MERGES_IGNORED)
            core = Tokenizer(bpe)
        except Exception as error:  # the library raises bare exceptions
            raise ModelFileError(self._file_path, f"the vocabulary and its merges do not fit: {error}") from error
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        return core


def _alternatives(texts: Any) -> re.Pattern[str] | None:
    """Return a pattern that captures any of the texts, the longest first."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None
