"""Small GGUF models of each family with every kind of weight, each beside a Hugging Face folder of the same values."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from models.quant import FLOAT_KINDS, KINDS

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS, VOCAB = 256, 512, 4, 2, 2, 512
NUMBERS = {kind: gguf.GGMLQuantizationType[kind] for kind in KINDS}
# Scales (float16 fields of a block, by offset) that make random codes weights of about 0.06, with a mean near 0.
SCALES = {
    "Q4_0": {0: 0.012}, "Q4_1": {0: 0.012, 2: -0.09}, "Q8_0": {0: 0.0008}, "Q4_K": {0: 4e-4, 2: 3e-3},
    "Q5_K": {0: 2e-4, 2: 3.1e-3}, "Q6_K": {208: 5e-5},
}  # fmt: skip
KIND_OF = {
    "token_embd": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q8_0", "attn_v": "Q5_K", "attn_output": "Q4_1",
    "ffn_gate": "Q4_0", "ffn_up": "F16", "ffn_down": "Q6_K", "output": "BF16",
}  # fmt: skip
HF_NAME = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def random_blocks(kind: str, rows: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Return uint8 `[rows, bytes]`: a matrix of weights of ordinary size in one kind."""
    if kind in FLOAT_KINDS:
        values = rng.standard_normal((rows, width), dtype=np.float32) * np.float32(0.06)
        made = values if kind == "F32" else gguf.quants.quantize(values, NUMBERS[kind])
        return made.view(np.uint8).reshape(rows, -1)
    per_block, nbytes = KINDS[kind]
    blocks = rng.integers(0, 256, (rows * width // per_block, nbytes), np.uint8)
    for at, value in SCALES[kind].items():
        factor = rng.uniform(0.7, 1.3, (len(blocks), 1))
        blocks[:, at : at + 2] = (value * factor).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


@dataclass
class Pair:
    """Writes each tensor to both models."""

    family: str
    writer: Any
    head_dim: int
    rng: np.random.Generator
    theirs: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, layer: int | None, part: str, shape: tuple[int, ...], suffix: str = "weight") -> None:
        """Add one tensor; norms, biases and what has one dimension are F32."""
        blk, model = ("", "") if layer is None else (f"blk.{layer}.", f"model.layers.{layer}.")
        if len(shape) == 1:
            noise = self.rng.standard_normal(shape, dtype=np.float32)
            values = 1 + 0.3 * noise if "norm" in part else 0.15 * noise
            self.writer.add_tensor(f"{blk}{part}.{suffix}", values)
        else:
            kind = KIND_OF[part]
            raw = random_blocks(kind, *shape, self.rng)
            values = gguf.quants.dequantize(raw.view(np.float32) if kind == "F32" else raw, NUMBERS[kind])
            self.writer.add_tensor(f"{blk}{part}.{suffix}", raw, raw_dtype=NUMBERS[kind])
        values = np.ascontiguousarray(values, np.float32).reshape(shape)
        if self.family == "llama" and part in ("attn_q", "attn_k"):
            # GGUF files of llama models hold the rows of each head in the order 0, d/2, 1, d/2 + 1, …
            values = values.reshape(-1, self.head_dim // 2, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        self.theirs[f"{model}{HF_NAME[part]}.{suffix}"] = np.ascontiguousarray(values)


def write_pair(root: Path, family: str, *, seed: int = 0) -> None:
    """Write `root/FAMILY-gguf.gguf` and the folder `root/FAMILY-gguf` with the same values in F32."""
    head_dim = 128 if family == "qwen3" else HIDDEN // HEADS
    writer = gguf.GGUFWriter(root / f"{family}-gguf.gguf", family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(20000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_eos_token_id(7)
    if family == "qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    pair = Pair(family, writer, head_dim, np.random.default_rng(seed))
    pair.add(None, "token_embd", (VOCAB, HIDDEN))
    pair.add(None, "output_norm", (HIDDEN,))
    pair.add(None, "output", (VOCAB, HIDDEN))
    q_width, kv_width = HEADS * head_dim, KV_HEADS * head_dim
    for layer in range(LAYERS):
        pair.add(layer, "attn_norm", (HIDDEN,))
        for part, rows in (("attn_q", q_width), ("attn_k", kv_width), ("attn_v", kv_width)):
            pair.add(layer, part, (rows, HIDDEN))
            if family == "qwen2":
                pair.add(layer, part, (rows,), "bias")
        if family == "qwen3":
            pair.add(layer, "attn_q_norm", (head_dim,))
            pair.add(layer, "attn_k_norm", (head_dim,))
        pair.add(layer, "attn_output", (HIDDEN, q_width))
        pair.add(layer, "ffn_norm", (HIDDEN,))
        pair.add(layer, "ffn_gate", (FFN, HIDDEN))
        pair.add(layer, "ffn_up", (FFN, HIDDEN))
        pair.add(layer, "ffn_down", (HIDDEN, FFN))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = root / f"{family}-gguf"
    folder.mkdir()
    save_file(pair.theirs, folder / "model.safetensors", metadata={"format": "pt"})
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = {
        "architectures": [f"{name}ForCausalLM"], "model_type": family, "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": head_dim, "rms_norm_eps": 1e-6, "rope_theta": 20000.0,
        "max_position_embeddings": 256, "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 7,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
