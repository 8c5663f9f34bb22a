"""Weights out of a model file, dequantized (see models/quant.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.quant import KINDS, checked, dequantize
from models.source import ModelSource

_SLICE_BLOCKS = 1 << 16  # at most 64 MiB of float32 at a time


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, in the compute type (norms in float32)."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) · head_dim, hidden]
    qkv_bias: torch.Tensor | None  # [(heads + 2 kv_heads) · head_dim]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
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


def load(source: ModelSource, dtype: torch.dtype) -> Weights:
    """Dequantize every tensor that the model needs into `dtype` (norms and rope factors stay float32).

    Besides the weights themselves only slices of one tensor are in memory at a time.

    Raises:
        ModelFileError: a tensor holds values that are no finite numbers.
    """
    config = source.config

    def get(*names: str, kind: torch.dtype = dtype) -> torch.Tensor:
        return _joined(source, names, kind)

    def layer(index: int) -> Layer:
        blk = f"blk.{index}."
        qkv = ("attn_q", "attn_k", "attn_v")
        return Layer(
            attn_norm=get(blk + "attn_norm.weight", kind=torch.float32),
            qkv=get(*(f"{blk}{n}.weight" for n in qkv)),
            qkv_bias=get(*(f"{blk}{n}.bias" for n in qkv)) if config.qkv_bias else None,
            q_norm=get(blk + "attn_q_norm.weight", kind=torch.float32) if config.qk_norm else None,
            k_norm=get(blk + "attn_k_norm.weight", kind=torch.float32) if config.qk_norm else None,
            out=get(blk + "attn_output.weight"),
            ffn_norm=get(blk + "ffn_norm.weight", kind=torch.float32),
            gate_up=get(blk + "ffn_gate.weight", blk + "ffn_up.weight"),
            down=get(blk + "ffn_down.weight"),
        )

    embedding = get("token_embd.weight")
    return Weights(
        embedding=embedding,
        layers=[layer(i) for i in range(config.num_layers)],
        norm=get("output_norm.weight", kind=torch.float32),
        head=embedding if config.tied_embeddings else get("output.weight"),
        rope_factors=get("rope_freqs.weight", kind=torch.float32) if config.rope_factors else None,
    )


def _joined(source: ModelSource, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
    """Return tensors of the source joined along their rows, in `dtype`, dequantized slice by slice."""
    parts = [checked(source, name) for name in names]
    out = torch.empty(sum(shape[0] for _, _, shape in parts), *parts[0][2][1:], dtype=dtype)
    flat, begin = out.view(-1), 0
    for kind, raw, _ in parts:
        per_block, nbytes = KINDS[kind]
        for at in range(0, raw.size, _SLICE_BLOCKS * nbytes):
            piece = raw[at : at + _SLICE_BLOCKS * nbytes]
            count = piece.size // nbytes * per_block
            flat[begin : begin + count] = torch.from_numpy(dequantize(kind, piece, count))
            begin += count
    return out
