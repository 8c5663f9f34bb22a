"""A tiny Hugging Face folder made on the spot: two layers, a byte vocabulary, random F32 weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.models.files import CHATML

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS, VOCAB = 32, 64, 4, 2, 2, 264
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
    "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": 258,
}  # fmt: skip


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Return the weights by their Hugging Face names."""
    rng = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for number in range(LAYERS):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return {name: rng.standard_normal(shape, dtype=np.float32) * np.float32(0.3) for name, shape in shapes.items()}


def tiny_folder(path: Path, *, shards: int = 1, seed: int = 0, config: dict[str, Any] | None = None) -> Path:
    """Write the folder; returns `path`."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    weights = tensors(seed)
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(weights)
        places = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = {name: weights[name] for name in names[number::shards]}
            save_file(part, path / file, metadata={"format": "pt"})
            places |= dict.fromkeys(part, file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    core.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return path


def safetensors_bytes(header: Any, data: bytes) -> bytes:
    """Return a file of a header (JSON value, or bytes as they are) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return header and data of a file."""
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]
