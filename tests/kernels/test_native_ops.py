"""Norm, rotation, gate, KV blocks and attention in compiled code, against the plain versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.rms_norm.reference import rms_norm
from kernels.rope.reference import rope, turns_table
from kernels.silu_mul.reference import silu_mul
from tests.kernels.native_ops import BLOCK_TOKENS, Array, bits, need_native, ops, to_bf16

need_native()

GROUPS, DIMS = (1, 3, 7, 12, 16), (16, 64, 80, 128, 256)


def _normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("size", [16, 64, 80, 576, 1536])
def test_rms_norm_equals_the_reference(size: int) -> None:
    """Rows of ordinary, small and large size; eps counts where a row is nearly nothing."""
    x = _normal(4, size) * np.array([[1], [1e-3], [100], [0]], np.float32)
    weight = _normal(size, seed=1)

    got = ops().rms_norm(x, weight, 1e-5)

    want = rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-5, torch.float32).numpy()
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-9)
    assert (got[3] == 0).all()
    alone = np.concatenate([ops().rms_norm(x[i : i + 1], weight, 1e-5) for i in range(4)])
    assert np.array_equal(bits(got), bits(alone))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", DIMS)
def test_rope_equals_the_reference_in_both_pairings(interleaved: bool, dim: int) -> None:
    """Positions near and far; norms of heads stay."""
    positions = torch.tensor([0, 1, 77, 4095])
    turns = turns_table(4096, dim, 10000.0, 1.0, None)[positions]
    x = _normal(4, 3, dim)
    cosines, sines = turns.real.contiguous().numpy(), turns.imag.contiguous().numpy()

    got = ops().rope(x, cosines, sines, interleaved)

    pairing = "interleaved" if interleaved else "halves"
    want = rope(torch.from_numpy(x), turns.unsqueeze(1), pairing).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert np.array_equal(got[0], x[0])


def test_silu_mul_equals_the_reference_up_to_extremes() -> None:
    """±200 neither overflows nor becomes NaN; NaN stays NaN, in its own place only."""
    gate = np.concatenate([np.linspace(-90, 90, 1440), [200, -200, 1e30, -1e30, 0, -0.0, np.nan, 1] * 2])
    gate = gate.astype(np.float32)
    up = _normal(gate.size)

    got = ops().silu_mul(gate, up)

    joined = torch.from_numpy(np.concatenate([gate, up])).unsqueeze(0)
    want = silu_mul(joined)[0].numpy()
    nan = np.isnan(gate)
    assert np.array_equal(np.isnan(got), nan)
    # The exponential is held at e^88, so a gate below -88 leaves 1e-38 of itself in place of less.
    bound = 1e-6 * np.abs(want) + 1e-38 * np.abs(gate.astype(np.float64) * up)
    assert (np.abs(got - want.astype(np.float64))[~nan] <= bound[~nan]).all()


def test_a_block_holds_keys_and_values_in_its_documented_places() -> None:
    """Keys as [dim / 2][16 tokens][2], values as [8 pairs][dim][2]; nothing else is touched."""
    kv_heads, dim = 3, 32
    layer = np.full(2 * BLOCK_TOKENS * kv_heads * dim, 0xABCD, np.uint16)
    keys, values = _normal(kv_heads, dim), _normal(kv_heads, dim, seed=1)

    ops().kv_write(layer, 5, keys, values)

    half = layer.size // 2
    stored = (layer[:half].reshape(kv_heads, dim // 2, 16, 2), layer[half:].reshape(kv_heads, 8, dim, 2))
    raw = [bits(to_bf16(x)) >> 16 for x in (keys, values)]
    assert np.array_equal(stored[0][:, :, 5].reshape(kv_heads, dim), raw[0])
    assert np.array_equal(stored[1][:, 2, :, 1], raw[1])
    assert (layer == 0xABCD).sum() >= layer.size - 2 * kv_heads * dim


def test_what_cannot_be_rounded_is_kept_in_kind() -> None:
    """NaN is stored as NaN, infinity as infinity, and what rounds up to infinity as that; ties go to even."""
    values = np.array([[np.nan, np.inf, -np.inf, 3.4e38, 1.00390625, 1.01171875, -0.0, 1e-45] * 2], np.float32)
    layer = np.zeros(2 * BLOCK_TOKENS * 16, np.uint16)

    ops().kv_write(layer, 0, values, values)

    stored = (layer[BLOCK_TOKENS * 16 :].reshape(8, 16, 2)[0, :8, 0].astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(stored[0])
    assert list(stored[1:7]) == [np.inf, -np.inf, np.inf, 1.0, 1.015625, 0.0]
    assert np.signbit(stored[6])


class Context:
    """Keys and values of some tokens in scattered blocks of a pool that is NaN elsewhere."""

    def __init__(self, kv_heads: int, dim: int, tokens: int, seed: int = 0) -> None:
        self.kv_heads, self.dim, self.tokens = kv_heads, dim, tokens
        self.keys = _normal(tokens, kv_heads, dim, seed=seed)
        self.values = _normal(tokens, kv_heads, dim, seed=seed + 1)
        count = -(-tokens // BLOCK_TOKENS)
        self.pool = np.full((2 * count + 1, 2 * BLOCK_TOKENS * kv_heads * dim), 0xFFFF, np.uint16)
        self.blocks = np.arange(2 * count, 0, -2, dtype=np.int32)
        for at in range(tokens):
            self.write(at)

    def write(self, at: int) -> None:
        """Write one token."""
        ops().kv_write(self.pool[self.blocks[at // 16]], at % 16, self.keys[at], self.values[at])

    def attend(self, head: int, positions: list[int] | Array, q: Array) -> Array:
        """Attend with rows of one KV head."""
        return ops().attention(self.pool, self.blocks, self.kv_heads, head, np.array(positions, np.int64), q)

    def expected(self, head: int, positions: list[int] | Array, q: Array) -> Array:
        """Return the same in float64, from what is stored: bfloat16 queries, keys and values."""
        keys, values = (to_bf16(x[:, head]).astype(np.float64) for x in (self.keys, self.values))
        out = []
        for row, position in zip(to_bf16(q).astype(np.float64), positions, strict=True):
            scores = keys[: position + 1] @ row / np.sqrt(self.dim)
            weights = np.exp(scores - scores.max())
            out.append(weights / weights.sum() @ values[: position + 1])
        return np.stack(out)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_attention_equals_the_plain_one(group: int, dim: int) -> None:
    """Contexts of 1 to 300 tokens around the borders of blocks and tiles, in blocks that are NaN where unused.

    What is left is the rounding of weights to bfloat16: 2^-8 of values of size 1.
    """
    for tokens in (1, 2, 15, 16, 17, 63, 64, 65, 200, 300):
        context = Context(2, dim, tokens, seed=tokens)
        q = _normal(group, dim, seed=3) * 2
        for head in range(2):
            got = context.attend(head, [tokens - 1] * group, q)
            want = context.expected(head, [tokens - 1] * group, q)
            assert np.abs(got - want).max() < 2.0**-7 * np.abs(context.values).max(), (tokens, head)
            assert np.abs(got - want).mean() < 2.0**-9


def test_rows_of_a_prompt_see_their_own_past_alone() -> None:
    """Positions 0 to 129 in one call, each against its own reference."""
    context = Context(1, 64, 130)
    q = _normal(130, 64, seed=3)
    positions = np.arange(130)

    got = context.attend(0, positions, q)

    assert np.abs(got - context.expected(0, positions, q)).max() < 2.0**-6
    np.testing.assert_allclose(got[0], to_bf16(context.values[0, 0]), rtol=1e-6)


@pytest.mark.parametrize("dim", [16, 80, 128])
def test_a_row_has_the_same_bits_alone_and_in_any_chunk(dim: int) -> None:
    """Rows of a prompt of 140 tokens: one by one while later tokens are not there yet, and in runs of many lengths."""
    whole = Context(2, dim, 140)
    q = _normal(140, dim, seed=3)
    growing = Context(2, dim, 1)
    growing.keys, growing.values, growing.pool, growing.blocks = (
        whole.keys, whole.values, np.full_like(whole.pool, 0xFFFF), whole.blocks,
    )  # fmt: skip
    one_by_one = []
    for at in range(140):
        growing.write(at)
        one_by_one.append(growing.attend(1, [at], q[at : at + 1])[0])

    for run in (2, 3, 5, 11, 12, 13, 64, 140):
        for first in range(0, 140, run):
            positions = np.arange(first, min(140, first + run))
            got = whole.attend(1, positions, q[first : first + len(positions)])
            assert np.array_equal(bits(got), bits(np.stack(one_by_one)[positions])), (run, first)


def test_garbage_in_unused_places_does_not_count() -> None:
    """NaN, infinities and large numbers after the last token give the same bits as zeros there."""
    q = _normal(3, 64, seed=3)
    for tokens in (1, 5, 16, 47, 65):
        results = []
        for garbage in (0x0000, 0xFFFF, 0x7F80, 0xFF80, 0x7F7F):
            context = Context(2, 64, tokens)
            context.pool[...] = garbage
            for at in range(tokens):
                context.write(at)
            results.append(bits(context.attend(1, [tokens - 1] * 3, q)))
        assert all(np.array_equal(results[0], other) for other in results[1:]), tokens


def test_scores_of_any_size_are_numbers() -> None:
    """Scores far beyond what an exponential holds choose one token; equal scores give the mean."""
    context = Context(1, 16, 70)
    context.keys[...] = 0
    context.keys[66] = 100
    for at in range(70):
        context.write(at)

    chosen = context.attend(0, [69], np.full((1, 16), 100, np.float32))[0]
    mean = context.attend(0, [69], np.zeros((1, 16), np.float32))[0]
    avoided = context.attend(0, [69], np.full((1, 16), -100, np.float32))[0]

    np.testing.assert_allclose(chosen, to_bf16(context.values[66, 0]), rtol=1e-6)
    np.testing.assert_allclose(mean, to_bf16(context.values[:, 0]).mean(axis=0), atol=2e-6)
    np.testing.assert_allclose(avoided, np.delete(to_bf16(context.values[:, 0]), 66, 0).mean(axis=0), atol=1e-3)


def test_a_poisoned_token_reaches_the_rows_that_see_it() -> None:
    """NaN in a key or a value is seen by rows at and after it; earlier rows of other calls are not."""
    for part in ("keys", "values"):
        context = Context(1, 32, 100)
        q = _normal(1, 32, seed=3)
        want = context.attend(0, [49], q)
        getattr(context, part)[50, 0, 7] = np.nan
        context.write(50)

        assert np.isnan(context.attend(0, [50], q)).any()
        assert np.isnan(context.attend(0, [99], q)).any()
        assert np.array_equal(bits(context.attend(0, [49], q)), bits(want))


@pytest.mark.xfail(reason="weights of 0 are multiplied with values of later tokens of the same run")
def test_a_poisoned_token_does_not_reach_earlier_rows_of_its_own_run() -> None:
    """A wrong guess that makes NaN must not take the token before it along."""
    context = Context(1, 32, 60)
    context.values[50, 0, 7] = np.nan
    context.write(50)
    q = _normal(2, 32, seed=3)

    together = context.attend(0, [49, 50], q)

    assert np.array_equal(bits(together[:1]), bits(context.attend(0, [49], q[:1])))
