"""From kinds and settings to a node with its actors: the one place that knows every actor's constructor."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.byte_text import ByteText
from headrace import bus_access, served
from headrace.checks import StartError
from headrace.layout import ENGINE_KINDS, cores_of, threads_per_engine
from schemas.settings import Settings

if TYPE_CHECKING:
    from engine.plan import Runner
    from engine.speculation.drafter import Drafter
    from kvstore.owners import Quotas
    from models.text import ModelText
    from runtime.actor import Actor, Context
    from runtime.clock import Clock
    from runtime.node import Node

Factory = Callable[["Context"], "Actor"]

JOIN_AFTER_S = 2.0  # by then the rest of the instance has mostly started too


@dataclass(frozen=True, slots=True)
class Parts:
    """What the actors of one node share."""

    settings: Settings
    model: Path | None
    names: list[str]


async def build_node(
    kinds: Sequence[str],
    settings: Settings,
    *,
    name: str,
    actor_id: str,
    clock: Clock,
    on_wait: Callable[[str], None] | None = None,
) -> Node:
    """Connect to the bus and assemble a node; it is started by its `run`.

    Args:
        kinds: what to host, each once.
        settings: `bus_url` must be set.
        name: the node's name on the bus.
        actor_id: id of its actors.
        clock: the seam.
        on_wait: told when the bus has to be waited for.

    Raises:
        BusUnavailable: if the bus does not answer in time.
        StartError: if the model cannot be read.
    """
    from runtime.node import Node
    from runtime.telemetry import Telemetry

    if settings.affinity != "none":
        os.sched_setaffinity(0, cores_of(settings, name, sorted(os.sched_getaffinity(0))))
    parts = _parts(settings, kinds)
    closed: list[Callable[[], None]] = []

    def lost() -> None:
        for tell in closed:
            tell()

    telemetry = Telemetry(
        name,
        clock=clock,
        level=settings.log_level,
        otlp_endpoint=settings.otlp_endpoint,
        spans_file=settings.spans_file,
    )
    control = await bus_access.connect(settings, clock=clock, name=f"{name}-control", on_wait=on_wait, on_closed=lost)
    stream = await bus_access.connect(settings, clock=clock, name=f"{name}-stream", on_closed=lost)
    node = Node(
        name,
        settings.host or socket.gethostname(),
        control=control,
        stream=stream,
        clock=clock,
        telemetry=telemetry,
        drain_limit_s=settings.drain_limit_s,
    )
    closed.append(node.bus_closed)
    for kind in kinds:
        node.add(kind, actor_id, factory(kind, parts))
    return node


async def join_later(
    node: Node, kinds: Sequence[str], settings: Settings, *, actor_id: str, done: Callable[[], None]
) -> None:
    """Let private actors join a node that runs: its start does not wait for what they import and load.

    Args:
        node: the running node.
        kinds: of the actors that join.
        settings, actor_id: as of `build_node`.
        done: called when all of them have started.
    """
    await node.clock.sleep(JOIN_AFTER_S)
    loop = asyncio.get_running_loop()
    parts = await loop.run_in_executor(None, _parts, settings, kinds)
    for module in (f"actors.{kind}" for kind in kinds):
        await loop.run_in_executor(None, importlib.import_module, module)
    for kind in kinds:
        await node.join(kind, actor_id, factory(kind, parts), private=True)
    done()


def _parts(settings: Settings, kinds: Sequence[str]) -> Parts:
    model = served.model_path(settings) if set(kinds) - {"transfer", "kv"} else None
    return Parts(settings, model, served.model_names(settings, model))


def factory(kind: str, parts: Parts) -> Factory:
    """Return what makes an actor of this kind.

    Raises:
        ValueError: if there is no such kind.
    """
    if kind in ENGINE_KINDS:
        return functools.partial(_engine, role=kind, parts=parts)
    makers: dict[str, Callable[..., Actor]] = {
        "edge": _edge,
        "admission": _admission,
        "tokenize": _tokenize,
        "detokenize": _detokenize,
        "transfer": _transfer,
        "kv": _kv,
    }
    if kind not in makers:
        raise ValueError(f"no actor of kind {kind!r}")
    return functools.partial(makers[kind], parts=parts)


def _edge(context: Context, *, parts: Parts) -> Actor:
    from edge.actor import EdgeActor
    from edge.generate import Limits

    host, port = parts.settings.http_address
    limits = Limits(
        default_deadline_s=parts.settings.default_deadline_s,
        keepalive_s=parts.settings.keepalive_s,
        slow_reader_s=parts.settings.slow_reader_s,
        tenant_header=parts.settings.tenant_header,
    )
    token = bus_access.secret(parts.settings.admin_token) or ""
    unloaded = (parts.settings.unloaded_ttft_s, parts.settings.unloaded_itl_s)
    return EdgeActor(
        context, models=parts.names, host=host, port=port, limits=limits, admin_token=token, unloaded_s=unloaded
    )  # fmt: skip


def _admission(context: Context, *, parts: Parts) -> Actor:
    from actors.admission import AdmissionActor, AdmissionConfig

    config = AdmissionConfig(
        models=tuple(parts.names),
        default_deadline_s=parts.settings.default_deadline_s,
        tenant_header=parts.settings.tenant_header,
        warm_classes=parts.settings.warm_classes,
        rebalance=parts.settings.rebalance,
        slo_ttft_s={str(name): seconds for name, seconds in parts.settings.slo_ttft_s.items()},
        tenant_weights=parts.settings.tenant_weights,
    )
    return AdmissionActor(context, config=config)


def _tokenize(context: Context, *, parts: Parts) -> Actor:
    from actors.tokenize import TokenizeActor

    return TokenizeActor(context, load_encoder=functools.partial(_text, parts))


def _detokenize(context: Context, *, parts: Parts) -> Actor:
    from actors.detokenize import DetokenizeActor

    vocabulary = functools.partial(_text, parts)
    return DetokenizeActor(context, load_vocabulary=vocabulary, slow_reader_s=parts.settings.slow_reader_s)


def _transfer(context: Context, *, parts: Parts) -> Actor:
    from actors.transfer import TransferActor
    from actors.transfer_peers import PeerConfig
    from kvstore.transport import nixl

    settings = parts.settings
    by_nixl = settings.kv_transport == "nixl"
    if by_nixl and not nixl.installed():
        raise StartError("kv_transport = nixl needs NIXL, which is not installed: pip install 'headrace[nixl]'")
    match settings.kv_listen:
        case "off":
            peers = PeerConfig("off")
        case "auto":
            peers = PeerConfig("auto", bus_access.own_address(settings.bus_url), settings.kv_advertise, nixl=by_nixl)
        case bind:
            peers = PeerConfig("on", bind, settings.kv_advertise, nixl=by_nixl)
    return TransferActor(context, peers=peers, verify=_verifies(context, settings))


def _kv(context: Context, *, parts: Parts) -> Actor:
    from actors.kv import KvActor
    from actors.kv_disk import DiskConfig

    settings = parts.settings
    directory = Path(settings.kv_disk_dir).expanduser()
    disk = DiskConfig(
        directory if settings.kv == 1 else directory / context.ref.id,  # the id outlives a restart
        settings.kv_disk_bytes // settings.kv,
        sync=settings.kv_disk_sync,
        keep_all=settings.kv_disk_admission == "all",
        quotas=_quotas(settings.kv_tenant_disk_bytes, settings, "disk"),
        verify=_verifies(context, settings),
    )
    return KvActor(
        context,
        directory=Path(settings.shm_dir),
        prefix=settings.pool_prefix,
        num_blocks=settings.num_host_blocks,
        disk=disk if settings.kv_disk_dir else None,
        remote=settings.kv_listen != "off",
        copies_per_minute=settings.kv_copy_bytes_per_minute // settings.kv,
        quotas=_quotas(settings.kv_tenant_bytes, settings, "host"),
    )


def _verifies(context: Context, settings: Settings) -> bool:
    verifies = settings.kv_verify == "on"
    if not verifies:
        log = context.telemetry.log
        log.error("STORED KV IS NOT VERIFIED: damaged blocks are served", kv_verify=settings.kv_verify)
    return verifies


def _quotas(default_nbytes: int, settings: Settings, tier: str) -> Quotas:
    from kvstore.owners import Quotas
    from schemas.tenants import owner_of

    def part(nbytes: int) -> int:
        return max(1, nbytes // settings.kv) if nbytes else 0  # 0 is no limit

    own = {owner_of(tenant): part(shares[tier]) for tenant, shares in settings.kv_tenants.items() if tier in shares}
    return Quotas(part(default_nbytes), own)


def _engine(context: Context, *, role: str, parts: Parts) -> Actor:
    from actors.engine_host import EngineActor

    settings = parts.settings
    return EngineActor(
        context,
        role=role,
        make_runner=functools.partial(_runner, parts, context.clock.now),
        directory=Path(settings.shm_dir),
        prefix=settings.pool_prefix,
        num_blocks=settings.num_blocks,
        token_budget=settings.token_budget,
        max_running=settings.max_running,
        parking_tokens=settings.parking_tokens,
        make_drafter=functools.partial(_drafter, parts),
        max_draft=settings.draft_tokens,
        step_limit_s=settings.step_limit_s,
        always_load=settings.kv_load == "always" or not settings.real_engine,
        tenant_weights=settings.tenant_weights,
        pace_s={str(name): seconds for name, seconds in settings.slo_itl_s.items()},
    )


def _text(parts: Parts) -> ByteText | ModelText:
    """Return the tokenizer side of the model (or bytes, where there is none)."""
    if parts.model is None:
        return ByteText()
    from models.text import load_text

    return load_text(parts.model)


def _runner(parts: Parts, now: Callable[[], float]) -> Runner:
    """Return the engine's runner; called in the engine's thread."""
    kind = served.engine_kind(parts.settings)
    if kind == "scripted":
        from engine.scripted_runner import from_spec as scripted

        return scripted(parts.settings.engine)
    if kind == "null":
        from engine.null_runner import NullRunner

        pace = null_pace(parts.settings.engine.partition(":")[2])
        return NullRunner(
            decode_s=pace.get("decode_s", 0.0),
            prefill_s_per_token=pace.get("prefill_s_per_token", 0.0),
            decode_s_per_row=pace.get("decode_s_per_row", 0.0),
        )
    from engine.real_runner import load_runner

    assert parts.model is not None
    return load_runner(
        parts.model,
        engine=kind,
        dtype=parts.settings.dtype,
        threads=threads_per_engine(parts.settings),
        cache=served.cache_root(parts.settings),
        now=now,
        kv_format=parts.settings.kv_format,
    )


def _drafter(parts: Parts, runner: Runner) -> Drafter | None:
    """Return what guesses ids for a real model, as set; called in the engine's thread.

    Raises:
        StartError: if the draft model has another vocabulary.
    """
    settings = parts.settings
    if not settings.real_engine or settings.speculation == "off":
        return None
    if settings.speculation == "prompt-lookup":
        from engine.speculation.lookup import PromptLookup

        return PromptLookup()
    from engine.real_runner import load_runner
    from engine.speculation.model import ModelDrafter

    small = load_runner(
        Path(settings.draft_model),
        engine=served.engine_kind(settings),
        dtype=settings.dtype,
        threads=threads_per_engine(settings),
        cache=served.cache_root(settings),
    )
    if small.vocab_size != runner.vocab_size:
        raise StartError(
            f"--draft-model has {small.vocab_size} ids, the model {runner.vocab_size}: it cannot guess for it"
        )
    return ModelDrafter(small, settings.num_blocks)


NULL_PACE = ("decode_s", "prefill_s_per_token", "decode_s_per_row")


def null_pace(spec: str) -> dict[str, float]:
    """Return the pace in `decode_s=0.005,prefill_s_per_token=0.0001,decode_s_per_row=0.001`.

    Raises:
        StartError: if it is not such a list.
    """
    pace: dict[str, float] = {}
    for part in filter(None, spec.split(",")):
        name, _, value = part.partition("=")
        try:
            if name not in NULL_PACE or float(value) < 0:
                raise ValueError
            pace[name] = float(value)
        except ValueError:
            names = ", ".join(f"{name}=SECONDS" for name in NULL_PACE)
            raise StartError(f"--engine null: {part!r} is none of {names}") from None
    return pace
