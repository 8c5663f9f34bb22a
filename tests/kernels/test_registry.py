"""Which implementation of each op a process takes, and what it says when it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernels import registry
from kernels.registry import OPS, KernelChoiceError, choose


def _only(*implementations: str) -> registry.WhyNot:
    return lambda op, name: "" if name in implementations else f"no {name} here"


def test_compiled_kernels_are_the_default_where_they_can_be_built() -> None:
    """Every op is native with a compiler and reference without one."""
    assert choose("", _only("native", "reference"), on_gpu=False) == dict.fromkeys(OPS, "native")
    assert choose("", _only("reference"), on_gpu=False) == dict.fromkeys(OPS, "reference")


def test_triton_is_the_default_for_data_on_a_gpu() -> None:
    """An op that has no Triton version there is computed plainly; compiled code cannot read a GPU's memory."""

    def reason(op: str, name: str) -> str:
        return "not written" if (op, name) == ("sampling", "triton") else ""

    chosen = choose("", reason, on_gpu=True)

    assert chosen.pop("sampling") == "reference"
    assert set(chosen.values()) == {"triton"}


def test_an_override_names_one_op_or_all() -> None:
    """Later entries win; spaces and empty entries mean nothing."""
    reason = _only("native", "reference", "triton")

    one = choose("rope=triton", reason, on_gpu=False)
    several = choose(" all=reference, ,rope = native", reason, on_gpu=True)

    assert one == dict.fromkeys(OPS, "native") | {"rope": "triton"}
    assert several == dict.fromkeys(OPS, "reference") | {"rope": "native"}


@pytest.mark.parametrize("entry", ["rope=fast", "rope", "rope=", "=native", "ropes=native", "all=fast"])
def test_an_unknown_override_is_an_error_that_lists_what_there_is(entry: str) -> None:
    """The message names the variable, the entry and the choices."""
    with pytest.raises(KernelChoiceError) as caught:
        choose(entry, _only("native", "reference"), on_gpu=False)

    message = str(caught.value)
    assert message.startswith("HEADRACE_KERNELS: ") and repr(entry) in message
    assert "native, reference" in message or all(op in message for op in OPS)


def test_an_override_that_cannot_run_here_is_an_error_with_the_reason() -> None:
    """Nothing falls back silently."""
    with pytest.raises(ValueError, match=r"no triton here; for rms_norm there are here: native, reference"):
        choose("all=triton", _only("native", "reference"), on_gpu=False)


def test_each_implementation_says_where_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton on the CPU needs its interpreter, compiled code needs data on the CPU."""
    monkeypatch.setattr(registry, "gpu_present", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    assert "TRITON_INTERPRET" in registry.why_not("rope", "triton")
    assert registry.why_not("rope", "triton", "cuda") == ""
    assert "CPU alone" in registry.why_not("rope", "native", "cuda")
    assert registry.why_not("rope", "reference", "cuda") == ""
    monkeypatch.setattr(registry, "gpu_present", lambda: False)
    assert registry.why_not("rope", "triton", "cuda") == "no GPU answers"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert registry.why_not("rope", "triton") == ""


def test_without_need_nobody_asks_for_the_compiler() -> None:
    """An override of all ops by the plain versions builds nothing."""

    def reason(op: str, name: str) -> str:
        assert name == "reference"
        return ""

    assert choose("all=reference", reason, on_gpu=False) == dict.fromkeys(OPS, "reference")


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)


def test_importing_the_registry_imports_no_torch_and_resolves_once() -> None:
    """The choice is fixed at its first use, and cannot be changed by a caller."""
    code = """
import os, sys
from kernels import registry
first = registry.resolve()
os.environ["HEADRACE_KERNELS"] = "all=nonsense"
assert registry.resolve() is first and first["rope"] == "reference", first
try:
    first["rope"] = "triton"
except TypeError:
    pass
else:
    raise SystemExit("the choice can be changed")
assert not {"torch", "triton"} & set(sys.modules), "heavy imports"
"""
    done = _run(code, HEADRACE_KERNELS="all=reference")

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_loading_imports_the_module_of_the_choice() -> None:
    """Each op's module has the op's function; on torch tensors native gives way to the plain version."""
    code = """
from kernels import registry
for op in registry.OPS:
    module = registry.load(op)
    assert module.__name__ == f"kernels.{op}.reference", module
    assert callable(getattr(module, "sample" if op == "sampling" else op))
    assert registry.load_torch(op, "cpu") is module
"""
    done = _run(code, HEADRACE_KERNELS="all=reference")

    assert done.returncode == 0, done.stderr


def test_a_wrong_setting_stops_the_process_that_reads_it() -> None:
    """The error reaches the log with its source."""
    done = _run("from kernels import registry; registry.resolve()", HEADRACE_KERNELS="rope=none")

    assert done.returncode != 0
    assert "HEADRACE_KERNELS: 'rope=none'" in done.stderr
