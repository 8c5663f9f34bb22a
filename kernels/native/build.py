"""Builds the native kernels: one C++ unit, one shared library, once per source, compiler and CPU.

`python -m kernels.native` is what the install runs; a process that finds no library builds it on first use. Any
of the compilers below will do; the last one is a Python package, for machines that have none.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("module.cpp")
KERNELS = SOURCE.parent.parent
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wno-psabi", "-w")
BUILD_LIMIT_S = 600


class BuildError(RuntimeError):
    """Raised when the native kernels cannot be built; the message says why."""


def find_compiler() -> list[str] | None:
    """Return the command of a C++20 compiler: $CXX, g++, clang++, or the one in the `ziglang` package; None without."""
    if chosen := os.environ.get("CXX"):
        return chosen.split()
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def library_path() -> Path:
    """Return where the library for these sources and this CPU lies, built or not."""
    digest = hashlib.blake2b(digest_size=10)
    for path in [SOURCE, *sorted(KERNELS.glob("*/*.hpp"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(" ".join(FLAGS).encode() + _cpu().encode() + os.environ.get("CXX", "").encode())
    return _cache() / "native" / f"kernels-{digest.hexdigest()}.so"


def build() -> Path:
    """Build the library unless it is there; several processes may ask at once.

    Raises:
        BuildError: there is no compiler, it fails, or the cache cannot be written.
    """
    path = library_path()
    if path.exists():
        return path
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler: install g++ or clang++, or the Python package ziglang")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if not path.exists():
                _compile(compiler, path)
    except OSError as error:
        raise BuildError(f"the native kernels cannot be built in {path.parent}: {error}") from error
    return path


def _cache() -> Path:
    """Return `$HEADRACE_CACHE` (else `$XDG_CACHE_HOME/headrace`, else `~/.cache/headrace`)."""
    if given := os.environ.get("HEADRACE_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def _compile(compiler: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        command = [*compiler, *FLAGS, "-I", str(KERNELS.parent), "-o", str(made), str(SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler[0]} did not end within {BUILD_LIMIT_S} s") from error
        if done.returncode:
            raise BuildError(f"{' '.join(compiler)} failed:\n{done.stderr[-4000:]}")
        os.replace(made, path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cpu() -> str:
    """Name the instruction set: a library in a shared home directory must not meet another CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"
