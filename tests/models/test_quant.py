"""Quantized bytes to values and to integers with scales, against the reference of the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from models.gguf import TENSOR_TYPES
from models.quant import FLOAT_KINDS, KINDS, affine, all_finite, dequantize

NUMBERS = {kind: number for number, (kind, _, _) in TENSOR_TYPES.items()}
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "F16": (0,)}
QUANTIZED = [kind for kind in KINDS if kind not in FLOAT_KINDS]


def seeded(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random bytes `[nbytes]` of a matrix whose scales are ordinary numbers."""
    per_block, nbytes = KINDS[kind]
    raw = np.random.default_rng([seed, NUMBERS[kind]]).integers(0, 256, (rows * width // per_block, nbytes), np.uint8)
    for at in SCALES.get(kind, ()):
        raw[:, at + 1] = raw[:, at + 1] & 0x80 | 0x30  # random exponents would give NaN and infinity
    if kind in ("F32", "BF16"):
        raw[:, -1] = raw[:, -1] & 0x80 | 0x3F
    return raw.reshape(-1)


def reference(kind: str, raw: np.ndarray) -> np.ndarray:
    """Values by the gguf package, flat."""
    nbytes = KINDS[kind][1]
    number = gguf.GGMLQuantizationType(NUMBERS[kind])
    return np.asarray(gguf.quants.dequantize(raw.reshape(-1, nbytes), number)).reshape(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_the_reference_bit_for_bit(kind: str) -> None:
    """Every code, scale and minimum occurs in 64 × 1,024 random elements."""
    raw = seeded(kind, 64, 1024)

    got = dequantize(kind, raw, 64 * 1024)

    assert got.dtype == np.float32 and got.shape == (64 * 1024,)
    np.testing.assert_array_equal(got.view(np.uint32), reference(kind, raw).view(np.uint32))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_integers_with_scales_give_the_same_bits(kind: str) -> None:
    """The affine form loses nothing: its values are those of `dequantize`."""
    raw = seeded(kind, 48, 512, seed=1)

    made = affine(kind, raw, (48, 512))

    assert made is not None
    assert made.q.dtype == np.uint8 and made.q.shape == (48, 512)
    assert made.scale.shape == (48, 512 // made.group) and made.scale.dtype == np.float32
    assert made.group == (16 if kind == "Q6_K" else 32)
    assert (made.offset is not None) == (kind in ("Q4_1", "Q4_K", "Q5_K"))
    assert int(made.q.max()) < {"Q8_0": 256, "Q6_K": 64, "Q5_K": 32}.get(kind, 16)
    np.testing.assert_array_equal(made.values().reshape(-1), reference(kind, raw))


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than one slice has the values of its parts."""
    raw = seeded("Q5_K", 33, 512)
    whole = dequantize("Q5_K", raw, 33 * 512)
    monkeypatch.setattr("models.quant._SLICE", 1000)

    sliced = dequantize("Q5_K", raw, 33 * 512)
    made = affine("Q5_K", raw, (33, 512))

    assert made is not None
    np.testing.assert_array_equal(sliced, whole)
    np.testing.assert_array_equal(made.values().reshape(-1), whole)


@pytest.mark.parametrize("kind", sorted(FLOAT_KINDS))
def test_floats_have_no_integers(kind: str) -> None:
    """They are packed otherwise."""
    assert affine(kind, seeded(kind, 2, 32), (2, 32)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_no_number_is_seen(kind: str) -> None:
    """An infinite or NaN scale (or element) anywhere; ordinary bytes pass."""
    raw = seeded(kind, 8, 1024)
    per_block, nbytes = KINDS[kind]
    inside = SCALES.get(kind, (nbytes - 2,))[-1]
    infinite = {"F32": b"\x80\x7f", "BF16": b"\x80\x7f"}.get(kind, b"\x00\x7c")
    spoiled, nan = raw.copy(), raw.copy()
    at = (raw.size // nbytes - 1) * nbytes + inside
    spoiled[at : at + 2] = np.frombuffer(infinite, np.uint8)
    nan[at : at + 2] = np.frombuffer(b"\xff\xff", np.uint8)

    assert all_finite(kind, raw)
    assert not all_finite(kind, spoiled)
    assert not all_finite(kind, nan)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_do_not_fit_are_refused(kind: str) -> None:
    """One byte too many or too few, or an unknown kind."""
    raw = seeded(kind, 1, 256)

    for bad in (raw[:-1], np.append(raw, np.uint8(0))):
        with pytest.raises(ValueError, match="do not hold"):
            dequantize(kind, bad, 256)
    with pytest.raises(ValueError, match="not one of"):
        dequantize("Q2_K", raw, 256)
