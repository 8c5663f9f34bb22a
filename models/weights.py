"""Weights out of a GGUF file, dequantized.

Formulas (per block of 32 elements unless said otherwise; d, m: float16):
F32, F16, BF16: as they are. Q8_0: d·q, q int8. Q4_0: d·(q − 8). Q4_1: d·q + m; byte i of the 16 holds element i in its
low and element i + 16 in its high nibble. Q6_K: 256 elements, 16 sub-blocks with int8 scales: d·scale·(q − 32).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from models.config import ModelConfig
from models.gguf import GgufFile, TensorInfo


def dequantize(kind: str, raw: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Return the `num_elements` values of raw bytes `[nbytes]` (uint8) as float32 `[num_elements]`."""
    match kind:
        case "F32":
            return raw.view(torch.float32).clone()
        case "F16":
            return raw.view(torch.float16).float()
        case "BF16":
            return raw.view(torch.bfloat16).float()
        case "Q8_0":
            blocks = raw.view(-1, 34)
            return (_half(blocks[:, :2]) * blocks[:, 2:].view(torch.int8)).flatten()
        case "Q4_0":
            blocks = raw.view(-1, 18)
            return (_half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).to(torch.int8) - 8)).flatten()
        case "Q4_1":
            blocks = raw.view(-1, 20)
            return torch.addcmul(_half(blocks[:, 2:4]), _half(blocks[:, :2]), _nibbles(blocks[:, 4:]).float()).flatten()
        case "Q6_K":
            return _q6_k(raw.view(-1, 210)).flatten()
    raise AssertionError(f"no way to dequantize {kind} is written")


def _half(pair: torch.Tensor) -> torch.Tensor:
    """Read `[blocks, 2]` bytes as float16 and return float32 `[blocks, 1]`."""
    return pair.contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack `[blocks, 16]` bytes to `[blocks, 32]`: low nibbles, then high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Unpack `[blocks, 210]` bytes: 128 low nibbles, 64 high pairs, 16 int8 scales, float16 d; → `[blocks, 256]`."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).reshape(-1, 8, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).reshape(-1, 8, 32)
    q = (low | (high << 4)).to(torch.int8) - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(-1) * q.reshape(-1, 16, 16)).flatten(1)


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
    num_elements = 1
    for dim in tensor.shape:
        num_elements *= dim
    with warnings.catch_warnings():
        # The map is read-only and torch has no such tensors; every path below copies before anything is written.
        warnings.simplefilter("ignore", UserWarning)
        raw = torch.frombuffer(file.data(tensor), dtype=torch.uint8)
    return dequantize(tensor.kind, raw, num_elements).view(tensor.shape)
