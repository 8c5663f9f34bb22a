"""Model files for tests: the default model, and tiny ones made on the spot."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def default_model() -> Path:
    """Return the default model's file; without it the test is skipped here and fails in CI."""
    named = os.environ.get("HEADRACE_TEST_MODEL")
    found = Path(named) if named else next(iter(sorted((ROOT / ".headrace/models").rglob("*.gguf"))), None)
    if found is None or not found.exists():
        message = "no model file; run `make run` once, or set HEADRACE_TEST_MODEL"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def tiny_model(path: Path, *, template: str | None = CHATML, add_bos: bool = False, seed: int = 0) -> Path:
    """Write a two-layer model with a byte vocabulary and random F32 weights; returns `path`."""
    hidden, ffn, heads, kv_heads, dim = 32, 64, 4, 2, 8
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(dim)
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in alphabet]
    characters = [chr(0x100 + others.index(b)) if b in others else chr(b) for b in range(256)]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", *characters, "he", "ll", "hell", "hello"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 4] + [1] * (len(tokens) - 4))
    writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    rng = np.random.default_rng(seed)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32) * (0.3 if len(shape) > 1 else 1.0))

    tensor("token_embd.weight", len(tokens), hidden)
    tensor("output_norm.weight", hidden)
    for layer in range(2):
        blk = f"blk.{layer}."
        tensor(blk + "attn_norm.weight", hidden)
        tensor(blk + "attn_q.weight", heads * dim, hidden)
        tensor(blk + "attn_k.weight", kv_heads * dim, hidden)
        tensor(blk + "attn_v.weight", kv_heads * dim, hidden)
        tensor(blk + "attn_output.weight", hidden, heads * dim)
        tensor(blk + "ffn_norm.weight", hidden)
        tensor(blk + "ffn_gate.weight", ffn, hidden)
        tensor(blk + "ffn_up.weight", ffn, hidden)
        tensor(blk + "ffn_down.weight", hidden, ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
