"""The compiled kernels as one library with a plain C interface, loaded by ctypes (which lets go of the GIL).

`HEADRACE_NATIVE=off` in the environment pretends that there is none. Never imports torch.
"""

from __future__ import annotations

import ctypes
import functools
import os

from kernels.native.build import BuildError, build

__all__ = ["BuildError", "available", "instruction_set", "library", "why_not"]


@functools.cache
def _load() -> ctypes.CDLL | str:
    if os.environ.get("HEADRACE_NATIVE", "") == "off":
        return "switched off by HEADRACE_NATIVE=off"
    try:
        return ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        return str(error)


def available() -> bool:
    """Whether the compiled kernels can be used here; builds them on first use."""
    return not isinstance(_load(), str)


def why_not() -> str:
    """Return why the compiled kernels cannot be used, or an empty text."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else ""


def library() -> ctypes.CDLL:
    """Return the compiled kernels.

    Raises:
        BuildError: they cannot be built or loaded here.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise BuildError(loaded)
    return loaded


def instruction_set() -> str:
    """Return which instructions the kernels were compiled for, such as "avx512-vnni-bf16".

    Raises:
        BuildError: they cannot be built or loaded here.
    """
    function = library().hr_instruction_set
    function.restype = ctypes.c_char_p
    return str(function().decode())
