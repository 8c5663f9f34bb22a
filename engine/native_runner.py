"""Executes steps with the compiled kernels. Never imports torch: an engine starts in a moment and stays small."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.cores import CoreShare, useful_threads
from engine.model_runner import ModelRunner
from engine.plan import BatchPlan, Row, Sampled
from kernels.kv_format import RAW, suffix
from kernels.sampling.native import sample
from models import packed
from models.native import BLOCK_TOKENS, COARSE_BELOW, NativeTransformer
from models.quant import checked
from models.source import open_model

_PAGE = 4096


class NativeRunner(ModelRunner):
    """The fast runner on a CPU: packed weights, integer activations, bfloat16 KV, every sum in a fixed order."""

    def __init__(
        self,
        model_path: Path,
        threads: int = 1,
        cache: Path | None = None,
        cores: CoreShare | None = None,
        coarse_below: float = COARSE_BELOW,
        kv_format: str = RAW,
    ) -> None:
        """Load a model.

        Args:
            model_path: a GGUF file or a Hugging Face folder of a supported family.
            threads: of this process's team. Results do not depend on it.
            cache: directory of packed weights; None packs into this process's own memory.
            cores: what the engines of this machine share; None: all threads in every step.
            coarse_below: how even a group of activations is that gets 8 bits, see `NativeTransformer`.
            kv_format: what keys and values are rounded to, see `kernels.kv_format`; part of layout and numerics.

        Raises:
            ModelFileError: the file is corrupt or not supported.
            Unpackable: the compiled kernels cannot hold a model of these sizes.
            BuildError: the compiled kernels cannot be had here.
            ValueError: heads of this size cannot be rounded.
        """
        with open_model(model_path) as source:
            identity = source.fingerprint()
            weights = packed.load(source.config, functools.partial(checked, source), identity, cache)
            self.config = source.config
            self.eos_ids = source.eos_ids
        self._model = NativeTransformer(self.config, weights, threads, coarse_below=coarse_below, kv_format=kv_format)
        self._threads = threads
        self._cores = cores
        if cores is not None:
            self._model.share(*cores.shared)
        self._allowed = threads
        self._weight_nbytes = weights.nbytes
        config = self.config
        self.vocab_size = config.vocab_size
        self.max_context = self._model.max_context
        self.block_nbytes = self._model.block_nbytes
        self.layout = f"native-1,{config.num_layers},{BLOCK_TOKENS},{config.num_kv_heads},{config.head_dim},bfloat16"
        self.layout += suffix(kv_format)
        self.fingerprint = f"{identity}/native-3-{coarse_below:g}-{packed.VERSION}-{self._model.instruction_set}"
        self.fingerprint += suffix(kv_format)
        self._sample = functools.partial(sample, team=self._model.team)
        self._pool: npt.NDArray[np.uint8] | None = None

    def bind(self, buffer: memoryview, num_blocks: int) -> None:
        """Use `num_blocks × block_nbytes` bytes of writable memory as the pool; its pages are made at once.

        Raises:
            ValueError: the buffer is read-only or too small.
        """
        need = self._check_buffer(buffer, num_blocks)
        self._pool = np.frombuffer(buffer, dtype=np.uint8, count=need)
        # The first write to a page takes microseconds, and a token's keys and values touch three pages a layer.
        self._pool[::_PAGE] = self._pool[::_PAGE]

    def logits(self, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        """Compute rows, write their KV; return float32 logits `[sum of num_wanted, vocab]`, valid until the next."""
        assert self._pool is not None, "bind a pool first"
        threads = useful_threads(self._threads, sum(len(row.ids) for row in rows), self._weight_nbytes)
        wanted = [row.num_wanted for row in rows]
        return self._model.forward(rows, int(self._pool.ctypes.data), wanted, min(threads, self._allowed))

    def execute(self, plan: BatchPlan) -> list[Sampled]:
        """Compute one step; returns what `Row` asks for, in the order of rows."""
        if not plan.rows:
            return []
        if self._cores is None:
            return self._choose(plan.rows, self.logits(plan.rows), self._sample)
        self._allowed = self._cores.begin()
        try:
            return self._choose(plan.rows, self.logits(plan.rows), self._sample)
        finally:
            self._cores.end()

    def warm_up(self) -> None:
        """Compute a short prompt and one decoded token on scratch blocks.

        Raises:
            ModelFileError: the model's output is not numbers.
        """
        bound = self._pool
        try:
            self._try_out()
        finally:
            self._pool = bound

    def close(self) -> None:
        """Let go of the pool, so that its map can be closed, and end the threads."""
        self._pool = None
        self._model.close()
        if self._cores is not None:
            self._cores.close()
