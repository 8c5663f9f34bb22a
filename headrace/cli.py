"""The command line. Importing it is quick: every command imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from headrace.instance import InstanceState
    from schemas.settings import Loaded, Settings

app = typer.Typer(
    name="headrace",
    help="An actor-based dataflow runtime that serves language models over NATS.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

kv_app = typer.Typer(help="The KV store.", invoke_without_command=True)
app.add_typer(kv_app, name="kv")

KINDS_HELP = "edge, admission, tokenize, detokenize, prefill, decode, both, transfer, kv."

ConfigFile = Annotated[str | None, typer.Option("--config", help="Settings file (default: headrace.toml here).")]
Instance = Annotated[str | None, typer.Option(help="Name of the instance.")]
PortBase = Annotated[int | None, typer.Option(help="First of this instance's ports; moves all of them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str | None, typer.Option(help="GGUF file or Hugging Face folder (default: a small one, fetched).")]
ModelName = Annotated[str | None, typer.Option("--served-model-name", help="Name that clients use.")]
Engine = Annotated[str | None, typer.Option(help="auto, native, torch, scripted[:FILE] or null[:SPEC].")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")]
Http = Annotated[str | None, typer.Option(help="HOST:PORT of the HTTP edge (default 127.0.0.1:8000).")]
BusUrl = Annotated[str | None, typer.Option("--bus", help="URL of an existing NATS server.")]
BusToken = Annotated[str | None, typer.Option(help="Token for the bus (better: HEADRACE_BUS_TOKEN).")]
BusUser = Annotated[str | None, typer.Option(help="User for the bus; its password: HEADRACE_BUS_PASSWORD.")]
BusCreds = Annotated[str | None, typer.Option(help="NATS credentials file.")]
BusCa = Annotated[str | None, typer.Option("--bus-tls-ca", help="CA certificate for the bus.")]
BusCert = Annotated[str | None, typer.Option("--bus-tls-cert", help="Client certificate for the bus.")]
BusKey = Annotated[str | None, typer.Option("--bus-tls-key", help="Client key for the bus.")]
Threads = Annotated[int | None, typer.Option(help="Threads per engine.")]
PoolTokens = Annotated[int | None, typer.Option(help="Tokens of KV per engine.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
Drain = Annotated[float | None, typer.Option("--drain-limit-s", help="How long a stop waits for running work.")]


@app.command()
def up(
    model: Model = None,
    served_model_name: ModelName = None,
    engine: Engine = None,
    dtype: Dtype = None,
    prefill: Annotated[int | None, typer.Option(help="Engines in the prefill role (default 1).")] = None,
    decode: Annotated[int | None, typer.Option(help="Engines in the decode role (default 2).")] = None,
    both: Annotated[int | None, typer.Option(help="Engines in both roles at once (default 0).")] = None,
    kv: Annotated[int | None, typer.Option(help="Stores of KV (default 1).")] = None,
    http: Http = None,
    bus: BusUrl = None,
    bus_token: BusToken = None,
    bus_user: BusUser = None,
    bus_creds: BusCreds = None,
    bus_tls_ca: BusCa = None,
    bus_tls_cert: BusCert = None,
    bus_tls_key: BusKey = None,
    port_base: PortBase = None,
    isolate: Annotated[bool | None, typer.Option(help="One process per actor.")] = None,
    threads: Threads = None,
    pool_tokens: PoolTokens = None,
    instance: Instance = None,
    drain_limit_s: Drain = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Start everything on this machine: bus, actors, engines, HTTP edge."""
    loaded = _load(
        config,
        model=model,
        served_model_name=served_model_name,
        engine=engine,
        dtype=dtype,
        prefill=prefill,
        decode=decode,
        both=both,
        kv=kv,
        http=http,
        bus_url=bus,
        bus_token=bus_token,
        bus_user=bus_user,
        bus_creds=bus_creds,
        bus_tls_ca=bus_tls_ca,
        bus_tls_cert=bus_tls_cert,
        bus_tls_key=bus_tls_key,
        port_base=port_base,
        isolate=isolate,
        threads=threads,
        pool_tokens=pool_tokens,
        instance=instance,
        drain_limit_s=drain_limit_s,
        log_level=log_level,
    )
    from headrace.commands.up import run

    sys.exit(run(loaded))


@app.command()
def actor(
    kinds: Annotated[list[str], typer.Argument(help=KINDS_HELP)],
    bus: BusUrl = None,
    node: Annotated[str | None, typer.Option(help="Name of this node (default: made up).")] = None,
    actor_id: Annotated[str | None, typer.Option("--id", help="Id of its actors (default: the node's name).")] = None,
    private: Annotated[
        list[str] | None, typer.Option(help="One more kind, for this node's other actors alone; may be repeated.")
    ] = None,
    model: Model = None,
    served_model_name: ModelName = None,
    engine: Engine = None,
    dtype: Dtype = None,
    http: Http = None,
    bus_token: BusToken = None,
    bus_user: BusUser = None,
    bus_creds: BusCreds = None,
    bus_tls_ca: BusCa = None,
    bus_tls_cert: BusCert = None,
    bus_tls_key: BusKey = None,
    port_base: PortBase = None,
    threads: Threads = None,
    pool_tokens: PoolTokens = None,
    instance: Instance = None,
    drain_limit_s: Drain = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Run one node with actors of these kinds on a bus; without --bus, on that of the running instance."""
    loaded = _load(
        config,
        model=model,
        served_model_name=served_model_name,
        engine=engine,
        dtype=dtype,
        http=http,
        bus_url=bus,
        bus_token=bus_token,
        bus_user=bus_user,
        bus_creds=bus_creds,
        bus_tls_ca=bus_tls_ca,
        bus_tls_cert=bus_tls_cert,
        bus_tls_key=bus_tls_key,
        port_base=port_base,
        threads=threads,
        pool_tokens=pool_tokens,
        instance=instance,
        drain_limit_s=drain_limit_s,
        log_level=log_level,
    )
    from headrace.commands.actor import run

    sys.exit(run(_with_bus(loaded), kinds, node=node, actor_id=actor_id, private=private or []))


@app.command()
def chat(
    message: Annotated[str | None, typer.Option("-m", "--message", help="Say one thing and leave.")] = None,
    url: Annotated[str | None, typer.Option(help="URL of an instance (default: the one running here).")] = None,
    model: Annotated[str | None, typer.Option(help="Model name (default: the one served).")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    instance: Instance = None,
    port_base: PortBase = None,
    config: ConfigFile = None,
) -> None:
    """Talk to a running instance."""
    from headrace.commands import chat as command

    try:
        where = url or _find(_load(config, instance=instance, port_base=port_base)).http_url
        options: dict[str, Any] = {"model": model or command.first_model(where), "max_tokens": max_tokens}
        if temperature is not None:
            options["temperature"] = temperature
        if seed is not None:
            options["seed"] = seed
        if message is not None:
            command.once(where, message, options)
        else:
            command.converse(where, options)
    except command.ChatError as exc:
        _fail(str(exc))
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def ps(as_json: AsJson = False, bus: BusUrl = None, instance: Instance = None, port_base: PortBase = None,
       bus_token: BusToken = None, config: ConfigFile = None) -> None:  # fmt: skip
    """List the actors that speak on the bus: kind, id, pid, epoch, state, load."""
    loaded = _load(config, bus_url=bus, bus_token=bus_token, instance=instance, port_base=port_base)
    settings = _with_bus(loaded).settings
    from headrace.commands.ps import show
    from schemas.errors import HeadraceError

    try:
        show(settings, as_json=as_json)
    except HeadraceError as exc:
        _fail(str(exc))


@app.command()
def doctor(
    as_json: AsJson = False, model: Model = None, engine: Engine = None, http: Http = None, instance: Instance = None,
    port_base: PortBase = None, config: ConfigFile = None,
) -> None:  # fmt: skip
    """Check this machine, the installation and the running instance; exit code 1 if anything fails."""
    loaded = _load(config, model=model, engine=engine, http=http, instance=instance, port_base=port_base)
    from headrace.commands.doctor import show

    sys.exit(show(loaded.settings, as_json=as_json))


@app.command("config")
def config_command(as_json: AsJson = False, config: ConfigFile = None) -> None:
    """Show the effective settings and where each comes from; secrets are masked."""
    loaded = _load(config)
    from headrace.commands.config import show

    show(loaded, as_json=as_json)


@kv_app.callback()
def kv_show(
    context: typer.Context,
    bus: BusUrl = None,
    as_json: AsJson = False,
    top: Annotated[int, typer.Option(min=0, max=64, help="Rows of each list.")] = 10,
    instance: Instance = None,
    port_base: PortBase = None,
    config: ConfigFile = None,
) -> None:
    """Show tiers, hit rates, the prefixes that are found most, and tenants' shares, of every store on the bus."""
    if context.invoked_subcommand is not None:
        return
    settings = _with_bus(_load(config, bus_url=bus, instance=instance, port_base=port_base)).settings
    from headrace.commands.kv_show import show

    _run(lambda: show(settings, as_json=as_json, top=top))


@kv_app.command("pin")
def kv_pin(
    text: Annotated[str, typer.Argument(help="The prompt; with --messages a JSON array of chat messages; - reads it.")],
    ttl: Annotated[float, typer.Option(help="Seconds, up to a day.")] = 3600.0,
    messages: Annotated[bool, typer.Option("--messages", help="TEXT is a JSON array of chat messages.")] = False,
    model: Annotated[str | None, typer.Option(help="Name of the model (default: the one that is served).")] = None,
    tenant: Annotated[str, typer.Option(help="Whose prefix it is.")] = "default",
    salt: Annotated[str | None, typer.Option(help="The requests' cache_salt.")] = None,
    pin_id: Annotated[str, typer.Option("--id", help="Id of the pin; a known one is pinned anew.")] = "",
    as_json: AsJson = False, bus: BusUrl = None, instance: Instance = None, port_base: PortBase = None,
    config: ConfigFile = None,
) -> None:  # fmt: skip
    """Keep a prompt's stored prefix from being evicted for a while."""
    import json

    from headrace.commands.kv_pin import pin

    settings = _with_bus(_load(config, bus_url=bus, instance=instance, port_base=port_base)).settings
    given = sys.stdin.read() if text == "-" else text
    try:
        prompt = {"messages": json.loads(given)} if messages else {"prompt": given}
    except ValueError as exc:
        _fail(f"the messages are not JSON: {exc}", code=2)
    options = {"model": model, "cache_salt": salt}
    body = prompt | {name: value for name, value in options.items() if value is not None}
    _run(lambda: pin(settings, body, ttl_s=ttl, tenant=tenant, name=pin_id, as_json=as_json))


@kv_app.command("unpin")
def kv_unpin(
    pin_id: Annotated[str, typer.Argument(help="Id of the pin.")],
    bus: BusUrl = None, instance: Instance = None, port_base: PortBase = None, config: ConfigFile = None,
) -> None:  # fmt: skip
    """End a pin; exit code 1 if no store knows it."""
    from headrace.commands.kv_pin import unpin

    settings = _with_bus(_load(config, bus_url=bus, instance=instance, port_base=port_base)).settings
    _run(lambda: unpin(settings, pin_id))


@kv_app.command("pins")
def kv_pins(
    as_json: AsJson = False, bus: BusUrl = None, instance: Instance = None, port_base: PortBase = None,
    config: ConfigFile = None,
) -> None:  # fmt: skip
    """List the pinned prefixes of every store: blocks, how many are stored, and until when."""
    from headrace.commands.kv_pin import pins

    settings = _with_bus(_load(config, bus_url=bus, instance=instance, port_base=port_base)).settings
    _run(lambda: pins(settings, as_json=as_json))


@kv_app.command("freeze")
def kv_freeze(
    tier: Annotated[list[str] | None, typer.Option(help="host or disk; may be given twice. Default: both.")] = None,
    as_json: AsJson = False, bus: BusUrl = None, instance: Instance = None, port_base: PortBase = None,
    config: ConfigFile = None,
) -> None:  # fmt: skip
    """Let the stores' tiers take nothing new, and the others what is new; what is stored is served as before."""
    from headrace.commands.kv_freeze import TIERS, freeze

    tiers = list(TIERS) if tier is None else tier
    if unknown := set(tiers) - set(TIERS):
        _fail(f"no such tier: {', '.join(sorted(unknown))}; there are {' and '.join(TIERS)}", code=2)
    settings = _with_bus(_load(config, bus_url=bus, instance=instance, port_base=port_base)).settings
    _run(lambda: freeze(settings, tiers, as_json=as_json))


@kv_app.command("thaw")
def kv_thaw(
    as_json: AsJson = False, bus: BusUrl = None, instance: Instance = None, port_base: PortBase = None,
    config: ConfigFile = None,
) -> None:  # fmt: skip
    """Let every tier take what is new again."""
    from headrace.commands.kv_freeze import freeze

    settings = _with_bus(_load(config, bus_url=bus, instance=instance, port_base=port_base)).settings
    _run(lambda: freeze(settings, [], as_json=as_json))


@kv_app.command("verify")
def kv_verify(
    directory: Annotated[str, typer.Argument(help="Directory of a disk tier (kv_disk_dir).")],
    drop: Annotated[bool, typer.Option("--drop", help="Take bad records out.")] = False,
) -> None:
    """Check every block of a disk tier that nobody uses; exit code 1 if one is bad, 2 if the tier is in use."""
    from pathlib import Path

    from headrace.commands.kv import verify

    sys.exit(verify(Path(directory), drop=drop))


@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)  # fmt: skip
def chaos(context: typer.Context) -> None:
    """Break a running system, or a private one, and check its promises: list, run, full, storm, replay, check."""
    from headrace.commands.chaos import run

    run(context.args)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib import metadata

    print(metadata.version("headrace"))


def _load(config: str | None, **flags: Any) -> Loaded:
    from schemas.settings import SettingsError, load

    try:
        return load(flags, config=config)
    except SettingsError as exc:
        _fail(*exc.problems, code=2)


def _find(loaded: Loaded) -> InstanceState:
    from headrace.instance import NoInstance, find

    settings: Settings = loaded.settings
    try:
        return find(settings.runtime_path, settings.instance_name)
    except NoInstance as exc:
        _fail(str(exc))


def _with_bus(loaded: Loaded) -> Loaded:
    """Where no bus is given, join the running instance: its bus, and its settings below one's own."""
    if loaded.settings.bus_url:
        return loaded
    from schemas.settings import Loaded as Pair
    from schemas.settings import load

    state = _find(loaded)
    token = {"HEADRACE_BUS_TOKEN": state.bus_token} if state.bus_token else {}
    environ = state.env | loaded.to_env() | {"HEADRACE_BUS_URL": state.bus_url} | token
    joined = load({}, environ=environ)
    theirs = f"instance {state.instance}"
    sources = {
        name: own if own != "default" or source == "default" else theirs
        for (name, source), own in zip(joined.sources.items(), loaded.sources.values(), strict=True)
    }
    return Pair(joined.settings, sources)


def _run(command: Callable[[], int]) -> NoReturn:
    """End with what a command returns, or with its error in a line."""
    from schemas.errors import HeadraceError

    try:
        sys.exit(command())
    except HeadraceError as exc:
        _fail(str(exc))


def _fail(*lines: str, code: int = 1) -> NoReturn:
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(code)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
