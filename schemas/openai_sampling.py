"""How a request wants its tokens chosen: every parameter that reaches the sampler is checked here, for all clients.

Whether ids lie within the model's vocabulary is checked by the tokenizer's actor, which knows it, before any engine is
asked (`vocab_size` does it here, for callers that know).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from schemas.errors import BadRequest
from schemas.openai_fields import read_bool, read_int, read_number, read_object, wrong_type
from schemas.openai_input import MAX_TOKEN_ID, parse_stop
from schemas.record import Sampling

MAX_MAX_TOKENS = 2**31 - 1
MAX_BIASES = 1024
MAX_ALLOWED = 4096  # the list travels with every dispatch of the request
MAX_REPETITION_PENALTY = 1e6


def parse_sampling(
    body: Mapping[str, Any], max_tokens: int | None, seed: int | None, vocab_size: int | None
) -> Sampling:
    """Read the sampling parameters of a request.

    Args:
        body: the request.
        max_tokens: as the request has it; for `min_tokens`.
        seed: as the request has it.
        vocab_size: bound for token ids; absent: any id that can be one passes.

    Raises:
        BadRequest: if a value is of a wrong type, out of range or not finite, or a list is too long; `param` names it.
    """
    return Sampling(
        temperature=read_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=read_number(body, "top_p", 1.0, 0.0, 1.0, open_low=True),
        top_k=_top_k(body),
        min_p=read_number(body, "min_p", 0.0, 0.0, 1.0),
        seed=seed or 0,
        max_tokens=max_tokens or Sampling.model_fields["max_tokens"].default,
        ignore_eos=read_bool(body, "ignore_eos", False),
        stop=parse_stop(body),
        presence_penalty=read_number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=read_number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=read_number(body, "repetition_penalty", 1.0, 0.0, MAX_REPETITION_PENALTY, open_low=True),
        logit_bias=_logit_bias(body, vocab_size),
        allowed_token_ids=_allowed(body, vocab_size),
        min_tokens=_min_tokens(body, max_tokens),
    )


def chosen_ids(sampling: Sampling) -> dict[str, list[int]]:
    """Return the token ids that a request names, by parameter, without the parameters that name none."""
    named = {"logit_bias": list(sampling.logit_bias), "allowed_token_ids": sampling.allowed_token_ids}
    return {name: ids for name, ids in named.items() if ids}


def check_ids(named: Mapping[str, list[int]], vocab_size: int) -> None:
    """Check what `chosen_ids` returned against the vocabulary.

    Raises:
        BadRequest: if an id is outside of it; `param` is the parameter's name.
    """
    for name, ids in named.items():
        for token in ids:
            _check_id(name, token, vocab_size - 1)


def _check_id(name: str, token: int, limit: int) -> None:
    if not 0 <= token <= limit:
        raise BadRequest(f"{name}: token id {token} is not in [0, {limit}]", param=name)


def _limit(vocab_size: int | None) -> int:
    return MAX_TOKEN_ID if vocab_size is None else vocab_size - 1


def _top_k(body: Mapping[str, Any]) -> int:
    top_k = read_int(body, "top_k", -1, MAX_MAX_TOKENS)
    if top_k == 0:
        raise BadRequest("top_k must be -1 (off) or at least 1, got 0", param="top_k")
    return -1 if top_k is None else top_k


def _min_tokens(body: Mapping[str, Any], max_tokens: int | None) -> int:
    min_tokens = read_int(body, "min_tokens", 0, MAX_MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens is {min_tokens}, but max_tokens only {max_tokens}", param="min_tokens")
    return min_tokens


def _logit_bias(body: Mapping[str, Any], vocab_size: int | None) -> dict[int, float]:
    """Read the biases: an object of token ids, written as decimal strings, to numbers in [-100, 100]."""
    name = "logit_bias"
    given = read_object(body, name)
    if given is None:
        return {}
    if len(given) > MAX_BIASES:
        raise BadRequest(f"{name} may hold at most {MAX_BIASES} token ids, got {len(given)}", param=name)
    out: dict[int, float] = {}
    for key, value in given.items():
        # One spelling per id, so that none can be given twice.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise BadRequest(f"{name} must have token ids for keys, got {key[:40]!r}", param=name)
        token = int(key)
        _check_id(name, token, _limit(vocab_size))
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadRequest(wrong_type(f"{name} of {key}", "a number", value).message, param=name)
        if not math.isfinite(value) or not -100 <= value <= 100:
            raise BadRequest(f"{name} of {key} must be between -100 and 100, got {value:g}", param=name)
        out[token] = float(value)
    return out


def _allowed(body: Mapping[str, Any], vocab_size: int | None) -> list[int]:
    """Read the ids that alone may be chosen, sorted, each once."""
    name = "allowed_token_ids"
    given = body.get(name)
    if given is None:
        return []
    if not isinstance(given, list):
        raise wrong_type(name, "an array of token ids", given)
    if not given:
        raise BadRequest(f"{name} must not be empty; leave it out to allow all", param=name)
    if len(given) > MAX_ALLOWED:
        raise BadRequest(f"{name} may hold at most {MAX_ALLOWED} token ids, got {len(given)}", param=name)
    for i, token in enumerate(given):
        if isinstance(token, bool) or not isinstance(token, int):
            raise BadRequest(wrong_type(f"{name}[{i}]", "a token id", token).message, param=name)
        _check_id(name, token, _limit(vocab_size))
    return sorted(set(given))
