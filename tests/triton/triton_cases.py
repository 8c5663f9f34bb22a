"""Inputs for kernels, the device where they run, and how closely results agree."""

from __future__ import annotations

import torch

from kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
DTYPES = (torch.float32, torch.bfloat16)

# Sums are float32 in both, in other orders. bfloat16 has 8 bits: results may be neighbours, and the interpreter's
# conversion cuts off where hardware rounds.
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-8}}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Return seeded normal numbers on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_device(x: torch.Tensor) -> torch.Tensor:
    """Return a copy where kernels run; writes to it do not reach x."""
    return x.detach().clone().to(DEVICE)


def assert_close(got: torch.Tensor, want: torch.Tensor, roundings: int = 1) -> None:
    """Compare with the tolerance of the type of `got`, in which it was rounded so many times."""
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(
        got.cpu().float(), want.float(), **{k: v * roundings for k, v in TOLERANCE[got.dtype].items()}
    )


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare bit for bit; NaN equals itself, and the two zeros differ."""
    kind = torch.int16 if got.element_size() == 2 else torch.int32
    assert torch.equal(got.contiguous().view(kind).cpu(), want.contiguous().view(kind).cpu())
