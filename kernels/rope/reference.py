"""Rotary embedding as one complex multiplication."""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, turns: torch.Tensor, pairing: str = "interleaved") -> torch.Tensor:
    """Turn the pairs of x `[tokens, heads, head_dim]` by `turns` `[tokens, 1, head_dim / 2]` (complex64).

    Args:
        pairing: "interleaved": elements 2i and 2i+1 are a pair; "halves": elements i and i + head_dim / 2 are.

    Raises:
        ValueError: another pairing.
    """
    half = x.shape[-1] // 2
    match pairing:
        case "interleaved":
            pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], half, 2))  # [tokens, heads, head_dim / 2]
            return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
        case "halves":
            pairs = torch.complex(x[..., :half].float(), x[..., half:].float())
            turned = torch.view_as_real(pairs * turns)  # [tokens, heads, head_dim / 2, 2]
            return torch.cat((turned[..., 0], turned[..., 1]), dim=-1).to(x.dtype)
    raise ValueError(f"pairing {pairing!r} is neither 'interleaved' nor 'halves'")


def turns_table(
    num_positions: int, head_dim: int, theta: float, scale: float = 1.0, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `exp(i · position · freq)` as complex64 `[num_positions, head_dim / 2]`.

    Args:
        scale: linear position scaling; positions are divided by it.
        factors: per-pair divisors of the frequencies `[head_dim / 2]` (the `rope_freqs` tensor of Llama 3 files).
    """
    freqs = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if factors is not None:
        freqs = freqs / factors.double()
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64) / scale, freqs)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
