"""OpenAI request bodies to one checked form, for HTTP and for native clients alike.

What is accepted is honoured, or refused by name: a known parameter that this version does not implement is a 400 unless
its value means "off". Unknown fields are accepted and reported, so that they can be logged once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from schemas.errors import BadRequest, ContextTooLong, ModelNotFound
from schemas.openai_fields import read_bool, read_int, read_object, read_string, wrong_type
from schemas.openai_input import PromptsForm, parse_messages, parse_prompts
from schemas.openai_json import INT64_MAX, INT64_MIN, check_sendable, load_json
from schemas.openai_sampling import MAX_MAX_TOKENS, parse_sampling
from schemas.record import Sampling

Api = Literal["chat", "completion"]
RequestClass = Literal["interactive", "agent", "batch"]

CLASSES: tuple[RequestClass, ...] = ("interactive", "agent", "batch")
MAX_N = 64
MAX_CHOICES = 1024
MAX_DEADLINE_MS = 86_400_000
MAX_SALT = 256

ACCEPTED = frozenset(
    {
        "model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens",
        "max_completion_tokens", "n", "ignore_eos", "deadline_ms", "class", "user", "metadata", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "min_tokens", "cache_salt",
        "warm_failover",
    }
)  # fmt: skip
INPUT: dict[str, str] = {"chat": "messages", "completion": "prompt"}

# Known parameters that are not implemented, with the values that mean "off" (null always does).
REFUSED: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": (),
    "function_call": ("none",),
    "reasoning_effort": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_key": (),
    "echo": (False,),
    "suffix": (),
    "best_of": (1,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "bad_words": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "structured_outputs": (),
    "priority": (0,),
    "return_token_ids": (False,),
    "truncate_prompt_tokens": (),
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked request. `seed` and `max_tokens` are None where the client left them out; `settle` fixes both."""

    api: Api
    model: str
    sampling: Sampling
    seed: int | None
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    prompts_form: PromptsForm | None
    prompts: tuple[str | list[int], ...]
    messages: tuple[dict[str, Any], ...]
    deadline_ms: int | None
    request_class: RequestClass | None
    cache_salt: str
    warm_failover: bool | None  # None: as its class says
    unknown_fields: tuple[str, ...]

    @property
    def num_prompts(self) -> int:
        """How many prompts the request has; a chat is one."""
        return max(1, len(self.prompts))

    @property
    def num_choices(self) -> int:
        """How many choices its answer has."""
        return self.num_prompts * self.n

    def settle(self, *, seed: int, max_tokens: int) -> Sampling:
        """Return the sampling parameters with what admission decided."""
        return self.sampling.model_copy(update={"seed": seed, "max_tokens": max_tokens})


def parse_request(
    api: str,
    body: Mapping[str, Any],
    *,
    models: Collection[str] | None = None,
    vocab_size: int | None = None,
) -> ParsedRequest:
    """Check a request body.

    Args:
        api: `chat` or `completion`.
        body: the decoded JSON or msgpack object.
        models: names that are served; absent: any name passes.
        vocab_size: bound for token ids; absent: not checked here.

    Raises:
        BadRequest: if anything is wrong; `param` names the field.
        ModelNotFound: if the model is not served; decided before anything else is looked at.
    """
    if api not in INPUT:
        raise BadRequest(f"unknown api {api!r}; known are {', '.join(INPUT)}")
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be an object")
    model = requested_model(body, models)
    check_sendable(body)
    unknown = _refuse_unimplemented(api, body)
    stream, include_usage = _stream(body)
    max_tokens = _max_tokens(body)
    seed = read_int(body, "seed", INT64_MIN, INT64_MAX)
    n = read_int(body, "n", 1, MAX_N) or 1
    sampling = parse_sampling(body, max_tokens, seed, vocab_size)
    read_string(body, "user")
    read_object(body, "metadata")
    deadline_ms = read_int(body, "deadline_ms", 1, MAX_DEADLINE_MS)
    request_class = parse_class(body.get("class"), "class")
    cache_salt = _cache_salt(body)
    warm = None if body.get("warm_failover") is None else read_bool(body, "warm_failover", False)
    form: PromptsForm | None = None
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    if api == "chat":
        messages, more = parse_messages(body.get("messages"))
        unknown |= more
    else:
        form, prompts = parse_prompts(body.get("prompt"), vocab_size)
        if len(prompts) * n > MAX_CHOICES:
            raise BadRequest(
                f"{len(prompts)} prompts with n={n} make {len(prompts) * n} choices, at most {MAX_CHOICES} are allowed",
                param="prompt",
            )
    return ParsedRequest(
        api=cast(Api, api), model=model, sampling=sampling, seed=seed, max_tokens=max_tokens, n=n, stream=stream,
        include_usage=include_usage, prompts_form=form, prompts=prompts, messages=messages, deadline_ms=deadline_ms,
        request_class=request_class, cache_salt=cache_salt, warm_failover=warm,
        unknown_fields=tuple(name[:60] for name in sorted(unknown)[:20]),
    )  # fmt: skip


def _cache_salt(body: Mapping[str, Any]) -> str:
    """Return what a request's stored prefixes are kept apart by, beside its tenant; nothing if absent.

    Raises:
        BadRequest: if it is empty, which would look like a salt and separate nothing, or too long.
    """
    salt = read_string(body, "cache_salt")
    if salt is not None and not 1 <= len(salt) <= MAX_SALT:
        raise BadRequest(f"cache_salt must have 1 to {MAX_SALT} characters", param="cache_salt")
    return salt or ""


def requested_model(body: Mapping[str, Any], models: Collection[str] | None = None) -> str:
    """Return the model that a body names.

    Raises:
        BadRequest: if there is none, or it is no string.
        ModelNotFound: if it is not one of `models`.
    """
    model = read_string(body, "model")
    if not model:
        raise BadRequest("model is required", param="model")
    if models is not None and model not in models:
        shown = model[:100].encode("utf-8", "replace").decode()
        raise ModelNotFound(f"the model {shown!r} does not exist", param="model")
    return model


def check_context(prompt_tokens: int, max_tokens: int | None, limit: int, *, param: str | None = None) -> int:
    """Check that a prompt and its answer fit the context window; return the tokens that may be generated.

    Args:
        prompt_tokens: length of the longest prompt.
        max_tokens: what the client asked for; absent: what is left.
        limit: the context window in tokens.
        param: field that holds the prompt, for the error.

    Raises:
        ContextTooLong: if the prompt fills the window, or leaves less than `max_tokens`; nothing is clamped.
    """
    if prompt_tokens >= limit:
        raise ContextTooLong(
            f"the context window is {limit} tokens and the prompt has {prompt_tokens}, which leaves no room to answer",
            param=param,
        )
    if max_tokens is None:
        return limit - prompt_tokens
    if prompt_tokens + max_tokens > limit:
        raise ContextTooLong(
            f"the context window is {limit} tokens, but the prompt has {prompt_tokens} and max_tokens asks for "
            f"{max_tokens}, {prompt_tokens + max_tokens} in all",
            param="max_tokens",
        )
    return max_tokens


def parse_class(value: Any, param: str | None) -> RequestClass | None:
    """Read a request class from a body's field or a header.

    Raises:
        BadRequest: if it is not one of the classes.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong_type(param or "class", "a string", value)
    for known in CLASSES:
        if value == known:
            return known
    raise BadRequest(f"class must be one of {', '.join(CLASSES)}, got {value[:40]!r}", param=param)


def parse_deadline_header(value: str) -> int:
    """Read `X-Request-Deadline-Ms`.

    Raises:
        BadRequest: if it is not an integer in the allowed range.
    """
    text = value.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and 1 <= int(text) <= MAX_DEADLINE_MS):
        raise BadRequest(
            f"X-Request-Deadline-Ms must be an integer between 1 and {MAX_DEADLINE_MS}", param="deadline_ms"
        )
    return int(text)


def _refuse_unimplemented(api: str, body: Mapping[str, Any]) -> set[str]:
    """Refuse known parameters whose value asks for something; return the unknown ones."""
    unknown: set[str] = set()
    for name, value in body.items():
        if name in ACCEPTED or name == INPUT[api]:
            continue
        if name in INPUT.values():
            if value is None:
                continue
            raise BadRequest(f"{name} is no parameter of this API; it takes {INPUT[api]}", param=name)
        if name not in REFUSED:
            unknown.add(name)
        elif name == "tools" and value == []:
            raise BadRequest("tools must not be an empty array", param=name)
        elif value is not None and not any(_same(value, off) for off in REFUSED[name]):
            raise BadRequest(f"{name} is not supported", param=name)
    return unknown


def _same(value: Any, off: Any) -> bool:
    """Whether a value is this one; 0 and false are different things, 0 and 0.0 are not."""
    return isinstance(value, bool) == isinstance(off, bool) and bool(value == off)


def _stream(body: Mapping[str, Any]) -> tuple[bool, bool]:
    stream = read_bool(body, "stream", False)
    options = read_object(body, "stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise BadRequest("stream_options is only allowed with stream", param="stream_options")
    try:
        include_usage = read_bool(options, "include_usage", False)
        continuous = read_bool(options, "continuous_usage_stats", False)
    except BadRequest as exc:
        raise BadRequest(f"stream_options.{exc.message}", param=f"stream_options.{exc.param}") from exc
    if continuous:
        name = "stream_options.continuous_usage_stats"
        raise BadRequest(f"{name} is not supported", param=name)
    return stream, include_usage


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    old = read_int(body, "max_tokens", 1, MAX_MAX_TOKENS)
    new = read_int(body, "max_completion_tokens", 1, MAX_MAX_TOKENS)
    if old is not None and new is not None and old != new:
        raise BadRequest(
            "max_tokens and max_completion_tokens say different things; give one of them", param="max_completion_tokens"
        )
    return new if new is not None else old


__all__ = [
    "ACCEPTED", "CLASSES", "INPUT", "MAX_DEADLINE_MS", "REFUSED", "Api", "ParsedRequest", "RequestClass",
    "check_context", "check_sendable", "load_json", "parse_class", "parse_deadline_header", "parse_request",
    "requested_model",
]  # fmt: skip
