"""Which runner a model gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.model_runner import ModelRunner
from engine.native_runner import NativeRunner
from engine.plan import BatchPlan, Row
from engine.real_runner import load_runner
from engine.sequence import Key
from engine.torch_runner import TorchRunner
from kernels import native, registry
from kernels.native import BuildError
from kernels.registry import KernelChoiceError
from models.errors import ModelFileError
from models.packed import Unpackable
from schemas.record import Sampling
from tests.models.files import tiny_model
from tests.models.native_models import Shape, write_model

HERE = native.available()
needs_native = pytest.mark.skipif(not HERE, reason=native.why_not() or "there are compiled kernels")


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The choice of kernels is made anew, and an override of the environment does not count."""
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    registry.resolve.cache_clear()
    yield
    registry.resolve.cache_clear()


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the compiled kernels can hold."""
    return write_model(tmp_path_factory.mktemp("fits") / "m.gguf", Shape())


@pytest.fixture(scope="module")
def too_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 8 elements, which they cannot."""
    return tiny_model(tmp_path_factory.mktemp("small") / "m.gguf")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nothing can be built."""
    monkeypatch.setattr(native, "_load", lambda: "no C++ compiler: install one")


def _load(model: Path, engine: str, dtype: str = "auto", cache: Path | None = None) -> ModelRunner:
    return load_runner(model, engine=engine, dtype=dtype, threads=1, cache=cache)


def _first_id(runner: ModelRunner) -> int:
    runner.bind(memoryview(bytearray(runner.block_nbytes)), 1)
    row = Row(Key("a", 0), [5, 6, 7], 0, 3, [0], True, 0, (0,), Sampling(temperature=0.0), [])
    (done,) = runner.execute(BatchPlan(0, [row]))
    runner.close()
    assert done.error is None
    return done.id


@needs_native
def test_a_model_that_fits_is_computed_by_compiled_kernels(fits: Path, tmp_path: Path) -> None:
    """Its weights are packed into the cache that was named."""
    runner = _load(fits, "auto", cache=tmp_path)

    assert isinstance(runner, NativeRunner)
    assert list((tmp_path / "packed").glob("*.hrw"))
    runner.close()


@needs_native
def test_both_runners_answer_alike(fits: Path) -> None:
    """The same weights, the same prompt."""
    assert _first_id(_load(fits, "native")) == _first_id(_load(fits, "torch", "float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_arithmetic_that_is_asked_for_is_that_of_torch(dtype: str, fits: Path) -> None:
    """The compiled kernels have one of their own."""
    runner = _load(fits, "auto", dtype)

    assert isinstance(runner, TorchRunner) and dtype in runner.layout


def test_a_model_that_does_not_fit_falls_back_to_torch_or_is_refused(too_small: Path) -> None:
    """`auto` serves it all the same; `native` says which size does not fit."""
    assert isinstance(_load(too_small, "auto"), TorchRunner)

    if HERE:
        with pytest.raises(Unpackable, match="heads of 8 elements"):
            _load(too_small, "native")


def test_without_a_compiler_auto_falls_back_and_native_is_refused(fits: Path, no_compiler: None) -> None:
    """The reason is passed on."""
    assert isinstance(_load(fits, "auto"), TorchRunner)

    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        _load(fits, "native")


def test_an_override_of_kernels_is_obeyed(fits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One op in torch means the whole step in torch; a name that does not exist is an error."""
    monkeypatch.setenv(registry.VARIABLE, "rms_norm=reference")
    assert isinstance(_load(fits, "auto"), TorchRunner)

    registry.resolve.cache_clear()
    monkeypatch.setenv(registry.VARIABLE, "rms_norm=fastest")
    with pytest.raises(KernelChoiceError, match="fastest"):
        _load(fits, "auto")


@needs_native
def test_a_corrupt_file_is_refused_and_not_tried_by_the_other_runner(fits: Path, tmp_path: Path) -> None:
    """The file is at fault, whoever reads it."""
    data = fits.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) - 5000])

    for engine in ("auto", "native", "torch"):
        with pytest.raises(ModelFileError):
            _load(tmp_path / "cut.gguf", engine)
