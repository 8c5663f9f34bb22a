"""Everything that can be set, parsed once: flag > environment `HEADRACE_*` > `headrace.toml` > default.

An unknown key is fatal and names where it stands. Secrets are masked wherever settings are shown.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.sources import EnvSettingsSource, InitSettingsSource, TomlConfigSettingsSource

ENV_PREFIX = "HEADRACE_"
DEFAULT_FILE = "headrace.toml"
# Read outside of the settings: the file's own place, what kernels, scripts and tests read, and where the peers are.
OTHER_ENV = frozenset(
    ENV_PREFIX + name for name in ("CONFIG", "TEST_MODEL", "KERNELS", "NATIVE", "PEERS", "PEERS_ONLY", "PEERS_MODEL")
)

REAL_ENGINES = ("auto", "native", "torch")  # those that compute a model

Port = Annotated[int, Field(ge=0, le=65_535)]
Count = Annotated[int, Field(ge=0, le=1024)]
Seconds = Annotated[float, Field(gt=0)]


class SettingsError(Exception):
    """Raised when a setting is unknown or has a bad value; `problems` holds one line each, naming the source."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Settings(BaseSettings):
    """The effective settings of one process."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, protected_namespaces=())

    # What is served
    model: str = Field("", description="GGUF file or Hugging Face folder; empty: the default model, fetched once")
    served_model_name: str = Field("", description="name that clients use; empty: taken from the file's name")
    cache: str = Field("", description="where fetched models lie; empty: ~/.cache/headrace/models")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="arithmetic of the torch engine")
    engine: str = Field("auto", description="auto | native | torch | scripted[:FILE] | null[:SPEC]")

    # The shape of an instance
    instance: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$", description="its name")
    prefill: Count = Field(0, description="engines in the prefill role")
    decode: Count = Field(2, description="engines in the decode role; without prefill they run prompts too")
    both: Count = Field(0, description="engines in both roles at once")
    kv: int = Field(1, ge=1, le=64, description="stores of KV; host_tier_tokens, kv_disk_bytes and quotas are divided")
    host: str = Field(
        "", pattern=r"^[A-Za-z0-9._-]{0,64}$", description="name of this machine on the bus; empty: its host name"
    )
    isolate: bool = Field(False, description="one process per actor")
    threads: int = Field(0, ge=0, le=1024, description="most threads of an engine; 0: one per core")
    affinity: Literal["none", "spread"] = Field("none", description="spread: each engine on its own part of the cores")

    # Where it listens
    http: str = Field("127.0.0.1:8000", description="HOST:PORT of the HTTP edge")
    port_base: Port = Field(0, description="first of this instance's ports: +0 HTTP, +1 bus; 0: the defaults")

    # Who asks
    tenant_header: str = Field(
        "", pattern=r"^[A-Za-z0-9-]{0,64}$", description="header that names the tenant; empty: all requests are of one"
    )

    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="shares of tenants where several wait for an engine, as {TENANT: WEIGHT}; absent ones have 1"
    )
    admin_token: SecretStr | None = Field(None, description="bearer token for /v1/kv/pins; empty: nobody may")

    # The bus
    bus_url: str = Field("", description="an existing NATS server; empty: one is started with the instance")
    bus_token: SecretStr | None = Field(None, description="token for the bus")
    bus_user: str = Field("", description="user for the bus")
    bus_password: SecretStr | None = Field(None, description="password for the bus")
    bus_creds: str = Field("", description="path of a NATS credentials file")
    bus_tls_ca: str = Field("", description="path of the CA certificate for the bus")
    bus_tls_cert: str = Field("", description="path of the client certificate for the bus")
    bus_tls_key: str = Field("", description="path of the client key for the bus")
    bus_wait_s: Seconds = Field(30.0, description="how long a start waits for the bus before it gives up")

    # Engines
    pool_tokens: int = Field(8192, ge=16, description="tokens of KV per engine; rounded down to blocks of 16")
    host_tier_tokens: int = Field(16_384, ge=0, description="tokens of KV in the host tier, all stores; 0: none")
    kv_load: Literal["auto", "always"] = Field(
        "auto", description="stored KV is loaded: auto (where computing it takes longer, if there is a model) | always"
    )
    kv_format: Literal["raw", "int8", "fp8"] = Field(
        "raw", description="raw: exact | int8, fp8: KV rounded to 8 bits, half the bytes in host memory and on disk"
    )
    kv_disk_dir: str = Field(
        "", description="directory of the disk tier, with a folder for each of several stores; empty: none"
    )
    kv_disk_bytes: int = Field(8_589_934_592, ge=0, description="most bytes that the disk tier takes, all stores")
    kv_disk_admission: Literal["second-touch", "all"] = Field(
        "second-touch", description="blocks worth a place on disk: second-touch (used twice) | all"
    )
    kv_disk_sync: bool = Field(False, description="wait for the disk before a block counts as stored there")
    kv_listen: str = Field(
        "auto", description="where other hosts fetch stored KV: off | auto (once there is one) | HOST[:PORT]"
    )
    kv_transport: Literal["tcp", "nixl"] = Field("tcp", description="how KV comes from other hosts: tcp | nixl (extra)")
    kv_advertise: str = Field("", description="host by which others reach kv_listen, where it is another one")
    kv_verify: Literal["on", "off-and-serve-wrong-bytes"] = Field(
        "on", description="checksums of stored KV: on | off-and-serve-wrong-bytes (for chaos tests, never with a model)"
    )
    kv_copy_bytes_per_minute: int = Field(
        1_073_741_824, ge=0, description="most bytes of hot prefixes copied from other hosts ahead of demand; 0: none"
    )
    kv_tenant_bytes: int = Field(0, ge=0, description="most bytes of one tenant in the host tier; 0: no limit")
    kv_tenant_disk_bytes: int = Field(0, ge=0, description="most bytes of one tenant on the disk tier; 0: no limit")
    kv_tenants: dict[str, dict[Literal["host", "disk"], Annotated[int, Field(ge=0)]]] = Field(
        {}, description="a tenant's own limits in place of these two, as {TENANT: {host: BYTES, disk: BYTES}}"
    )
    token_budget: int = Field(256, ge=1, description="tokens per step, prefill chunks and decode together")
    max_running: int = Field(64, ge=1, description="sequences that one engine runs at once")
    parking_tokens: int = Field(4096, ge=0, description="tokens of KV in host memory for preempted sequences; 0: none")
    speculation: Literal["off", "prompt-lookup", "draft-model"] = Field(
        "prompt-lookup", description="how ids are guessed ahead where it pays: off | prompt-lookup | draft-model"
    )
    draft_tokens: int = Field(8, ge=1, le=8, description="most ids guessed per sequence and step")
    draft_model: str = Field("", description="path of the model that guesses, with the tokenizer of the one served")
    shm_dir: str = Field("/dev/shm", description="where pools are exported as files")

    # What is promised
    slo_ttft_s: dict[Literal["interactive", "agent", "batch"], Seconds] = Field(
        {}, description="time to the first token by class; a request of which more is expected is refused (429)"
    )
    slo_itl_s: dict[Literal["interactive", "agent", "batch"], Seconds] = Field(
        {}, description="mean time between tokens by class; engines plan steps so that those who run keep it"
    )
    unloaded_ttft_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="median time to the first token without load, for goodput; 0: learnt"
    )
    unloaded_itl_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="median time between tokens without load, for goodput; 0: learnt"
    )

    # Time
    default_deadline_s: Seconds = Field(600.0, description="deadline of a request that states none")
    warm_failover: str = Field(
        "", description="classes whose KV is stored as they run, so that a failover loads it; empty: none"
    )
    rebalance: bool = Field(True, description="move running requests from engines with a queue to idle ones")
    drain_limit_s: Annotated[float, Field(ge=0)] = Field(30.0, description="how long a stop waits for running work")
    keepalive_s: Seconds = Field(10.0, description="longest silence of a stream before a keepalive comment")
    slow_reader_s: Seconds = Field(30.0, description="a client that takes nothing of its answer so long is given up")
    frozen_kill_s: Seconds = Field(10.0, description="a node without a heartbeat for so long is killed")
    step_limit_s: Seconds = Field(
        120.0, description="the most that an engine with work may go without a step; 30 s, or ten long steps, if sooner"
    )
    start_limit_s: Seconds = Field(120.0, description="how long all nodes may take to become ready")

    # What it says
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    otlp_endpoint: str = Field("", description="OTLP/HTTP endpoint for traces; empty: none")
    spans_file: str = Field("", description="file that receives one JSON line per span; empty: none")
    runtime_dir: str = Field("", description="state file and logs; empty: $XDG_RUNTIME_DIR/headrace or a private /tmp")

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        kind, colon, _ = value.partition(":")
        if kind not in (*REAL_ENGINES, "scripted", "null") or (colon and kind in REAL_ENGINES):
            raise ValueError("must be auto, native, torch, scripted, scripted:FILE, null or null:SPEC")
        return value

    @field_validator("warm_failover")
    @classmethod
    def _known_classes(cls, value: str) -> str:
        unknown = set(filter(None, value.replace(",", " ").split())) - {"interactive", "agent", "batch"}
        if unknown:
            raise ValueError(f"must be a list of interactive, agent, batch; {', '.join(sorted(unknown))} is none")
        return value

    @field_validator("http")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("bus_url")
    @classmethod
    def _bus_scheme(cls, value: str) -> str:
        if value and not value.startswith(("nats://", "tls://", "ws://", "wss://")):
            raise ValueError("must begin with nats://, tls://, ws:// or wss://")
        return value

    @model_validator(mode="after")
    def _runs_something(self) -> Settings:
        if self.both == 0 and self.decode == 0:
            raise ValueError("decode and both are 0: nothing could answer a request")
        if self.kv_listen.rpartition(":")[0] in ("0.0.0.0", "[::]") or self.kv_listen in ("0.0.0.0", "[::]"):
            if not self.kv_advertise:
                raise ValueError("kv_listen on all addresses needs kv_advertise: the host that others connect to")
        if (self.speculation == "draft-model") != bool(self.draft_model):
            raise ValueError("speculation by draft-model and the path in draft_model belong together")
        if self.kv_format != "raw" and (not self.real_engine or self.dtype == "float32"):
            raise ValueError("kv_format rounds the KV of a model in bfloat16: other engines and float32 keep it raw")
        if self.kv_verify != "on" and self.real_engine:
            raise ValueError("kv_verify is on where a model answers: without it damaged KV would be served")
        return self

    @property
    def warm_classes(self) -> frozenset[str]:
        """Classes of requests whose KV is stored while they run."""
        return frozenset(filter(None, self.warm_failover.replace(",", " ").split()))

    @property
    def real_engine(self) -> bool:
        """Whether the engines compute a model."""
        return self.engine in REAL_ENGINES

    @property
    def http_address(self) -> tuple[str, int]:
        """Host and port of the edge, moved by `port_base` when that is set and the port is the default one."""
        host, port = split_address(self.http)
        if self.port_base and "http" not in self.model_fields_set:
            port = self.port_base
        return host, port

    @property
    def instance_name(self) -> str:
        """Name of the instance: as set, else after `port_base`, so that moved instances do not collide."""
        if self.port_base and "instance" not in self.model_fields_set:
            return f"port-{self.port_base}"
        return self.instance

    @property
    def pool_prefix(self) -> str:
        """How the names of this instance's pool files begin."""
        return f"headrace-{self.instance_name}-"

    @property
    def num_blocks(self) -> int:
        """Blocks of an engine's pool."""
        return self.pool_tokens // 16

    @property
    def num_host_blocks(self) -> int:
        """Blocks of each store's host tier."""
        return self.host_tier_tokens // 16 // self.kv

    @property
    def runtime_path(self) -> Path:
        """Directory of state files and logs."""
        if self.runtime_dir:
            return Path(self.runtime_dir)
        base = os.environ.get("XDG_RUNTIME_DIR")
        if base and os.access(base, os.W_OK):
            return Path(base) / "headrace"
        return Path(f"/tmp/headrace-{os.getuid()}")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take only what `load` merged, so that every value's source is known."""
        return (init_settings,)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and, for each, where its value came from (`flag`, `env NAME`, `file PATH`, `default`)."""

    settings: Settings
    sources: dict[str, str]

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return `(name, value, source)` for display; secrets are masked."""
        return [(name, masked(getattr(self.settings, name)), self.sources[name]) for name in Settings.model_fields]

    def to_env(self) -> dict[str, str]:
        """Return the environment by which a child process gets these very settings."""
        out: dict[str, str] = {}
        for name, source in self.sources.items():
            if source != "default":
                out[env_name(name)] = env_text(getattr(self.settings, name))
        return out


def load(
    flags: Mapping[str, Any] | None = None, *, config: str | None = None, environ: Mapping[str, str] | None = None
) -> Loaded:
    """Merge flags, environment and file into settings.

    Args:
        flags: values given on the command line; None means not given.
        config: path of the file; absent: `$HEADRACE_CONFIG`, else `headrace.toml` here, if there is one.
        environ: the environment, `os.environ` if absent.

    Raises:
        SettingsError: if a key is unknown, a value is bad, or the file cannot be read.
    """
    env = os.environ if environ is None else environ
    path = _config_path(config, env)
    layers: list[tuple[dict[str, Any], dict[str, str]]] = [
        _from_file(path) if path is not None else ({}, {}),
        _from_env(env),
        _from_flags(flags or {}),
    ]
    problems = [
        f"unknown setting {key!r} in {source}{_similar(key)}"
        for _, sources in layers
        for key, source in sources.items()
        if key not in Settings.model_fields
    ]
    if problems:
        raise SettingsError(problems)
    merged: dict[str, Any] = {}
    found = dict.fromkeys(Settings.model_fields, "default")
    for values, sources in layers:
        merged.update(values)
        found.update(sources)
    try:
        settings = Settings(**merged)
    except ValidationError as exc:
        raise SettingsError([_problem(dict(e), found) for e in exc.errors()]) from exc
    return Loaded(settings, found)


def split_address(text: str) -> tuple[str, int]:
    """Split `HOST:PORT`; IPv6 hosts stand in brackets.

    Raises:
        ValueError: if it is not such a pair.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def env_name(name: str) -> str:
    """Name of the environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def env_text(value: Any) -> str:
    """Text of a value as an environment variable holds it; secrets in clear."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return json.dumps(value) if isinstance(value, (bool, int, float, dict)) else str("" if value is None else value)


def masked(value: Any) -> Any:
    """Return a value fit for display."""
    return "********" if isinstance(value, SecretStr) else value


def _config_path(config: str | None, env: Mapping[str, str]) -> Path | None:
    named = config or env.get("HEADRACE_CONFIG")
    if named:
        return Path(named).expanduser()
    here = Path(DEFAULT_FILE)
    return here if here.is_file() else None


def _from_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    class File(Settings):
        model_config = SettingsConfigDict(toml_file=path)

    if not path.is_file():
        raise SettingsError([f"settings file {path} does not exist"])
    try:
        values = dict(TomlConfigSettingsSource(File, path)())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsError([f"settings file {path} cannot be read: {exc}"]) from exc
    return values, dict.fromkeys(values, f"file {path}")


def _from_env(env: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    source = EnvSettingsSource(Settings)
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in OTHER_ENV:
            continue
        key = name.removeprefix(ENV_PREFIX).lower()
        sources[key] = f"env {name}"
        field = Settings.model_fields.get(key)
        if field is not None:
            try:
                values[key] = source.prepare_field_value(key, field, env[name], value_is_complex=False)
            except ValueError as exc:
                raise SettingsError([f"{key} (env {name}): not JSON: {exc}"]) from exc
    return values, sources


def _from_flags(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    source = InitSettingsSource(Settings, {k: v for k, v in flags.items() if v is not None})
    given = dict(source())
    return given, {name: f"flag --{name.replace('_', '-')}" for name in given}


def _problem(error: dict[str, Any], sources: Mapping[str, str]) -> str:
    name = str(error["loc"][0]) if error["loc"] else ""
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{name} ({sources[name]}): {message}" if name in sources else message


def _similar(key: str) -> str:
    import difflib

    close = difflib.get_close_matches(key, list(Settings.model_fields), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
