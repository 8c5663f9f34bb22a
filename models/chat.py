"""Chat templates: messages to ids, in a sandbox, so that no message can forge a control token. Never imports torch.

The template runs over the real messages, except that control-token texts inside them (and beginnings and ends of such
texts at their borders) are replaced by placeholders that nobody can guess. Every control-token text in the rendering is
then the template's own. The rendering is cut there; in the text between, placeholders become their literal text again,
and each such span is encoded as a whole with control tokens off. Without control text in the messages nothing is
replaced, and the ids are those of the rendering encoded at once; filters such as `trim` see the true text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.errors import ModelFileError
from models.gguf import GgufFile
from models.tokenizer import ModelTokenizer
from schemas.errors import BadRequest

Messages = Sequence[dict[str, Any]]


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets in some templates; here it only holds its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The chat template of one model."""

    def __init__(self, source: str | None, tokenizer: ModelTokenizer) -> None:
        """Compile a template; None for a model without one.

        Raises:
            jinja2.TemplateSyntaxError: the template cannot be compiled.
        """
        self._tokenizer = tokenizer
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise
        self._template = env.from_string(source) if source is not None else None
        self._own = (source or "").replace("\\n", "\n")  # as its string literals read when rendered
        control = sorted(tokenizer.special_texts.values(), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, control))) if control else None
        self._borders = _Borders(control)

    @classmethod
    def from_gguf(cls, file: GgufFile, tokenizer: ModelTokenizer) -> ChatTemplate:
        """Read the template from metadata; a model without one refuses chats with a clear error.

        Raises:
            ModelFileError: the template is no text or cannot be compiled.
        """
        source = file.metadata.get("tokenizer.chat_template")
        if source is not None and not isinstance(source, str):
            raise ModelFileError(file.path, "metadata 'tokenizer.chat_template' is no text")
        try:
            return cls(source, tokenizer)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(file.path, f"the chat template cannot be compiled: {error}") from error

    def render_text(
        self, messages: Messages, add_generation_prompt: bool = True, *, created: int | None = None, **kwargs: Any
    ) -> str:
        """Return the rendering as text, as it would be without any protection (for comparisons).

        Args:
            created: Unix seconds that `strftime_now` tells; None for the present.
            kwargs: more variables of the template, such as `tools`.

        Raises:
            BadRequest: the model has no template, or it refuses these messages; the message is the template's.
        """
        if self._template is None:
            raise BadRequest("this model has no chat template; use text completions", param="messages")
        moment = datetime.fromtimestamp(created, UTC) if created is not None else datetime.now(UTC)
        texts = self._tokenizer.special_texts
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "bos_token": texts.get(self._tokenizer.bos_id if self._tokenizer.bos_id is not None else -1, ""),
            "eos_token": texts.get(self._tokenizer.eos_id if self._tokenizer.eos_id is not None else -1, ""),
        } | kwargs
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                strftime_now=moment.strftime,
                **variables,
            )
        except Exception as error:  # whatever a template does with values of the wrong kind is the request's fault
            raise BadRequest(f"the chat template refused the messages: {error}", param="messages") from error

    def render_ids(
        self, messages: Messages, add_generation_prompt: bool = True, *, created: int | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the prompt ids of messages, with one beginning-of-text token where the model wants one.

        Raises:
            BadRequest: as `render_text`.
        """
        shield = _Shield(self._borders, self._control_pattern, repr((messages, kwargs)))
        text = self.render_text(
            shield.cover(list(messages)), add_generation_prompt, created=created, **shield.cover(kwargs)
        )
        ids: list[int] = []
        at = 0
        for match in self._control_pattern.finditer(text) if self._control_pattern else ():
            ids += self._encode(shield.restore(text[at : match.start()]))
            ids += self._tokenizer.encode(match.group(), parse_special=True, remember=True)
            at = match.end()
        ids += self._encode(shield.restore(text[at:]))
        return self._tokenizer.with_bos(ids)

    def _encode(self, piece: str) -> list[int]:
        """Encode what stands between control tokens; what the template itself says is encoded once.

        With cold caches a piece takes a tenth of a millisecond, and a short chat has five of the template's own.
        """
        return self._tokenizer.encode(piece, remember=piece in self._own)


class _Shield:
    """Replaces control-token texts in one call's messages by placeholders, and puts them back."""

    def __init__(self, borders: _Borders, pattern: re.Pattern[str] | None, secret: str) -> None:
        # The placeholder is a hash of all messages: no message can contain its own.
        digest = hashlib.blake2b(secret.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self._open = f"\ue000{int.from_bytes(digest, 'big')}n"
        self._hidden: list[str] = []
        self._borders = borders
        self._pattern = pattern

    def cover(self, value: Any) -> Any:
        """Return a copy of a nested value with all its texts, keys too, covered."""
        match value:
            case str():
                return self._cover_text(value)
            case dict():
                return {self.cover(k): self.cover(v) for k, v in value.items()}
            case list() | tuple():
                return [self.cover(v) for v in value]
        return value

    def restore(self, text: str) -> str:
        """Put the literal texts back."""
        if not self._hidden:
            return text
        placeholder = re.escape(self._open) + "([0-9]+)\ue001"
        return re.sub(placeholder, lambda m: self._hidden[int(m.group(1))], text)

    def _hide(self, literal: str) -> str:
        self._hidden.append(literal)
        return f"{self._open}{len(self._hidden) - 1}\ue001"

    def _cover_text(self, text: str) -> str:
        if self._pattern is None or not text:
            return text
        # A text that ends like "<|im_" could be completed by what the template puts after it; likewise its beginning.
        head = self._borders.head(text)
        tail = self._borders.tail(text[head:])
        inner = text[head : len(text) - tail]
        whole = self._pattern.search(text)
        if whole is None and head == 0 and tail == 0:
            return text
        if whole is not None:
            # Whole control tokens come first; what they leave at the borders is covered as a part of them or stays.
            pieces, at = [], 0
            for match in self._pattern.finditer(text):
                pieces += [self._cover_text(text[at : match.start()]), self._hide(match.group())]
                at = match.end()
            return "".join([*pieces, self._cover_text(text[at:])])
        begin = self._hide(text[:head]) if head else ""
        end = self._hide(text[len(text) - tail :]) if tail else ""
        return begin + inner + end


class _Borders:
    """Proper beginnings and ends of control tokens, by length: what a text may end or begin with by accident."""

    def __init__(self, control: Iterable[str]) -> None:
        tokens = list(control)
        self._lengths = range(max((len(token) for token in tokens), default=1) - 1, 0, -1)  # the longest first
        self._ends = {k: {token[-k:] for token in tokens if len(token) > k} for k in self._lengths}
        self._beginnings = {k: {token[:k] for token in tokens if len(token) > k} for k in self._lengths}

    def head(self, text: str) -> int:
        """Return the length of the longest end of a token that `text` begins with."""
        return next((k for k in self._lengths if text[:k] in self._ends[k]), 0)

    def tail(self, text: str) -> int:
        """Return the length of the longest beginning of a token that `text` ends with."""
        return next((k for k in self._lengths if text[-k:] in self._beginnings[k]), 0)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump as people write JSON in prompts: no HTML escapes, characters as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
