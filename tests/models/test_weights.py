"""Weights of whole files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from models import weights
from models.errors import ModelFileError
from models.gguf import GgufFile
from models.source import open_model
from tests.models.gguf_models import write_pair
from tests.models.hf_files import tiny_folder


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


def _spoil(path: Path, tensor: str, at: int, value: float) -> None:
    """Put a float16 into a tensor of a GGUF file."""
    with GgufFile(path) as file:
        start = file.tensors[tensor].offset
    with path.open("r+b") as out:
        out.seek(start + at)
        out.write(np.float16(value).tobytes())


@pytest.mark.parametrize(
    ("tensor", "at"),
    [("blk.1.ffn_down.weight", 210 * 7 + 208), ("blk.0.attn_q.weight", 144 * 3 + 2), ("blk.0.ffn_gate.weight", 0)],
)
def test_a_scale_that_is_no_number_is_refused(tensor: str, at: int, tmp_path: Path) -> None:
    """In Q6_K, Q4_K (the minimums' scale) and Q4_0: one block of thousands, by the name of its tensor."""
    write_pair(tmp_path, "llama")
    path = tmp_path / "llama-gguf.gguf"
    with open_model(path) as source:
        weights.load(source, torch.bfloat16)

    for value in (np.nan, np.inf):
        _spoil(path, tensor, at, value)
        with open_model(path) as source, pytest.raises(ModelFileError, match=tensor):
            weights.load(source, torch.bfloat16)


def test_an_element_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """Float tensors of a folder are looked at whole."""
    folder = tiny_folder(tmp_path / "m")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = np.float32(np.inf).tobytes()
    path.write_bytes(data)

    with open_model(folder) as source, pytest.raises(ModelFileError, match="no finite numbers"):
        weights.load(source, torch.bfloat16)


def test_large_tensors_are_dequantized_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slices of 1,001 blocks all weights are the same."""
    write_pair(tmp_path, "qwen3")
    with open_model(tmp_path / "qwen3-gguf.gguf") as source:
        whole = weights.load(source, torch.float32)
        monkeypatch.setattr("models.weights._SLICE_BLOCKS", 1001)
        sliced = weights.load(source, torch.float32)

    assert torch.equal(whole.embedding, sliced.embedding) and torch.equal(whole.head, sliced.head)
    for a, b in zip(whole.layers, sliced.layers, strict=True):
        assert torch.equal(a.qkv, b.qkv) and torch.equal(a.down, b.down) and torch.equal(a.gate_up, b.gate_up)
