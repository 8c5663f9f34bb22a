"""A Hugging Face `config.json` as a `ModelConfig`. Never imports torch.

Keys and defaults are those of transformers' LlamaConfig, Qwen2Config and Qwen3Config; what they can say and this
transformer cannot do is refused by name.
"""

from __future__ import annotations

import array
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import FAMILIES, MAX_CONTEXT, ModelConfig
from models.errors import ModelFileError
from models.fields import Fields

_QWEN3_HEAD_DIM = 128


def read_config(path: Path, values: Mapping[str, Any], has_head: bool) -> tuple[ModelConfig, array.array[float] | None]:
    """Return the configuration, and the divisors of the rotary frequencies where there are any.

    Args:
        path: the file, for messages.
        values: its contents.
        has_head: whether the weights hold a separate output matrix; decides where `tie_word_embeddings` is not given.

    Returns:
        The configuration; float32 `[head_dim / 2]` divisors (Llama 3), or None.

    Raises:
        ModelFileError: a value is missing, of the wrong type or out of range, or asks for something not supported.
    """
    fields = Fields(path, values, "key")
    family = fields.text("model_type")
    if family not in FAMILIES:
        raise ModelFileError(path, f"model type {family!r:.80} is not supported; {', '.join(FAMILIES)} are")
    _refuse_unsupported(path, fields, family)
    num_heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", _QWEN3_HEAD_DIM if family == "qwen3" else hidden // num_heads)
    theta, scale, factors = _rope(path, values, head_dim)
    return ModelConfig(
        name=path.parent.resolve().name,
        num_layers=fields.integer("num_hidden_layers", high=1000),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        hidden=hidden,
        ffn=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        context_length=fields.integer("max_position_embeddings", low=32, high=MAX_CONTEXT),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scale=scale,
        rope_factors=factors is not None,
        rope_pairing="halves",
        tied_embeddings=fields.boolean("tie_word_embeddings", not has_head),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    ), factors


def _refuse_unsupported(path: Path, fields: Fields, family: str) -> None:
    if fields.values.get("quantization_config") is not None:
        raise fields.error("quantization_config", "is there: only F32, F16 and BF16 weights are supported")
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", f"is {activation!r:.80}; only 'silu' is supported")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        # Qwen2 has its biases always and no key for them.
        if fields.boolean(key, False):
            raise fields.error(key, "is true, which is not supported")
    kinds = fields.values.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise fields.error("layer_types", f"is {kinds!r:.80}; only 'full_attention' is supported")


def _rope(path: Path, values: Mapping[str, Any], head_dim: int) -> tuple[float, float, array.array[float] | None]:
    """Return theta, the linear scale, and divisors of the frequencies."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(key), (dict, type(None))):
            raise ModelFileError(path, f"key {key!r} is {values[key]!r:.80}, no object")
    given: dict[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope = Fields(path, given, "rotary embedding's key")
    theta = rope.real("rope_theta", Fields(path, values, "key").real("rope_theta", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    part = rope.real("partial_rotary_factor", Fields(path, values, "key").real("partial_rotary_factor", 1.0))
    if part != 1.0:
        raise ModelFileError(path, "rotary embedding of a part of each head is not supported (partial_rotary_factor)")
    match kind:
        case "default":
            return theta, 1.0, None
        case "linear":
            return theta, rope.real("factor"), None
        case "llama3":
            return theta, 1.0, _llama3_factors(rope, theta, head_dim)
    raise ModelFileError(path, f"rope scaling {kind!r:.80} is not supported; default, linear and llama3 are")


def _llama3_factors(rope: Fields, theta: float, head_dim: int) -> array.array[float]:
    """Return what Llama 3 divides each frequency by: 1 for short waves, `factor` for long ones, a blend between.

    As `_compute_llama3_parameters` in transformers' `modeling_rope_utils.py`.
    """
    factor = rope.real("factor")
    low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
    old_context = rope.integer("original_max_position_embeddings")
    if low >= high:
        raise rope.error("low_freq_factor", f"is {low}, not below 'high_freq_factor', {high}")
    divisors = array.array("f")
    for pair in range(head_dim // 2):
        wave = 2 * math.pi * theta ** (2 * pair / head_dim)
        smooth = min(1.0, max(0.0, (old_context / wave - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
