"""Small seeded GGUF models of many shapes, for the compiled kernels: what varies is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from tests.models.gguf_models import NUMBERS, random_blocks


@dataclass(frozen=True)
class Shape:
    """Sizes and flags of a model; `kinds` by tensor, others are of kind `kind`."""

    family: str = "llama"
    hidden: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    vocab: int = 264
    context: int = 512
    tied: bool = True
    factors: bool = False
    linear: float = 1.0  # positions are divided by it
    kind: str = "F32"
    kinds: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0


def write_model(path: Path, shape: Shape) -> Path:
    """Write the model, without a tokenizer; returns `path`."""
    s, rng = shape, np.random.default_rng(shape.seed)
    writer = gguf.GGUFWriter(path, s.family)
    writer.add_block_count(s.layers)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_feed_forward_length(s.ffn)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(s.vocab)
    writer.add_eos_token_id(2)
    if s.linear != 1.0:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(s.linear)

    def matrix(name: str, rows: int, width: int) -> None:
        part = name.removesuffix(".weight").rpartition(".")[2]
        kind = s.kinds.get(part, s.kind)
        raw = random_blocks(kind, rows, width, rng)
        writer.add_tensor(name, raw, raw_dtype=NUMBERS[kind])

    def vector(name: str, size: int, scale: float = 0.3, mean: float = 1.0) -> None:
        values = mean + scale * rng.standard_normal(size, dtype=np.float32)
        writer.add_tensor(name, values.astype(np.float32))

    q_width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
    matrix("token_embd.weight", s.vocab, s.hidden)
    vector("output_norm.weight", s.hidden)
    if not s.tied:
        matrix("output.weight", s.vocab, s.hidden)
    if s.factors:
        values = np.linspace(1, 8, s.head_dim // 2, dtype=np.float32)
        writer.add_tensor("rope_freqs.weight", values)
    for layer in range(s.layers):
        blk = f"blk.{layer}."
        vector(blk + "attn_norm.weight", s.hidden)
        for part, rows in (("attn_q", q_width), ("attn_k", kv_width), ("attn_v", kv_width)):
            matrix(f"{blk}{part}.weight", rows, s.hidden)
            if s.family == "qwen2":
                vector(f"{blk}{part}.bias", rows, mean=0.0)
        if s.family == "qwen3":
            vector(blk + "attn_q_norm.weight", s.head_dim)
            vector(blk + "attn_k_norm.weight", s.head_dim)
        matrix(blk + "attn_output.weight", s.hidden, q_width)
        vector(blk + "ffn_norm.weight", s.hidden)
        matrix(blk + "ffn_gate.weight", s.ffn, s.hidden)
        matrix(blk + "ffn_up.weight", s.ffn, s.hidden)
        matrix(blk + "ffn_down.weight", s.hidden, s.ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
