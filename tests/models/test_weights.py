"""Dequantization."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from models.gguf import TENSOR_TYPES
from models.weights import dequantize


@pytest.mark.parametrize("number", TENSOR_TYPES)
def test_a_quantized_tensor_has_the_values_of_the_reference(number: int) -> None:
    """Random blocks of each type equal the gguf package's own dequantization, bit for bit or to the last place."""
    kind, per_block, nbytes = TENSOR_TYPES[number]
    rng = np.random.default_rng(number)
    raw = rng.integers(0, 256, (64, 256 // per_block * nbytes), dtype=np.uint8)
    halves = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q6_K": (208,), "F16": (0,), "BF16": (0,), "F32": (2,)}[kind]
    blocks = raw.reshape(-1, nbytes)
    for at in halves:
        # Random exponents would give NaN and infinity.
        blocks[:, at + 1] = blocks[:, at + 1] & 0x80 | 0x30

    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number)) if kind != "F32" else raw.view(np.float32)
    got = dequantize(kind, torch.from_numpy(raw.flatten()), want.size)

    assert np.isfinite(want).all()
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want.flatten(), rtol=2e-7, atol=1e-7 * np.abs(want).max())
