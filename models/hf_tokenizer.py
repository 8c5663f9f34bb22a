"""The tokenizer and chat template of a Hugging Face folder. Never imports torch.

`tokenizer.json` is built by the library that wrote it, but for its added tokens: those we find ourselves, as in GGUF
files, because the library would find control tokens in anything that people write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from models.chat import ChatTemplate
from models.errors import ModelFileError
from models.fields import read_bytes, read_json
from models.text import ModelText
from models.tokenizer import ModelTokenizer, Vocabulary, shown_bytes

_MAX_ID = 1 << 24


def read_tokenizer(folder: Path, eos_ids: frozenset[int]) -> ModelText:
    """Read tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Args:
        eos_ids: ids that end a text, by the model's configuration.

    Raises:
        ModelFileError: a file is missing, corrupt, or of a kind that is not supported.
    """
    path = folder / "tokenizer.json"
    described = read_json(path)
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    model = _byte_level_model(path, described)
    vocab = _vocabulary(path, model.get("vocab"))
    control, user_defined = _added(path, described)
    spelled = {text: i for i, text in control.items()}
    ids = spelled | {text: i for i, text in user_defined.items()}
    bos, eos = (_named(settings_path, settings, key, ids | vocab) for key in ("bos_token", "eos_token"))
    first = _first_of_template(described.get("post_processor"))
    if first is not None and first not in ids:
        raise ModelFileError(path, f"corrupt: the post-processor puts {first!r:.80} first, which is no added token")
    add_bos = first is not None or (settings.get("add_bos_token") is True and bos is not None)
    tokenizer = ModelTokenizer(
        Vocabulary(
            tokens=_shown(vocab, control, user_defined),
            control=control,
            user_defined=user_defined,
            bos_id=bos if first is None else ids[first],
            eos_id=eos,
            eos_ids=eos_ids,
            add_bos=add_bos,
            core=_core(path, described, set(control.values())),
        )
    )
    source, source_path = _template(folder, settings)
    try:
        return ModelText(tokenizer, ChatTemplate(source, tokenizer))
    except jinja2.TemplateSyntaxError as error:
        raise ModelFileError(source_path, f"the chat template cannot be compiled: {error}") from error


def _byte_level_model(path: Path, described: dict[str, Any]) -> dict[str, Any]:
    """Return the model part of a byte-level BPE tokenizer; refuse every other kind."""
    model = described.get("model")
    if not isinstance(model, dict):
        raise ModelFileError(path, "corrupt: 'model' is missing or no object")
    kind = model.get("type", "BPE")
    decoder = described.get("decoder")
    decoders = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = [d.get("type") for d in decoders if isinstance(d, dict)] if isinstance(decoders, list) else []
    if kind != "BPE" or "ByteLevel" not in kinds or model.get("byte_fallback"):
        raise ModelFileError(
            path, f"tokenizer of kind {kind!r:.80} ({kinds!r:.80}) is not supported; byte-level BPE is"
        )
    return model


def _vocabulary(path: Path, vocab: Any) -> dict[str, int]:
    if not isinstance(vocab, dict) or not vocab:
        raise ModelFileError(path, "corrupt: the vocabulary is missing or no object")
    for text, number in vocab.items():
        if type(number) is not int or not 0 <= number < _MAX_ID:
            raise ModelFileError(path, f"corrupt: token {text!r:.80} has the id {number!r:.80}")
    return vocab


def _added(path: Path, described: dict[str, Any]) -> tuple[dict[int, str], dict[int, str]]:
    """Return control tokens and user-defined ones by id."""
    added = described.get("added_tokens") or []
    if not isinstance(added, list):
        raise ModelFileError(path, "corrupt: 'added_tokens' is no list")
    control: dict[int, str] = {}
    user_defined: dict[int, str] = {}
    for token in added:
        number = token.get("id") if isinstance(token, dict) else None
        text = token.get("content") if isinstance(token, dict) else None
        if type(number) is not int or not 0 <= number < _MAX_ID or not isinstance(text, str):
            raise ModelFileError(path, f"corrupt: added token {token!r:.120}")
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise ModelFileError(path, f"added token {text!r:.80} with {flag} is not supported")
        (control if token.get("special") else user_defined)[number] = text
    return control, user_defined


def _named(path: Path, settings: dict[str, Any], key: str, ids: dict[str, int]) -> int | None:
    """Return the id of the token that tokenizer_config.json names under a key."""
    value = settings.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    if not isinstance(text, str) or text not in ids:
        raise ModelFileError(path, f"key {key!r} is {value!r:.80}, not in the vocabulary")
    return ids[text]


def _first_of_template(processor: Any) -> str | None:
    """Return the token that the post-processor puts before a text."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence" and isinstance(processor.get("processors"), list):
        found = (_first_of_template(p) for p in processor["processors"] if not _is_sequence(p))
        return next((text for text in found if text is not None), None)
    single = processor.get("single")
    if processor.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
        token = single[0].get("SpecialToken") if isinstance(single[0], dict) else None
        text = token.get("id") if isinstance(token, dict) else None
        return text if isinstance(text, str) else None
    return None


def _is_sequence(processor: Any) -> bool:
    return isinstance(processor, dict) and processor.get("type") == "Sequence"


def _shown(vocab: dict[str, int], control: dict[int, str], user_defined: dict[int, str]) -> list[bytes]:
    size = max([*vocab.values(), *control, *user_defined]) + 1
    texts = [""] * min(size, len(vocab) + len(control) + len(user_defined) + 4096)
    for text, number in vocab.items():
        if number < len(texts):
            texts[number] = text
    shown = shown_bytes(texts)
    for number, text in user_defined.items():
        if number < len(texts):
            shown[number] = text.encode("utf-8", "surrogatepass")
    for number in control:
        if number < len(texts):
            shown[number] = b""
    return shown


def _core(path: Path, described: dict[str, Any], control: set[str]) -> Tokenizer:
    """Build the tokenizer without its added tokens, and without the means to spell a control token."""
    model = dict(described["model"])
    if model.get("ignore_merges"):
        # A piece that is a whole token gets its id: text that people wrote must not find a control token so.
        model["vocab"] = {text: i for text, i in model["vocab"].items() if text not in control}
    plain = described | {
        "model": model,
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    try:
        return Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises bare exceptions
        raise ModelFileError(path, f"corrupt: {error!s:.200}") from error


def _template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, Path]:
    """Return the chat template and the file it comes from."""
    own = folder / "chat_template.jinja"
    if own.exists():
        try:
            return read_bytes(own).decode("utf-8"), own
        except UnicodeDecodeError as error:
            raise ModelFileError(own, "corrupt: the chat template is not UTF-8") from error
    path = folder / "tokenizer_config.json"
    given = settings.get("chat_template")
    if isinstance(given, list):  # several, by name
        named = [t for t in given if isinstance(t, dict) and t.get("name") == "default"]
        given = named[0].get("template") if named else None
    if given is not None and not isinstance(given, str):
        raise ModelFileError(path, "key 'chat_template' is no text")
    return given, path
