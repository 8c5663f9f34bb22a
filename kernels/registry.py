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

WhyNot = Callable[[str, str], str]  # (op, implementation) → why it cannot run here, or an empty text


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


def why_not(op: str, implementation: str) -> str:
    """Return why an implementation cannot run in this process, or an empty text if it can.

    For `native` this builds the compiled kernels if they are not built yet.
    """
    match implementation:
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
            return "" if gpu_present() or interpreting() else "no GPU, and TRITON_INTERPRET is not set"
        case _:
            return ""


def choose(text: str, reason: WhyNot, gpu: bool) -> dict[str, str]:
    """Decide for every op, given the text of the override.

    Args:
        text: `op=implementation,…`; may be empty.
        reason: why an implementation cannot run; asked only about those that matter.
        gpu: whether a GPU is present; then triton is the default where it can run.

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
            order = ("triton", "native") if gpu else ("native",)
            chosen[op] = next((name for name in order if not reason(op, name)), "reference")
    return chosen


@functools.cache
def resolve() -> Mapping[str, str]:
    """Return the implementation of every op, the same for the life of the process.

    Raises:
        KernelChoiceError: see `choose`.
    """
    return MappingProxyType(choose(os.environ.get(VARIABLE, ""), why_not, gpu_present()))


def load(op: str) -> ModuleType:
    """Import and return the module of an op's implementation; of `native`, the library's if the op has none.

    Raises:
        KeyError: no such op.
        KernelChoiceError: see `choose`.
    """
    return _module(op, resolve()[op])


def load_torch(op: str, device: str) -> ModuleType:
    """Import and return what computes an op on torch tensors: triton or reference, for whoever runs without `native`.

    Args:
        device: type of the device where the tensors lie, such as "cpu".

    Raises:
        KeyError: no such op.
        KernelChoiceError: see `choose`; or triton was asked for and cannot compute on that device.
    """
    implementation = resolve()[op]
    if implementation == "triton" and device == "cpu" and not interpreting():
        if any(part.replace(" ", "") in (f"{op}=triton", "all=triton") for part in _override()):
            raise KernelChoiceError(f"{op}=triton", "the tensors lie on the CPU; set TRITON_INTERPRET=1 to test there")
        implementation = "reference"
    return _module(op, "reference" if implementation == "native" else implementation)


def _override() -> list[str]:
    return os.environ.get(VARIABLE, "").split(",")


def _module(op: str, implementation: str) -> ModuleType:
    name = f"kernels.{op}.{implementation}"
    if implementation == "native" and importlib.util.find_spec(name) is None:
        name = "kernels.native"
    return importlib.import_module(name)
