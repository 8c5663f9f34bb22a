"""Weights of whole files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from models import weights
from models.source import open_model


def test_every_weight_has_the_values_of_the_file(tiny: Path) -> None:
    """Joined matrices hold their parts in the order q, k, v and gate, up; a missing output tensor is the embedding."""
    tensors = {t.name: torch.from_numpy(np.array(t.data)) for t in gguf.GGUFReader(tiny).tensors}

    with open_model(tiny) as source:
        loaded = weights.load(source, torch.float32)

    assert loaded.head is loaded.embedding
    assert torch.equal(loaded.embedding, tensors["token_embd.weight"])
    for index, layer in enumerate(loaded.layers):
        blk = f"blk.{index}."
        assert torch.equal(layer.qkv, torch.cat([tensors[f"{blk}attn_{n}.weight"] for n in "qkv"]))
        assert torch.equal(layer.gate_up, torch.cat([tensors[f"{blk}ffn_{n}.weight"] for n in ("gate", "up")]))
        assert torch.equal(layer.down, tensors[blk + "ffn_down.weight"])
        assert torch.equal(layer.attn_norm, tensors[blk + "attn_norm.weight"])
