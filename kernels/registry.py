"""Which implementation computes each op in this process: decided once, by what the machine has or by the environment.

`HEADRACE_KERNELS=op=implementation,…` overrides single ops, `all=implementation` all of them (a later entry wins). An
override that names something unknown, or something that cannot run here, is an error; nothing falls back silently.
Importing this module imports neither torch nor triton, and touches no device.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Final

VARIABLE: Final = "HEADRACE_KERNELS"
OPS: Final = (
    "rms_norm", "rope", "silu_mul", "kv_write", "prefill_attention", "decode_attention", "linear", "sampling",
)  # fmt: skip
IMPLEMENTATIONS: Final = ("native", "reference", "triton")

WhyNot = Callable[[str, str], str]  # (op, implementation) → why it cannot run, or an empty text


class KernelChoiceError(ValueError):
    """Raised when an override names an op or implementation that does not exist, or cannot run on this machine."""

    def __init__(self, entry: str, reason: str) -> None:
        self.entry = entry
        self.reason = reason
        super().__init__(f"{VARIABLE}: {entry!r}: {reason}")


@functools.cache
def gpu_present() -> bool:
    """Tell whether a CUDA device answers, asking the driver's library alone."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def interpreting() -> bool:
    """Tell whether Triton is told to interpret its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def why_not(op: str, implementation: str, device: str = "cpu") -> str:
    """Return why an implementation cannot compute on a device in this process, or an empty text if it can.

    For `native` this builds the compiled kernels if they are not built yet.

    Args:
        device: where weights and pool lie: "cpu" or "cuda".
    """
    match implementation:
        case "native" if device != "cpu":
            return "compiled kernels compute on the CPU alone"
        case "native":
            # Compiled code stands in one library; an op has no module of its own unless its calls need one.
            native = importlib.import_module("kernels.native")
            return str(native.why_not())
        case "triton":
            missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
            if missing:
                return f"{' and '.join(missing)} not installed"
            if importlib.util.find_spec(f"kernels.{op}.triton") is None:
                return "not written for this op"
            if interpreting() or (device != "cpu" and gpu_present()):
                return ""
            return "the data lie on the CPU, and TRITON_INTERPRET is not set" if device == "cpu" else "no GPU answers"
        case _:
            return ""


def choose(text: str, reason: WhyNot, on_gpu: bool) -> dict[str, str]:
    """Decide for every op, given the text of the override.

    Args:
        text: `op=implementation,…`; may be empty.
        reason: why an implementation cannot run; asked only about those that matter.
        on_gpu: whether the data lie on a GPU; then triton is the default where it can run, else native.

    Raises:
        KernelChoiceError: an entry cannot be obeyed; the message lists what can.
    """
    chosen: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        op, _, implementation = (part.strip() for part in entry.partition("="))
        ops = OPS if op == "all" else (op,)
        if op != "all" and op not in OPS:
            raise KernelChoiceError(entry, f"no op {op!r}; there are {', '.join(OPS)}, and all")
        for each in ops:
            if implementation not in IMPLEMENTATIONS:
                why = f"no implementation {implementation!r}"
            elif not (why := reason(each, implementation)):
                chosen[each] = implementation
                continue
            found = ", ".join(name for name in IMPLEMENTATIONS if not reason(each, name))
            raise KernelChoiceError(entry, f"{why}; for {each} there are here: {found}")
    for op in OPS:
        if op not in chosen:
            fast = "triton" if on_gpu else "native"
            chosen[op] = "reference" if reason(op, fast) else fast
    return chosen


@functools.cache
def resolve(device: str = "cpu") -> Mapping[str, str]:
    """Return the implementation of every op, the same for the life of the process.

    Args:
        device: where weights and pool lie. That a machine has a GPU changes nothing for data on the CPU.

    Raises:
        KernelChoiceError: see `choose`.
    """

    def reason(op: str, implementation: str) -> str:
        return why_not(op, implementation, device)

    return MappingProxyType(choose(os.environ.get(VARIABLE, ""), reason, device != "cpu"))


def load(op: str, device: str = "cpu") -> ModuleType:
    """Import and return the module of an op's implementation; of `native`, the library's if the op has none.

    Raises:
        KeyError: no such op.
        KernelChoiceError: see `choose`.
    """
    return _module(op, resolve(device)[op])


def load_torch(op: str, device: str = "cpu") -> ModuleType:
    """Import and return what computes an op on torch tensors, for whoever runs without `native`: triton or reference.

    Compiled kernels are not built for this.

    Raises:
        KeyError: no such op.
        KernelChoiceError: see `choose`.
    """
    return _module(op, _resolve_torch(device)[op])


@functools.cache
def _resolve_torch(device: str) -> Mapping[str, str]:
    def reason(op: str, implementation: str) -> str:
        # Native gives way to the plain version below, so it is not asked whether it could be had.
        return "" if implementation == "native" and device == "cpu" else why_not(op, implementation, device)

    chosen = choose(os.environ.get(VARIABLE, ""), reason, device != "cpu")
    return {op: "reference" if name == "native" else name for op, name in chosen.items()}


def _module(op: str, implementation: str) -> ModuleType:
    name = f"kernels.{op}.{implementation}"
    if implementation == "native" and importlib.util.find_spec(name) is None:
        name = "kernels.native"
    return importlib.import_module(name)
