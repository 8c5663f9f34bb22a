"""Executes steps with the transformer in torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.model_runner import ModelRunner
from engine.plan import BatchPlan, Row, Sampled
from kernels.attention.reference import BLOCK_TOKENS
from kernels.kv_format import RAW, suffix
from kernels.sampling.reference import sample
from models import weights
from models.source import open_model
from models.transformer import Transformer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TorchRunner(ModelRunner):
    """The runner that needs no compiler, and in float32 the reference of the fast one."""

    def __init__(
        self, model_path: Path, dtype: str = "bfloat16", threads: int | None = None, kv_format: str = RAW
    ) -> None:
        """Load a model.

        Args:
            model_path: a GGUF file or a Hugging Face folder of a supported family.
            dtype: "bfloat16" or "float32", of weights, activations and KV.
            threads: intra-op threads of this process; None leaves torch's choice. Results do not depend on it.
            kv_format: what keys and values are rounded to, see `kernels.kv_format`; part of layout and numerics.

        Raises:
            ModelFileError: the file is corrupt or not supported.
            ValueError: an unknown dtype, or heads of this size cannot be rounded.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        if threads is not None:
            torch.set_num_threads(threads)
        with open_model(model_path) as source:
            config = source.config
            self._model = Transformer(config, weights.load(source, DTYPES[dtype]), kv_format)
            identity = source.fingerprint()
            self.eos_ids = source.eos_ids
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_context = self._model.max_context
        self.block_nbytes = self._model.block_nbytes
        self.layout = f"block,{config.num_layers},2,{BLOCK_TOKENS},{config.num_kv_heads},{config.head_dim},{dtype}"
        # Numerics: another torch or instruction set may round otherwise, and its blocks must not be mixed with ours.
        self.fingerprint = f"{identity}/{dtype}/torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}-1"
        # So do other kernels than the plain ones.
        self.fingerprint += "".join(f"/{each}" for each in self._model.ops.not_plain)
        self.layout += suffix(kv_format)
        self.fingerprint += suffix(kv_format)
        self._lines: torch.Tensor | None = None

    def bind(self, buffer: memoryview, num_blocks: int) -> None:
        """Use `num_blocks × block_nbytes` bytes of writable memory as the pool.

        Raises:
            ValueError: the buffer is read-only or too small.
        """
        need = self._check_buffer(buffer, num_blocks)
        flat = torch.frombuffer(buffer, dtype=self._model.dtype, count=need // self._model.dtype.itemsize)
        self._lines = flat.view(-1, self.config.kv_width)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute rows, write their KV, and return float32 logits `[sum of num_wanted, vocab]`."""
        assert self._lines is not None, "bind a pool first"
        return self._model.forward(rows, self._lines, [row.num_wanted for row in rows])

    @torch.inference_mode()
    def execute(self, plan: BatchPlan) -> list[Sampled]:
        """Compute one step; returns what `Row` asks for, in the order of rows."""
        if not plan.rows:
            return []
        logits = self.logits(plan.rows)
        return self._choose(plan.rows, logits.numpy(), sample)

    def warm_up(self) -> None:
        """Compute a short prompt and one decoded token on scratch blocks.

        Raises:
            ModelFileError: the model's output is not numbers.
        """
        bound = self._lines
        try:
            self._try_out()
        finally:
            self._lines = bound

    def close(self) -> None:
        """Let go of the pool, so that its map can be closed."""
        self._lines = None
