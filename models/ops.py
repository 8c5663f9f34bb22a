"""The ops of a torch transformer, as the registry chose them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels import registry

_USED = ("rms_norm", "rope", "silu_mul", "kv_write", "prefill_attention", "decode_attention", "linear")


class RmsNorm(Protocol):
    """`kernels.rms_norm`."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, add: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class Rope(Protocol):
    """`kernels.rope`."""

    def __call__(self, x: torch.Tensor, turns: torch.Tensor, pairing: str) -> torch.Tensor: ...


class SiluMul(Protocol):
    """`kernels.silu_mul`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class KvWrite(Protocol):
    """`kernels.kv_write`."""

    def __call__(self, lines: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None: ...


class PrefillAttention(Protocol):
    """`kernels.prefill_attention`."""

    def __call__(
        self, q: torch.Tensor, pool: torch.Tensor, tables: torch.Tensor, begins: Sequence[int], starts: Sequence[int]
    ) -> torch.Tensor: ...


class DecodeAttention(Protocol):
    """`kernels.decode_attention`."""

    def __call__(
        self, q: torch.Tensor, pool: torch.Tensor, tables: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor: ...


class Linear(Protocol):
    """`kernels.linear`, with a dense weight."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, min_rows: int, max_rows: int | None
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each op, and what they are."""

    rms_norm: RmsNorm
    rope: Rope
    silu_mul: SiluMul
    kv_write: KvWrite
    prefill_attention: PrefillAttention
    decode_attention: DecodeAttention
    linear: Linear
    not_plain: tuple[str, ...]  # "op=implementation" of all that are not the plain versions

    @property
    def plain_attention(self) -> bool:
        """Tell whether both kinds of attention are the plain ones."""
        return not any("attention" in each for each in self.not_plain)


def torch_ops() -> Ops:
    """Return the ops that the registry chose for torch tensors on the CPU.

    Raises:
        KernelChoiceError: the override of kernels cannot be obeyed, or parts prefill from decode attention.
    """
    modules = {op: registry.load_torch(op) for op in _USED}
    kinds = {op: module.__name__.rpartition(".")[2] for op, module in modules.items()}
    if kinds["prefill_attention"] != kinds["decode_attention"]:
        raise registry.KernelChoiceError(
            f"prefill_attention={kinds['prefill_attention']},decode_attention={kinds['decode_attention']}",
            "a position must have the same bits prefilled and decoded, so both are computed by one implementation",
        )
    return Ops(
        **{op: getattr(module, op) for op, module in modules.items()},
        not_plain=tuple(f"{op}={kind}" for op, kind in kinds.items() if kind != "reference"),
    )
