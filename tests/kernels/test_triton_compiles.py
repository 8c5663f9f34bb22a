"""Every Triton kernel becomes machine code for a GPU, on a machine without one: an interpreter refuses less."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.decode_attention.triton import decode_attention
from kernels.kv_write.triton import kv_write
from kernels.linear import GroupedWeight
from kernels.linear import triton as linear_triton
from kernels.prefill_attention.triton import prefill_attention
from kernels.rms_norm.triton import rms_norm
from kernels.rope.triton import rope
from kernels.sampling import Request
from kernels.sampling.triton import sample
from kernels.silu_mul.triton import silu_mul

pytestmark = pytest.mark.slow

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip
BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Launches compile for compute capability 9.0 instead of running; the results, by the kernel's name."""
    kernels: dict[str, Any] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {key: named.pop(key) for key in ("num_warps", "enable_fp_fusion")}
        bound = dict(zip(self.arg_names, args, strict=False)) | named
        constants = {p.name: bound[p.name] for p in self.params if p.is_constexpr}
        signature = {p.name: "constexpr" if p.is_constexpr else _kind(bound[p.name]) for p in self.params}
        source = ASTSource(self, signature, constants)
        kernels[self.fn.__name__] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", run)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    yield kernels


def _kind(value: torch.Tensor | float | int) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _layouts(kernel: Any) -> set[str]:
    """Return how the operands and results of matrix units are spread over threads."""
    return {line.partition(" = ")[2] for line in kernel.asm["ttgir"].splitlines() if line.startswith("#mma")}


def test_ops_on_rows_compile(compiled: dict[str, Any]) -> None:
    """Norm with a residual, both pairings, the gate and the scatter."""
    rms_norm(torch.zeros(3, 64), torch.zeros(64), 1e-5, BF16, torch.zeros(3, 64, dtype=BF16))
    silu_mul(torch.zeros(3, 64, dtype=BF16))
    kv_write(torch.zeros(64, 32, dtype=BF16), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2, 32, dtype=BF16))
    for pairing in ("interleaved", "halves"):
        rope(torch.zeros(3, 2, 64, dtype=BF16), torch.zeros(3, 1, 32, dtype=torch.complex64), pairing)

    assert set(compiled) == {"_rms_norm", "_silu_mul", "_kv_write", "_rope"}
    assert all(kernel.asm["cubin"] for kernel in compiled.values())


@pytest.mark.parametrize("packed", [True, False])
def test_products_compile_to_matrix_units(compiled: dict[str, Any], packed: bool) -> None:
    """Dense bfloat16, integers in groups, and integers on both sides."""
    x, scale = torch.zeros(3, 64, dtype=BF16), torch.zeros(32, 2, dtype=torch.float16)
    q = torch.zeros(32, 32, dtype=torch.uint8) if packed else torch.zeros(32, 64, dtype=torch.int8)
    weight = GroupedWeight(q, scale, scale)

    linear_triton.linear(x, torch.zeros(32, 64, dtype=BF16))
    linear_triton.linear_grouped(x, weight)
    linear_triton.linear_grouped_int(x, weight, 16)

    assert set(compiled) == {"_linear", "_grouped", "_grouped_int"}
    for kernel in compiled.values():
        assert "mma" in kernel.asm["ptx"]
    assert ".s32.s8.s8.s32" in compiled["_grouped_int"].asm["ptx"]


def test_attention_compiles_to_one_layout_without_fused_sums(compiled: dict[str, Any]) -> None:
    """Prefill and decode spread a tile over threads alike and round every product, so that bits can agree."""
    pool, tables = torch.zeros(9, 2, 16, 2, 64, dtype=BF16), torch.zeros(5, 4, dtype=torch.int32)

    prefill_attention(torch.zeros(5, 6, 64, dtype=BF16), pool, tables[:1], [0, 5], [3])
    decode_attention(torch.zeros(5, 6, 64, dtype=BF16), pool, tables, [3] * 5)

    assert set(compiled) == {"_prefill", "_attend", "_merge"}
    assert _layouts(compiled["_prefill"]) == _layouts(compiled["_attend"]) != set()
    for kernel in compiled.values():
        assert "fma.rn" not in kernel.asm["ptx"]


def test_sampling_compiles(compiled: dict[str, Any]) -> None:
    """Edits and draws."""
    request = Request(presence_penalty=1.0, output_ids=[3], logit_bias={4: 1.0}, top_k=5, top_p=0.9)

    # Nothing runs, so the results are whatever lay in memory.
    with contextlib.suppress(IndexError):
        sample(torch.zeros(2, 50), [request, Request()])

    assert set(compiled) == {"_fill", "_edit", "_choose"}
    assert all(kernel.asm["cubin"] for kernel in compiled.values())
