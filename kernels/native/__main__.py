"""Build the compiled kernels and tell where they lie."""

from __future__ import annotations

import sys

from kernels.native.build import BuildError, build

try:
    sys.stdout.write(f"{build()}\n")
except BuildError as problem:
    sys.exit(f"native kernels: {problem}")
