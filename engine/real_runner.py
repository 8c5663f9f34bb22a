"""Which runner computes a real model here: the compiled one where it can, the one in torch elsewhere."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.cores import CoreShare
from engine.model_runner import ModelRunner
from kernels import registry
from kernels.kv_format import RAW
from kernels.native import BuildError


def load_runner(
    model: Path,
    *,
    engine: str,
    dtype: str,
    threads: int,
    cache: Path | None,
    now: Callable[[], float] | None = None,
    kv_format: str = RAW,
) -> ModelRunner:
    """Load a model into the runner that `engine` asks for.

    Args:
        model: a GGUF file or a Hugging Face folder.
        engine: "native", "torch", or "auto": native if this machine, the model's sizes, `dtype` and the override of
            kernels allow it, else torch.
        dtype: "auto", or the arithmetic of the torch runner: "bfloat16" or "float32".
        threads: of the engine.
        cache: directory of packed weights.
        now: monotonic seconds, the same in all processes of the machine, to share its cores with other engines; None:
            all threads in every step.
        kv_format: what keys and values are rounded to: "raw" (not at all), "int8" or "fp8".

    Raises:
        ModelFileError: the file is corrupt or not supported.
        BuildError: native was asked for and cannot be had here.
        Unpackable: native was asked for and cannot hold the model.
        ValueError: heads of this size cannot be rounded.
        KernelChoiceError: the override of kernels cannot be obeyed.
    """
    if engine == "native" or (engine == "auto" and dtype == "auto" and set(registry.resolve().values()) == {"native"}):
        from engine.native_runner import NativeRunner
        from models.packed import Unpackable

        try:
            return NativeRunner(model, threads, cache, _cores(threads, now), kv_format=kv_format)
        except (Unpackable, BuildError):
            if engine == "native":
                raise
    # Read by OpenMP when torch is loaded. Idle threads that spin take the cores from the other engines and from the
    # actors: with three engines on two cores a start took twice as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from engine.torch_runner import TorchRunner

    return TorchRunner(model, "bfloat16" if dtype == "auto" else dtype, threads, kv_format)


def _cores(threads: int, now: Callable[[], float] | None) -> CoreShare | None:
    """Return the share of this machine's cores; None where there is nothing to share."""
    if threads == 1 or now is None:
        return None
    try:
        return CoreShare(
            Path(tempfile.gettempdir()) / f"headrace-cores-{os.getuid()}", len(os.sched_getaffinity(0)), now
        )
    except OSError:
        return None
