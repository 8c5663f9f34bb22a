"""Weights out of a model file, dequantized (see models/quant.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from models.config import ModelConfig
from models.gguf import GgufFile, TensorInfo
from models.quant import dequantize


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, in the compute type (norms in float32)."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) · head_dim, hidden]
    qkv_bias: torch.Tensor | None  # [(heads + 2 kv_heads) · head_dim]
    out: torch.Tensor  # [hidden, heads · head_dim]
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 ffn, hidden]
    down: torch.Tensor  # [hidden, ffn]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model. `head` is `embedding` itself where they are tied."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[Layer]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]
    rope_factors: torch.Tensor | None  # [head_dim / 2]


def load(file: GgufFile, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Dequantize every tensor that the model needs into `dtype` (norms and rope factors stay float32)."""

    def get(name: str, kind: torch.dtype = dtype) -> torch.Tensor:
        return read_tensor(file, file.tensors[name]).to(kind)

    def layer(index: int) -> Layer:
        blk = f"blk.{index}."
        qkv = ("attn_q", "attn_k", "attn_v")
        return Layer(
            attn_norm=get(blk + "attn_norm.weight", torch.float32),
            qkv=torch.cat([get(f"{blk}{n}.weight") for n in qkv]),
            qkv_bias=torch.cat([get(f"{blk}{n}.bias") for n in qkv]) if config.qkv_bias else None,
            out=get(blk + "attn_output.weight"),
            ffn_norm=get(blk + "ffn_norm.weight", torch.float32),
            gate_up=torch.cat([get(blk + "ffn_gate.weight"), get(blk + "ffn_up.weight")]),
            down=get(blk + "ffn_down.weight"),
        )

    embedding = get("token_embd.weight")
    return Weights(
        embedding=embedding,
        layers=[layer(i) for i in range(config.num_layers)],
        norm=get("output_norm.weight", torch.float32),
        head=embedding if config.tied_embeddings else get("output.weight"),
        rope_factors=get("rope_freqs.weight", torch.float32) if config.rope_factors else None,
    )


def read_tensor(file: GgufFile, tensor: TensorInfo) -> torch.Tensor:
    """Return one tensor of the file as float32, in its shape."""
    raw = np.frombuffer(file.data(tensor), np.uint8)
    return torch.from_numpy(dequantize(tensor.kind, raw, math.prod(tensor.shape))).view(tensor.shape)
