"""Ops on single rows: as the plain versions, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch
from triton_cases import DTYPES, assert_close, assert_same_bits, noise, on_device

from kernels.kv_write import triton as kv_write_triton
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rms_norm import triton as rms_norm_triton
from kernels.rope import reference as rope_reference
from kernels.rope import triton as rope_triton
from kernels.silu_mul import reference as silu_mul_reference
from kernels.silu_mul import triton as silu_mul_triton

ROWS = [0, 1, 3, 17]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 48, 65])
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_is_the_plain_one(rows: int, hidden: int, dtype: torch.dtype) -> None:
    """Odd widths too; x stays as it is."""
    x, weight = noise(rows, hidden) * 3, noise(hidden, seed=2)
    given = on_device(x)

    got = rms_norm_triton.rms_norm(given, on_device(weight), 1e-5, dtype)

    assert_close(got, rms_norm_reference.rms_norm(x.clone(), weight, 1e-5, dtype))
    assert_same_bits(given, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_to_the_residual_stream_first(dtype: torch.dtype) -> None:
    """The sum is in place and exact as float32 has it; rows with a stride work, and what lies between stays."""
    wide, weight, add = noise(5, 60), noise(48, seed=2), noise(5, 48, dtype=dtype, seed=3)
    given, want_x = on_device(wide), wide[:, :48].clone()

    got = rms_norm_triton.rms_norm(given[:, :48], on_device(weight), 1e-5, dtype, on_device(add))
    want = rms_norm_reference.rms_norm(want_x, weight, 1e-5, dtype, add)

    assert_close(got, want)
    assert_same_bits(given[:, :48], want_x)
    assert_same_bits(given[:, 48:], wide[:, 48:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ffn", [1, 40, 1025])
@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul_is_the_plain_one(rows: int, ffn: int, dtype: torch.dtype) -> None:
    """Large gates of either sign give 0 and the gate itself, without overflow."""
    x = (noise(rows, 2 * ffn) * 30).to(dtype)

    got = silu_mul_triton.silu_mul(on_device(x))

    assert_close(got, silu_mul_reference.silu_mul(x), roundings=2)


@pytest.mark.parametrize("pairing", ["interleaved", "halves"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(0, 2, 8), (1, 1, 2), (5, 3, 24), (17, 2, 64)])
def test_rope_is_the_plain_one(rows: int, heads: int, dim: int, dtype: torch.dtype, pairing: str) -> None:
    """On a slice of a wider tensor, as queries and keys lie beside values."""
    wide = noise(rows, heads + 2, dim, dtype=dtype)
    turns = rope_reference.turns_table(2000, dim, 10_000.0)[torch.arange(rows) * 97].unsqueeze(1)

    got = rope_triton.rope(on_device(wide)[:, :heads], on_device(turns), pairing)

    assert_close(got, rope_reference.rope(wide[:, :heads], turns, pairing))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_kv_write_touches_only_its_lines(tokens: int, dtype: torch.dtype) -> None:
    """Keys and values arrive at their slots bit for bit; all other lines keep their NaN."""
    lines = on_device(torch.full((200, 24), float("nan"), dtype=dtype))
    kv = noise(tokens, 2, 24, dtype=dtype)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(4))[: 2 * tokens].view(tokens, 2)

    kv_write_triton.kv_write(lines, on_device(slots), on_device(kv))

    assert_same_bits(lines.cpu()[slots], kv)
    rest = torch.ones(200, dtype=torch.bool)
    rest[slots.flatten()] = False
    assert lines.cpu()[rest].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    """For all ops on rows; a row of NaN beside it changes nothing."""
    rows = 9
    x, weight, add = noise(rows, 48) * 3, on_device(noise(48, seed=2)), noise(rows, 48, dtype=dtype, seed=3)
    gates, heads = noise(rows, 80, dtype=dtype), noise(rows, 3, 16, dtype=dtype)
    turns = rope_reference.turns_table(rows, 16, 100.0).unsqueeze(1)
    for poisoned in (x, add, gates, heads):
        poisoned[rows - 1] = float("nan")

    def compute(part: slice) -> list[torch.Tensor]:
        stream = on_device(x[part])
        return [
            rms_norm_triton.rms_norm(stream, weight, 1e-5, dtype, on_device(add[part])),
            stream,
            silu_mul_triton.silu_mul(on_device(gates[part])),
            rope_triton.rope(on_device(heads[part]), on_device(turns[part]), "interleaved"),
            rope_triton.rope(on_device(heads[part]), on_device(turns[part]), "halves"),
        ]

    together = compute(slice(None))

    for row in range(rows - 1):
        for alone, among in zip(compute(slice(row, row + 1)), together, strict=True):
            assert_same_bits(alone[0], among[row])


def test_what_a_kernel_would_misread_is_refused() -> None:
    """Strides, types and names that the kernels do not know."""
    x = on_device(noise(4, 8))

    with pytest.raises(ValueError, match="contiguous"):
        rms_norm_triton.rms_norm(x.T, x[0, :4].contiguous(), 1e-5, torch.float32)
    with pytest.raises(ValueError, match="float32"):
        rms_norm_triton.rms_norm(x.bfloat16(), x[0], 1e-5, torch.float32)
    with pytest.raises(ValueError, match="side by side"):
        silu_mul_triton.silu_mul(x[:, :7])
    with pytest.raises(ValueError, match="quarters"):
        rope_triton.rope(x.view(4, 1, 8), torch.zeros(4, 1, 4, dtype=torch.complex64), "quarters")
    with pytest.raises(ValueError, match="holds torch.float32"):
        kv_write_triton.kv_write(x, torch.zeros(1, 2, dtype=torch.int64), x[:2].view(1, 2, 8).bfloat16())
