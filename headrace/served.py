"""Which model is served, under which names; no weights are read here."""

from __future__ import annotations

from pathlib import Path

from headrace import fetch
from headrace.checks import StartError, check_model_file
from schemas.settings import Settings

QUANT_MARKS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K")


def engine_kind(settings: Settings) -> str:
    """Return `auto`, `native`, `torch`, `scripted` or `null`."""
    return settings.engine.partition(":")[0]


def needs_model(settings: Settings) -> bool:
    """Whether a model file takes part: always for a real engine, else only when one is named (its tokenizer)."""
    return settings.real_engine or bool(settings.model)


def cache_root(settings: Settings) -> Path:
    """Return where packed weights lie: beside the fetched models."""
    return Path(settings.cache).expanduser() if settings.cache else fetch.default_cache_dir().parent


def model_path(settings: Settings, progress: fetch.Progress | None = None) -> Path | None:
    """Return the model file, fetched if it is the default one and not there yet; None if none is needed.

    Raises:
        StartError: if it cannot be read or fetched, or is no model.
    """
    if not needs_model(settings):
        return None
    if settings.model:
        path = Path(settings.model).expanduser().resolve()
    else:
        root = Path(settings.cache).expanduser() if settings.cache else None
        try:
            path = fetch.ensure_model(root, progress=progress)
        except fetch.ModelFetchError as exc:
            raise StartError(str(exc)) from exc
    check_model_file(path)
    return path


def model_names(settings: Settings, path: Path | None) -> list[str]:
    """Return the names that clients may use, the proper one first."""
    if settings.served_model_name:
        return [settings.served_model_name]
    if path is None:
        return [engine_kind(settings)]
    return [name_of(path)]


def name_of(path: Path) -> str:
    """Return a model's name from its file's: `SmolLM2-135M-Instruct.Q4_1.gguf` is `SmolLM2-135M-Instruct`."""
    stem = path.name.removesuffix(".gguf")
    head, _, last = stem.rpartition(".")
    return head if head and last.upper() in QUANT_MARKS else stem
