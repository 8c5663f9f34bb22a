"""Building the compiled kernels: once, whole or not at all, and with words when it cannot be done."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kernels import native
from kernels.native import BuildError
from tests.models.files import ROOT

# The package's function of the same name hides the module.
build: Any = importlib.import_module("kernels.native.build")
# Asked now: the answer is kept for the life of the process, and the tests below take compilers away.
AVAILABLE = native.available()


class Compiler:
    """A program that is called like a compiler, writes something and counts its calls."""

    def __init__(self, directory: Path, body: str) -> None:
        self.log = directory / "calls"
        path = directory / "compiler"
        path.write_text(f'#!/bin/sh\necho "$@" >> {self.log}\nwhile [ "$1" != -o ]; do shift; done\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.path = str(path)

    @property
    def calls(self) -> list[str]:
        """Arguments of each call."""
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no compiler chosen by the environment."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler, in the path or as a package."""
    real = importlib.util.find_spec
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ziglang" else real(name, *a))


def _use(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler.path)


def test_the_second_call_compiles_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One library, readable, and no other file but the lock."""
    compiler = Compiler(tmp_path, "echo library > $2")
    _use(compiler, monkeypatch)

    first, second = build.build(), build.build()

    assert first == second == build.library_path() and first.read_text() == "library\n"
    assert first.is_relative_to(cache)
    assert len(compiler.calls) == 1 and compiler.calls[0].endswith("module.cpp")
    assert "-ffp-contract=off" in compiler.calls[0] and "fast-math" not in compiler.calls[0]
    assert sorted(path.suffix for path in first.parent.iterdir()) == [".lock", ".so"]


def test_processes_that_start_together_compile_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for the library of the first."""
    compiler = Compiler(tmp_path, "sleep 0.2; echo library > $2")
    _use(compiler, monkeypatch)

    with ThreadPoolExecutor(4) as pool:
        made = {future.result() for future in [pool.submit(build.build) for _ in range(4)]}

    assert len(made) == 1 and len(compiler.calls) == 1


def test_changed_sources_have_another_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any header of any op, the unit itself, the compiler that was asked for, the flags, the CPU."""
    for path in [build.SOURCE, *build.KERNELS.glob("*/*.hpp")]:
        copy = tmp_path / "kernels" / path.relative_to(build.KERNELS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    original = build.library_path()
    monkeypatch.setattr(build, "KERNELS", tmp_path / "kernels")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "kernels/native/module.cpp")
    assert build.library_path() == original
    names = {original}

    for path in (tmp_path / "kernels/native/module.cpp", tmp_path / "kernels/linear/native.hpp"):
        path.write_text(path.read_text() + "// changed\n")
        names.add(build.library_path())
    monkeypatch.setenv("CXX", "another")
    names.add(build.library_path())
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))
    names.add(build.library_path())
    monkeypatch.setattr(build, "_cpu", lambda: "another machine")
    names.add(build.library_path())

    assert len(names) == 6


def test_without_a_compiler_it_says_what_to_install(cache: Path, nowhere: None) -> None:
    """A compiler, or the package that brings one."""
    assert build.find_compiler() is None

    with pytest.raises(BuildError, match=r"g\+\+.*clang\+\+.*ziglang"):
        build.build()


def test_without_a_compiler_there_are_no_compiled_kernels(cache: Path, nowhere: None) -> None:
    """Asked in a process of its own, for the answer is kept for life; a library that is there needs no compiler."""
    program = "from kernels import native; print(native.available(), native.why_not())"
    environment = {"PATH": "", "HEADRACE_CACHE": str(cache)}
    hide = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: n != 'ziglang' and f(n, *a) or None\n"
    )

    def ask(**more: str) -> str:
        command = [sys.executable, "-c", hide + program]
        done = subprocess.run(command, cwd=ROOT, env=environment | more, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    assert ask().startswith("False no C++ compiler")
    if AVAILABLE:
        assert ask(HEADRACE_CACHE=str(Path(native.library()._name).parent.parent)).startswith("True")
        assert ask(HEADRACE_NATIVE="off").startswith("False switched off")


def test_a_package_can_be_the_compiler(cache: Path, nowhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found last, called as a module of this interpreter."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: object() if n == "ziglang" else real(n, *a))

    assert build.find_compiler() == [sys.executable, "-m", "ziglang", "c++"]


def test_a_compilers_complaint_is_shown(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and its words; no library is left, and the next call tries again."""
    compiler = Compiler(tmp_path, "echo half a library > $2; echo 'module.cpp:3: no such thing' >&2; exit 1")
    _use(compiler, monkeypatch)

    for _ in range(2):
        with pytest.raises(BuildError, match=r"(?s)compiler.*failed.*module.cpp:3: no such thing"):
            build.build()

    assert len(compiler.calls) == 2
    assert [path.suffix for path in build.library_path().parent.iterdir()] == [".lock"]


def test_a_compiler_that_does_not_end_is_given_up(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is named."""
    _use(Compiler(tmp_path, "exec sleep 60"), monkeypatch)
    monkeypatch.setattr(build, "BUILD_LIMIT_S", 0.1)

    with pytest.raises(BuildError, match="did not end within"):
        build.build()


def test_a_compiler_that_is_not_there_and_a_cache_that_cannot_be_written_are_told(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are errors of building, not of the operating system."""
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(BuildError, match="no-such-compiler"):
        build.build()

    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot be built in"):
        build.build()


def test_the_command_prints_where_the_library_is() -> None:
    """`python -m kernels.native`, as the install runs it; exit status 1 and a reason otherwise."""
    if not AVAILABLE:
        pytest.skip(native.why_not())
    command = [sys.executable, "-m", "kernels.native"]

    good = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    environment = os.environ | {"CXX": "/nowhere/c++"}
    bad = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, env=environment)

    assert good.returncode == 0 and Path(good.stdout.strip()) == build.library_path()
    assert bad.returncode == 1 and bad.stderr.startswith("native kernels: ")
