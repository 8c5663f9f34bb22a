"""The tokenizer of a GGUF file, from its metadata. Never imports torch."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from models.errors import ModelFileError
from models.gguf import GgufFile
from models.tokenizer import ModelTokenizer, Vocabulary, shown_bytes

_CONTROL, _USER_DEFINED = 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|\p{N}" + _REST
# Splits that come before byte-pair merging, by `tokenizer.ggml.pre`; each applies to the pieces of the one before.
_SPLITS: dict[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
}
_MERGES_IGNORED = {"llama-bpe", "llama3"}  # a piece that is a token as a whole is not merged step by step
_COMPOSED = {"qwen2", "deepseek-r1-qwen"}  # text is brought to Unicode's form NFC first, as the models were trained
_ANY_ID = re.compile(r"tokenizer\.ggml\.[a-z_]+_token_id")


def read_gguf_tokenizer(file: GgufFile) -> ModelTokenizer:
    """Build the tokenizer.

    Raises:
        ModelFileError: the vocabulary is missing or inconsistent, or of a kind that is not supported.
    """
    meta = file.metadata
    kind = meta.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelFileError(file.path, f"tokenizer model {kind!r:.80} is not supported; 'gpt2' is")
    pre = meta.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _SPLITS:
        raise ModelFileError(file.path, f"pre-tokenizer {pre!r:.80} is not supported; {', '.join(_SPLITS)} are")
    tokens = _texts(file, "tokenizer.ggml.tokens")
    merges = _texts(file, "tokenizer.ggml.merges")
    types = _beside_tokens(file, "tokenizer.ggml.token_type", len(tokens)) or [1] * len(tokens)
    _beside_tokens(file, "tokenizer.ggml.scores", len(tokens))
    for key in filter(_ANY_ID.fullmatch, meta):
        _id(file, key, len(tokens))
    bos, eos, eot, eom = (_id(file, f"tokenizer.ggml.{n}_token_id", len(tokens)) for n in ("bos", "eos", "eot", "eom"))
    add_bos = meta.get("tokenizer.ggml.add_bos_token", False) is True
    if add_bos and bos is None:
        raise ModelFileError(file.path, "metadata wants a beginning-of-text token but names none")
    control = {i: tokens[i] for i, t in enumerate(types) if t == _CONTROL}
    user_defined = {i: tokens[i] for i, t in enumerate(types) if t == _USER_DEFINED}
    shown = shown_bytes(tokens)
    for i in control:
        shown[i] = b""
    for i, text in user_defined.items():
        shown[i] = text.encode("utf-8", "surrogateescape")
    return ModelTokenizer(
        Vocabulary(
            tokens=shown,
            control=control,
            user_defined=user_defined,
            bos_id=bos,
            eos_id=eos,
            eos_ids=frozenset(i for i in (eos, eot, eom) if i is not None),
            add_bos=add_bos,
            core=_core(file, tokens, merges, control, pre),
            unknown_id=len(tokens),
        )
    )


def _texts(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelFileError(file.path, f"metadata {key!r} is missing or no list of texts")
    return value


def _beside_tokens(file: GgufFile, key: str, num_tokens: int) -> list[Any] | None:
    """Return a list with one value per token, or None where the file has none of this name."""
    value = file.metadata.get(key)
    if value is not None and (not isinstance(value, list) or len(value) != num_tokens):
        raise ModelFileError(file.path, f"metadata {key!r} does not match the vocabulary of {num_tokens} tokens")
    return value


def _id(file: GgufFile, key: str, num_tokens: int) -> int | None:
    value = file.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
        raise ModelFileError(file.path, f"metadata {key!r} is {value!r:.80}, outside the vocabulary of {num_tokens}")
    return value


def _core(file: GgufFile, tokens: list[str], merges: list[str], control: dict[int, str], pre: str) -> Tokenizer:
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    # Bytes without a token (this happens for some control characters) are left out, as in llama.cpp; until then
    # a token of ours stands for them, or their neighbours would merge across the gap.
    unknown = "\ue000unknown"
    vocab = {text: i for i, text in enumerate(tokens)} | {unknown: len(tokens)}
    if pre in _MERGES_IGNORED:
        # A piece that is a whole token gets its id: text that people wrote must not find a control token so.
        parts = {part for pair in pairs for part in (*pair, "".join(pair))}
        vocab = {text: i for text, i in vocab.items() if i not in control or text in parts}
    try:
        bpe = models.BPE(vocab=vocab, merges=pairs, unk_token=unknown, ignore_merges=pre in _MERGES_IGNORED)
        core = Tokenizer(bpe)
    except Exception as error:  # the library raises bare exceptions
        raise ModelFileError(file.path, f"the vocabulary and its merges do not fit: {error!s:.200}") from error
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    if pre in _COMPOSED:
        core.normalizer = normalizers.NFC()
    return core
