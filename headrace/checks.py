"""What must hold before anything starts; `up` stops at the first failure, `doctor` tells them all."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from headrace import embedded_nats, fetch
from headrace.layout import explain
from models.errors import ModelFileError
from models.source import open_model
from schemas.settings import Settings

GGUF_MAGIC = b"GGUF"
POOL_HEADROOM = 64 * 1024 * 1024

Verdict = Literal["ok", "warn", "fail"]


class StartError(Exception):
    """Raised when an instance cannot start; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `advice` says what to do about it unless all is well."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


def check_model_file(path: Path) -> None:
    """Refuse a model that cannot be one before any process loads it.

    Metadata and tensor tables are read (a sixth of a second for 49,000 tokens), tensor bytes are not.

    Raises:
        StartError: if it is absent, not readable, neither a GGUF file nor a Hugging Face folder, cut short, corrupt, or
            of a kind that is not supported.
    """
    if not path.is_dir():
        _check_magic(path)
    try:
        with open_model(path) as source:
            if path.is_dir():
                source.text()  # the tokenizer lies in files of its own, which nothing has looked at so far
    except ModelFileError as exc:
        raise StartError(f"model {exc}") from exc


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as exc:
        raise StartError(f"model {path} cannot be read: {exc.strerror or exc}") from exc
    if head[:4] != GGUF_MAGIC:
        raise StartError(f"model {path} is not a GGUF file: it begins with {head[:4]!r}, not {GGUF_MAGIC!r}")
    if len(head) < 8:
        raise StartError(f"model {path} is cut short after {len(head)} bytes")


def check_port(host: str, port: int, what: str) -> None:
    """Refuse a taken port.

    Raises:
        StartError: if nothing could listen there.
    """
    try:
        free = embedded_nats.port_is_free(host, port)
    except OSError as exc:
        raise StartError(f"{what} cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    if not free:
        raise StartError(f"{what}: port {port} on {host} is in use; free it, or use --http or --port-base")


def examine(settings: Settings) -> list[Check]:
    """Return the findings about this machine and installation, without starting anything."""
    probes: list[Callable[[Settings], Check]] = [
        _python,
        _torch,
        _kernels,
        _cpu,
        _layout,
        _memory,
        _shm,
        _nats,
        _model,
        _http_port,
    ]
    out = []
    for probe in probes:
        try:
            out.append(probe(settings))
        except Exception as exc:  # a probe that breaks is a finding too
            out.append(Check(probe.__name__.strip("_"), "fail", f"{type(exc).__name__}: {exc}", "report this as a bug"))
    return out


def _python(_: Settings) -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _torch(settings: Settings) -> Check:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        verdict: Verdict = "fail" if settings.engine == "torch" else "warn"
        return Check("torch", verdict, "not installed", "run: make venv")
    return Check("torch", "ok", version)


def _kernels(settings: Settings) -> Check:
    from kernels import native, registry

    try:
        chosen = registry.resolve()
    except registry.KernelChoiceError as exc:
        return Check("kernels", "fail", str(exc), f"correct or unset {registry.VARIABLE}")
    if reason := native.why_not():
        verdict: Verdict = "fail" if settings.engine == "native" else "warn"
        return Check(
            "kernels", verdict, f"in torch, slower: {reason}", "install g++, clang++ or ziglang, then: make venv"
        )
    if settings.engine == "torch" or settings.dtype != "auto" or set(chosen.values()) != {"native"}:
        return Check("kernels", "ok", "in torch, as the settings ask")
    return Check("kernels", "ok", f"compiled for this CPU: {native.instruction_set()}")


def _layout(settings: Settings) -> Check:
    cores = len(os.sched_getaffinity(0))
    detail = explain(settings, cores)
    if settings.threads > cores:
        return Check("layout", "warn", detail, f"set threads to 0, or to {cores} at most: more wait for one another")
    return Check("layout", "ok", detail)


def _cpu(_: Settings) -> Check:
    cores = len(os.sched_getaffinity(0))
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.partition(":")[2].split())
                break
    except OSError:
        pass
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    detail = f"{cores} cores; {' '.join(f for f in wanted if f in flags) or 'no vector features known'}"
    if cores < 2:
        return Check("cpu", "warn", detail, "two cores or more are advised: engines and actors share this one")
    return Check("cpu", "ok", detail)


def _memory(settings: Settings) -> Check:
    import psutil

    available = psutil.virtual_memory().available
    engines = settings.prefill + settings.decode + settings.both
    detail = f"{available / 2**30:.1f} GiB available for {engines} engines"
    if available < engines * 2**30:
        return Check("memory", "warn", detail, "start fewer engines: headrace up --decode 1")
    return Check("memory", "ok", detail)


def _shm(settings: Settings) -> Check:
    path = Path(settings.shm_dir)
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Check("shared memory", "fail", f"{path} is not a writable directory", "set HEADRACE_SHM_DIR to one")
    free = shutil.disk_usage(path).free
    detail = f"{path}: {free / 2**20:.0f} MiB free"
    if free < POOL_HEADROOM:
        return Check("shared memory", "fail", detail, "free space there, or set HEADRACE_SHM_DIR to another directory")
    if free < (settings.prefill + settings.decode + settings.both) * 512 * 2**20:
        return Check("shared memory", "warn", detail, "pools may not fit; lower HEADRACE_POOL_TOKENS")
    return Check("shared memory", "ok", detail)


def _nats(settings: Settings) -> Check:
    if settings.bus_url:
        return Check("bus", "ok", f"an existing one: {settings.bus_url}")
    try:
        return Check("bus", "ok", f"embedded: {embedded_nats.find_binary()}")
    except embedded_nats.BusServerError as exc:
        return Check("bus", "fail", str(exc), "run: make venv")


def _model(settings: Settings) -> Check:
    if not settings.real_engine and not settings.model:
        return Check("model", "ok", f"not needed by the {settings.engine.partition(':')[0]} engine")
    if settings.model:
        try:
            check_model_file(Path(settings.model))
        except StartError as exc:
            return Check("model", "fail", str(exc), "give a GGUF file or a Hugging Face folder by --model")
        return Check("model", "ok", settings.model)
    root = Path(settings.cache).expanduser() if settings.cache else None
    path = fetch.cached_model(root)
    if path is None:
        return Check("model", "warn", "the default model is not in the cache", "it is fetched at the first start")
    if fetch.sha256_of(path) != fetch.DEFAULT_MODEL.sha256:
        return Check("model", "fail", f"{path} has a wrong SHA-256", f"remove it; it is fetched again: rm {path}")
    return Check("model", "ok", f"{path}, SHA-256 as expected")


def _http_port(settings: Settings) -> Check:
    host, port = settings.http_address
    if port == 0 or embedded_nats.port_is_free(host, port):
        return Check("http port", "ok", f"{host}:{port} is free")
    return Check("http port", "warn", f"{host}:{port} is in use", "by a running instance, or choose another by --http")
