"""A whole small model on Triton's kernels: the logits of the plain one, and the same bits however it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from triton_cases import DEVICE, assert_same_bits, noise

from kernels import registry
from kernels.registry import KernelChoiceError
from models.config import ModelConfig
from models.transformer import Transformer
from models.weights import Layer, Weights

CONFIG = ModelConfig(
    name="small", num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, hidden=64, ffn=96, vocab_size=70,
    context_length=128, norm_eps=1e-5, rope_theta=10_000.0, rope_scale=1.0, rope_factors=False,
    rope_pairing="halves", tied_embeddings=True, qkv_bias=True, qk_norm=True,
)  # fmt: skip
BLOCKS = 8

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the transformer keeps its data on the CPU")


@dataclass
class Run:
    """Tokens of one sequence."""

    ids: list[int]
    start: int
    blocks: list[int]


def weights(dtype: torch.dtype) -> Weights:
    """Return seeded weights of CONFIG."""
    seeds = iter(range(100))

    def matrix(*shape: int) -> torch.Tensor:
        return (noise(*shape, seed=next(seeds)) * shape[-1] ** -0.5).to(dtype)

    def gain(size: int) -> torch.Tensor:
        return 1 + 0.1 * noise(size, seed=next(seeds))

    c = CONFIG
    heads, width = c.num_heads * c.head_dim, c.kv_width
    layers = [
        Layer(
            attn_norm=gain(c.hidden), qkv=matrix(heads + 2 * width, c.hidden), qkv_bias=matrix(heads + 2 * width),
            q_norm=gain(c.head_dim), k_norm=gain(c.head_dim), out=matrix(c.hidden, heads), ffn_norm=gain(c.hidden),
            gate_up=matrix(2 * c.ffn, c.hidden), down=matrix(c.hidden, c.ffn),
        )
        for _ in range(c.num_layers)
    ]  # fmt: skip
    embedding = matrix(c.vocab_size, c.hidden)
    return Weights(embedding, layers, gain(c.hidden), embedding, None)


Make = Callable[[str, torch.dtype], Transformer]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Build a model under an override of kernels."""

    def build(override: str, dtype: torch.dtype) -> Transformer:
        monkeypatch.setenv(registry.VARIABLE, override)
        registry._resolve_torch.cache_clear()
        return Transformer(CONFIG, weights(dtype))

    yield build
    registry._resolve_torch.cache_clear()


def pool(model: Transformer) -> torch.Tensor:
    """Return an empty pool; lines without a token are NaN."""
    lines = BLOCKS * CONFIG.num_layers * 2 * 16
    return torch.full((lines, CONFIG.kv_width), float("nan"), dtype=model.dtype)


IDS = [(7 * i * i + 3 * i) % CONFIG.vocab_size for i in range(45)]
TABLE = [5, 0, 3]
OTHER = Run(IDS[:19], 0, [1, 6])


@torch.inference_mode()
def test_logits_are_those_of_the_plain_model(make: Make) -> None:
    """A prompt beside another, then a decoded token beside a prompt; float32."""
    fast, plain = make("all=triton", torch.float32), make("all=reference", torch.float32)
    assert len(fast.ops.not_plain) == 7
    assert plain.ops.not_plain == ()
    one, two = pool(fast), pool(plain)

    for runs in ([Run(IDS[:44], 0, TABLE), OTHER], [Run(IDS[44:], 44, TABLE), Run(IDS[:20], 0, [7, 2])]):
        wanted = [2 if len(run.ids) > 1 else 1 for run in runs]
        got, want = fast.forward(runs, one, wanted), plain.forward(runs, two, wanted)
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(one, two, rtol=2e-4, atol=2e-4, equal_nan=True)


@torch.inference_mode()
def test_logits_and_keys_have_the_same_bits_however_they_are_computed(make: Make) -> None:
    """The prompt in one run, in chunks beside another sequence, and its last tokens one by one."""
    model = make("all=triton", torch.bfloat16)
    whole, mixed = pool(model), pool(model)
    want = model.forward([Run(IDS, 0, TABLE)], whole, [2])

    model.forward([Run(IDS[:17], 0, TABLE), OTHER], mixed, [0, 1])
    model.forward([OTHER, Run(IDS[17:43], 17, TABLE)], mixed, [1, 1])
    got = [model.forward([OTHER, Run([IDS[p]], p, TABLE)], mixed, [0, 1]) for p in range(43, 45)]

    assert_same_bits(torch.cat(got), want)
    blocks = mixed.view(BLOCKS, -1)[TABLE]
    assert_same_bits(blocks, whole.view(BLOCKS, -1)[TABLE])


def test_prefill_and_decode_cannot_be_parted(make: Make) -> None:
    """Two implementations would round otherwise, and a recomputed position would differ from a decoded one."""
    with pytest.raises(KernelChoiceError, match="computed by one implementation"):
        make("decode_attention=triton", torch.float32)
