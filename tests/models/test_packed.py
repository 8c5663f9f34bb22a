"""Packed weights on disk: made once, mapped by all, and never taken for something they are not."""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import packed
from models.errors import ModelFileError
from models.gguf import GgufFile
from models.packed import PackedWeights
from models.quant import checked
from models.source import open_model
from tests.models.files import ROOT
from tests.models.native_models import Shape, write_model

SHAPE = Shape(kind="Q4_1", kinds={"token_embd": "Q8_0"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model file."""
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", SHAPE)


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever something is packed."""
    real: Callable[..., Any] = packed._pack
    count: list[str] = []

    def counted(*args: Any) -> Any:
        count.append("packed")
        return real(*args)

    monkeypatch.setattr(packed, "_pack", counted)
    return count


def load(path: Path, cache: Path | None) -> PackedWeights:
    """Load as a runner does."""
    with open_model(path) as source:
        return packed.load(source.config, functools.partial(checked, source), source.fingerprint(), cache)


def content(weights: PackedWeights) -> tuple[object, bytes]:
    """Everything that can be compared."""
    return weights._entries, bytes(weights._data)


def file_of(cache: Path) -> Path:
    """The one packed file."""
    (found,) = (cache / "packed").glob("*.hrw")
    return found


def test_the_second_engine_maps_what_the_first_packed(model: Path, tmp_path: Path, packings: list[str]) -> None:
    """Nothing is packed again, and the bytes are the same pages of a file that nobody writes."""
    first = load(model, tmp_path)
    made = file_of(tmp_path).stat()

    second = load(model, tmp_path)

    assert len(packings) == 1
    assert content(first) == content(second) == content(load(model, None))
    assert file_of(tmp_path).stat().st_ino == made.st_ino
    assert not second._data.flags.writeable and made.st_mode & 0o777 == 0o644
    assert sorted(p.suffix for p in (tmp_path / "packed").iterdir()) == [".hrw", ".lock"]


def test_everything_in_the_file_is_aligned(model: Path, tmp_path: Path) -> None:
    """Matrices and vectors begin at whole cache lines, whether mapped or not."""
    weights = load(model, tmp_path)

    addresses = [weights.address(name) for name in weights._entries]

    assert all(address % 64 == 0 for address in addresses)
    assert weights.vector("norm").shape == (64,) and "norm" in weights and "head" not in weights


def _cut(data: bytearray) -> bytearray:
    return data[: len(data) // 2]


def _flip(at: float) -> Callable[[bytearray], bytearray]:
    def damage(data: bytearray) -> bytearray:
        data[int(at * (len(data) - 1))] ^= 1
        return data

    return damage


def _another_place(data: bytearray) -> bytearray:
    """A well-formed head that points elsewhere."""
    at = data.index(b'"at": ') + 6
    data[at] = ord("1") if data[at] != ord("1") else ord("2")
    return data


DAMAGES: dict[str, Callable[[bytearray], bytearray]] = {
    "empty": lambda data: bytearray(),
    "a few bytes": lambda data: data[:11],
    "cut in the head": lambda data: data[:100],
    "cut in the middle": _cut,
    "cut by one byte": lambda data: data[:-1],
    "longer": lambda data: data + b"\0" * 64,
    "zeros": lambda data: bytearray(len(data)),
    "first bit": _flip(0.0),
    "a bit of the weights": _flip(0.7),
    "last bit": _flip(1.0),
    "another place": _another_place,
    "another magic": lambda data: bytearray(b"HEADLESS") + data[8:],
    "text": lambda data: bytearray(b"not a packed file\n" * 100),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_packed_again(name: str, model: Path, tmp_path: Path, packings: list[str]) -> None:
    """It is replaced by a good one; the weights are right both times."""
    want = content(load(model, tmp_path))
    path = file_of(tmp_path)
    path.write_bytes(DAMAGES[name](bytearray(path.read_bytes())))

    assert content(load(model, tmp_path)) == want
    assert len(packings) == 2
    assert content(load(model, tmp_path)) == want
    assert len(packings) == 2


def test_every_bit_of_the_head_is_checked(model: Path, tmp_path: Path) -> None:
    """No flipped bit in it gives weights other than the right ones."""
    want = content(load(model, tmp_path))
    path = file_of(tmp_path)
    good = path.read_bytes()
    rng = np.random.default_rng(0)

    for at in [*range(24), *rng.integers(24, 2000, 100).tolist()]:
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        read = packed._read(path, path.stem)
        assert read is None or content(read) == want, at


def test_another_version_of_the_layout_has_another_file(
    model: Path, tmp_path: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older program's file is not read, nor destroyed: that program may still run."""
    load(model, tmp_path)
    monkeypatch.setattr(packed, "VERSION", packed.VERSION + 1)

    load(model, tmp_path)

    assert len(packings) == 2
    assert len(list((tmp_path / "packed").glob("*.hrw"))) == 2


def test_a_file_of_one_model_never_serves_another(model: Path, tmp_path: Path, packings: list[str]) -> None:
    """Other weights have another name; even under the wrong name a file is not believed."""
    other = write_model(tmp_path / "other.gguf", Shape(kind="Q4_1", kinds={"token_embd": "Q8_0"}, seed=1))
    first = load(model, tmp_path)
    path = file_of(tmp_path)
    want = content(load(other, tmp_path))
    assert content(first) != want
    (second_path,) = set((tmp_path / "packed").glob("*.hrw")) - {path}

    second_path.write_bytes(path.read_bytes())

    assert content(load(other, tmp_path)) == want
    assert len(packings) == 3


def test_without_a_directory_to_write_to_the_weights_stay_in_memory(model: Path, tmp_path: Path) -> None:
    """A file in the directory's place, and a directory in the file's."""
    want = content(load(model, None))
    (tmp_path / "a").write_text("in the way")
    assert content(load(model, tmp_path / "a")) == want

    load(model, tmp_path / "b")
    path = file_of(tmp_path / "b")
    path.unlink()
    path.mkdir()
    assert content(load(model, tmp_path / "b")) == want
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".hrw", ".lock"]


def test_a_full_disk_costs_memory_and_leaves_nothing_behind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half-written file is removed."""

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "replace", full)

    assert content(load(model, tmp_path)) == content(load(model, None))
    assert [p.suffix for p in (tmp_path / "packed").iterdir()] == [".lock"]


@pytest.mark.slow
def test_engines_that_start_together_pack_once(model: Path, tmp_path: Path) -> None:
    """Three processes at once; the others wait for the file of one."""
    program = (
        "import sys; from pathlib import Path; from models import packed; from tests.models.test_packed import load\n"
        "real = packed._pack\n"
        "def counted(*args): print('packed'); return real(*args)\n"
        "packed._pack = counted\n"
        "load(Path(sys.argv[1]), Path(sys.argv[2])); assert 'torch' not in sys.modules; print('loaded')"
    )
    command = [sys.executable, "-c", program, str(model), str(tmp_path)]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]

    said = "".join(process.communicate(timeout=100)[0] for process in started)

    assert said.count("loaded") == 3
    assert said.count("packed") == 1
    assert file_of(tmp_path).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("tensor", "at"), [("blk.1.ffn_down.weight", 0), ("blk.0.attn_q.weight", 2), ("output_norm.weight", 2)]
)
def test_weights_that_are_no_numbers_are_refused_by_name(tensor: str, at: int, model: Path, tmp_path: Path) -> None:
    """A scale, an offset, an element of a norm; and nothing is left that the next start would believe."""
    with GgufFile(model) as file:
        offset = file.tensors[tensor].offset
    data = bytearray(model.read_bytes())
    data[offset + at : offset + at + 2] = b"\xff\x7f"  # NaN as float16, and as the upper half of a float32
    (tmp_path / "bad.gguf").write_bytes(data)

    with pytest.raises(ModelFileError, match=tensor):
        load(tmp_path / "bad.gguf", tmp_path / "cache")

    assert not list((tmp_path / "cache").rglob("*.hrw"))
