"""A decoder on the compiled kernels: packed weights in, float32 logits out. Never imports torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels import kv_format as kv_formats
from kernels import native
from models.config import ModelConfig
from models.packed import PackedWeights
from models.run import Run

BLOCK_TOKENS = 16
# Most groups of a row are even: those without a value above so many root mean squares of the row get 8 bits in place of
# 16, but for the head, whose sums are the logits. By measurement, docs/decisions/004-native-kernels.md.
COARSE_BELOW = 4.0
FINE = frozenset({"embedding", "head"})
_POINTER = ctypes.c_void_p


class _Packed(ctypes.Structure):
    _fields_ = [
        ("data", _POINTER),
        *((name, ctypes.c_int32) for name in "outputs inputs kind group scale_bits has_offset zero".split()),
        ("coarse_below", ctypes.c_float),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in "attn_norm ffn_norm qkv_bias q_norm k_norm".split()),
        *((name, _Packed) for name in "qkv out gate_up down".split()),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in "layers heads kv_heads dim hidden ffn vocab interleaved".split()),
        ("eps", ctypes.c_float),
        ("positions", ctypes.c_int32),
        ("kv_format", ctypes.c_int32),
        *((name, _POINTER) for name in "cosines sines norm layer".split()),
        ("embedding", _Packed),
        ("head", _Packed),
    ]


class _Run(ctypes.Structure):
    _fields_ = [("start", ctypes.c_int64), ("tokens", ctypes.c_int32), ("wanted", ctypes.c_int32), ("blocks", _POINTER)]


class NativeTransformer:
    """Weights and the step over them. Not thread-safe: one step at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: PackedWeights,
        threads: int = 1,
        looks: int = 1500,
        coarse_below: float = COARSE_BELOW,
        kv_format: str = kv_formats.RAW,
    ) -> None:
        """Bind the kernels to packed weights.

        Args:
            config: sizes and flags.
            weights: as `models.packed.load` returns them; kept alive by this object.
            threads: of this model's team, the caller's included. Results do not depend on it.
            looks: how often a waiting thread looks before it sleeps (a few tens of nanoseconds each).
            coarse_below: groups of inputs below so many root mean squares of their row get 8 bits; 0: none.
            kv_format: what keys and values are rounded to, see `kernels.kv_format`.

        Raises:
            kernels.native.BuildError: the compiled kernels cannot be had here.
            ValueError: if heads of this size cannot be rounded.
        """
        self.config = config
        if kv_format != kv_formats.RAW:
            kv_formats.group_of(config.head_dim)
        self._library = native.library()
        self._library.hr_decoder_new.restype = _POINTER
        self._library.hr_decoder_team.restype = _POINTER
        self.instruction_set = native.instruction_set()
        self._weights = weights
        self._coarse_below = coarse_below
        factors = weights.vector("rope_factors") if config.rope_factors else None
        self._tables = _turns(config, factors)
        self._layers = (_Layer * config.num_layers)(*(self._layer(i) for i in range(config.num_layers)))
        head = "embedding" if config.tied_embeddings else "head"
        cosines, sines = self._tables
        self._model = _Model(
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            hidden=config.hidden,
            ffn=config.ffn,
            vocab=config.vocab_size,
            interleaved=int(config.rope_pairing == "interleaved"),
            eps=config.norm_eps,
            positions=config.context_length,
            kv_format=kv_formats.NUMBER[kv_format],
            cosines=cosines.ctypes.data,
            sines=sines.ctypes.data,
            norm=weights.address("norm"),
            layer=ctypes.addressof(self._layers),
            embedding=self._matrix("embedding"),
            head=self._matrix(head),
        )
        self._decoder = _POINTER(self._library.hr_decoder_new(ctypes.byref(self._model), threads, looks))
        self.threads = threads
        self.max_context = config.context_length
        self._logits = np.empty((0, config.vocab_size), dtype=np.float32)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block: layers × 2 × 16 tokens × kv_width, bfloat16."""
        return self.config.num_layers * 2 * BLOCK_TOKENS * self.config.kv_width * 2

    @property
    def team(self) -> int:
        """Address of the threads, for other ops of the same step."""
        return int(self._library.hr_decoder_team(self._decoder))

    def forward(
        self, runs: Sequence[Run], pool: int, wanted: Sequence[int], threads: int | None = None
    ) -> npt.NDArray[np.float32]:
        """Compute runs, write their keys and values, and return logits.

        Args:
            runs: at most one per sequence; ids inside the vocabulary, positions inside the context.
            pool: address of the first block.
            wanted: for each run, of how many of its last tokens logits are asked for.
            threads: how many of the team compute this step; None: all.

        Returns:
            float32 `[sum(wanted), vocab]`, valid until the next call.
        """
        tables = [np.array(run.blocks, dtype=np.int32) for run in runs]
        ids = np.array([token for run in runs for token in run.ids], dtype=np.int32)
        native_runs = (_Run * len(runs))(
            *(
                _Run(run.start, len(run.ids), count, table.ctypes.data)
                for run, count, table in zip(runs, wanted, tables, strict=True)
            )
        )
        rows = sum(wanted)
        if rows > len(self._logits):
            self._logits = np.empty((rows, self.config.vocab_size), dtype=np.float32)
        self._library.hr_decoder_step(
            self._decoder,
            native_runs,
            len(runs),
            _POINTER(ids.ctypes.data),
            _POINTER(pool),
            _POINTER(self._logits.ctypes.data),
            threads or self.threads,
        )
        return self._logits[:rows]

    def share(self, slots: int, count: int, own: int, cores: int, idle_after_s: float, dead_after_s: float) -> None:
        """Let long steps give cores up to other engines: `kernels/native/share.hpp` says what lies at address `slots`.

        The memory must stay mapped until `close`.
        """
        seconds = ctypes.c_double(idle_after_s), ctypes.c_double(dead_after_s)
        self._library.hr_decoder_share(self._decoder, _POINTER(slots), count, own, cores, *seconds)

    def close(self) -> None:
        """End the team's threads."""
        if self._decoder:
            self._library.hr_decoder_free(self._decoder)
            self._decoder = _POINTER(None)

    def _layer(self, index: int) -> _Layer:
        vectors = {
            name: self._weights.address(f"{index}.{name}") if f"{index}.{name}" in self._weights else None
            for name in "attn_norm ffn_norm qkv_bias q_norm k_norm".split()
        }
        return _Layer(**vectors, **{name: self._matrix(f"{index}.{name}") for name in "qkv out gate_up down".split()})

    def _matrix(self, name: str) -> _Packed:
        m = self._weights.matrix(name)
        coarse = 0.0 if name in FINE else self._coarse_below
        sizes = m.outputs, m.inputs, m.kind, m.group, m.scale_bits, m.has_offset, m.zero
        return _Packed(self._weights.address(name), *sizes, coarse)


def _turns(
    config: ModelConfig, factors: npt.NDArray[np.float32] | None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cosines and sines `[context, head_dim / 2]` of all positions."""
    freqs = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if factors is not None:
        freqs = freqs / factors.astype(np.float64)
    angles = np.outer(np.arange(config.context_length, dtype=np.float64) / config.rope_scale, freqs)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
