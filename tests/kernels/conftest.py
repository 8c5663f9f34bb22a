"""Leaves out what this process cannot do: compiling Triton's kernels needs Triton, and not its interpreter."""

from __future__ import annotations

import importlib.util
import os

_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
_MISSING = importlib.util.find_spec("triton") is None

collect_ignore = ["test_triton_compiles.py"] if _INTERPRETED or _MISSING else []
