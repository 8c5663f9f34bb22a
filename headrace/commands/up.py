"""`headrace up`: check, start everything, say when it is ready, wait, drain, leave nothing behind."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.status import Status

from headrace import bus_access, embedded_nats, instance, nodes, served
from headrace.checks import StartError, check_port
from headrace.layout import NodePlan, drain_order, plan_nodes
from kvstore.shm import reap
from runtime.clock import SystemClock
from runtime.nats_bus import NatsBus
from runtime.supervisor import ChildStatus, Exit, Supervisor
from schemas.errors import HeadraceError
from schemas.settings import Loaded, Settings, load

# Beyond the drain limit: the engines, the store and the bus have to leave too.
POOLS = "headrace-"  # how the names of all pools begin; a pool whose owner lives is locked
STOP_MARGIN_S = 1.5
POLL_S = 0.05


def run(loaded: Loaded) -> int:
    """Run an instance until it is told to stop; returns the exit code."""
    settings = loaded.settings
    console = Console(highlight=False, soft_wrap=True)
    home = settings.runtime_path / settings.instance_name
    try:
        (home / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
        with (home / "lock").open("w") as lock:
            _take(lock, settings)
            _keep_old_logs(home / "logs")
            _log_to(home / "logs" / "supervisor.log", settings)
            model = _check(settings, console)
            with asyncio.Runner() as runner:
                return runner.run(_Up(loaded, console, home, model).run())
    except (StartError, HeadraceError, bus_access.BusAccessError, embedded_nats.BusServerError, OSError) as exc:
        console.file.flush()
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _take(lock: Any, settings: Settings) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        name = settings.instance_name
        state = instance.read_state(instance.state_path(settings.runtime_path, name))
        where = f" (pid {state.pid}, {state.http_url})" if state is not None else ""
        raise StartError(
            f"instance {name!r} is running already{where}; stop it, or start another by --instance or --port-base"
        ) from exc


def _keep_old_logs(logs: Path) -> None:
    """Begin with empty logs, so that what they end with is of this run; the last run's stay as `.old`."""
    for path in logs.glob("*.log"):
        path.replace(path.with_name(path.name + ".old"))


def _check(settings: Settings, console: Console) -> Path | None:
    host, port = settings.http_address
    if port:
        check_port(host, port, "the HTTP edge")
    if not Path(settings.shm_dir).is_dir():
        raise StartError(f"{settings.shm_dir} is not a directory; set HEADRACE_SHM_DIR to one in memory")
    return served.model_path(settings, progress=lambda line: console.print(f"  {line}"))


def _log_to(path: Path, settings: Settings) -> None:
    from runtime.telemetry import route_standard_logging

    route_standard_logging("supervisor", settings.log_level)
    handler = logging.FileHandler(path)
    root = logging.getLogger()
    handler.setFormatter(root.handlers[0].formatter)
    root.handlers[:] = [handler]


@dataclass(slots=True)
class _Up:
    """One run of an instance."""

    loaded: Loaded
    console: Console
    home: Path
    model: Path | None
    clock: SystemClock = field(default_factory=SystemClock)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    supervisor: Supervisor | None = None
    bus: NatsBus | None = None
    early_exit: Exit | None = None
    ready: bool = False

    @property
    def logs(self) -> Path:
        """Where the children's output goes."""
        return self.home / "logs"

    async def run(self) -> int:
        """Start, wait, stop; returns the exit code."""
        from setproctitle import setproctitle

        settings = self.loaded.settings
        setproctitle(f"headrace: up {settings.instance_name}")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._asked_to_stop)
        self._reap(settings, POOLS)  # also what a killed instance of another name has left
        plans = plan_nodes(settings)
        try:
            try:
                await self._start(plans)
            except _Stopped:
                self.console.print("stopped before it was ready")
            else:
                await self.stop.wait()
        finally:
            await self._leave(plans)
        return 0

    def _asked_to_stop(self) -> None:
        if self.stop.is_set() and self.supervisor is not None:
            self.console.print("stopping now")
            self.supervisor.kill_all()
        self.stop.set()

    # --- starting --------------------------------------------------------------------------------------

    async def _start(self, plans: list[NodePlan]) -> None:
        began = self.clock.now()
        self.console.print(f"[bold]headrace[/bold] {self.loaded.settings.instance_name}; logs in {self.logs}")
        with self.console.status("starting the bus") as status:
            settings, env = await self._connect()
            self._write_state(settings, env, plans)
            assert self.supervisor is not None
            for plan in plans:
                await self.supervisor.add(nodes.node_spec(plan, settings, env, self.logs))
            await self._until_ready(plans, began, status)
            await self._until_served(settings, began, status)
        self.ready = True
        self._say_ready(settings, self.clock.now() - began)

    async def _connect(self) -> tuple[Settings, dict[str, str]]:
        """Start the bus if it is ours, connect, and return the children's settings and environment."""
        env = self.loaded.to_env()
        settings = self.loaded.settings
        env["HEADRACE_INSTANCE"] = settings.instance_name
        host, http_port = settings.http_address
        if http_port == 0:
            env["HEADRACE_HTTP"] = f"[{host}]:{embedded_nats.free_port(host)}"
        if self.model is not None:
            env["HEADRACE_MODEL"] = str(self.model)
        specs = []
        if not settings.bus_url:
            port = settings.port_base + 1 if settings.port_base else 0
            server = embedded_nats.prepare(self.home / "bus", port=port)
            env |= {"HEADRACE_BUS_URL": server.url, "HEADRACE_BUS_TOKEN": server.token}
            specs = [nodes.bus_spec(server, self.logs)]
        settings = load({}, environ=env).settings
        self.supervisor = Supervisor(specs, clock=self.clock, on_exit=self._on_exit)
        await self.supervisor.start()
        connecting = self.clock.spawn(
            bus_access.connect(
                settings,
                clock=self.clock,
                name="supervisor",
                on_wait=lambda line: self.console.print(f"[yellow]waiting:[/yellow] {line}"),
            ),
            name="connect",
        )
        stopping = self.clock.spawn(self._watch_stop(), name="watch-stop")
        await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not connecting.done():
            connecting.cancel()
            raise _Stopped
        self.bus = connecting.result()
        await self.supervisor.attach(self.bus)
        self.console.print(f"  bus       {settings.bus_url}")
        return settings, env

    async def _watch_stop(self) -> None:
        await self.stop.wait()

    def _write_state(self, settings: Settings, env: dict[str, str], plans: list[NodePlan]) -> None:
        instance.write_state(
            self.loaded.settings.runtime_path,
            instance.InstanceState(
                instance=settings.instance_name,
                pid=os.getpid(),
                started=instance.process_start(os.getpid()),
                http_url=http_url(settings),
                bus_url=settings.bus_url,
                bus_token=bus_access.secret(settings.bus_token) or "",
                logs=str(self.logs),
                nodes=[plan.name for plan in plans],
                env=env,
            ),
        )

    async def _until_ready(self, plans: list[NodePlan], began: float, status: Status) -> None:
        assert self.supervisor is not None
        limit = began + self.loaded.settings.start_limit_s
        kinds = {plan.name: " ".join(plan.kinds) for plan in plans}
        told: set[str] = set()
        while True:
            self._raise_if_over(limit, ", ".join(sorted(set(kinds) - told)))
            rows = [row for row in self.supervisor.status() if row.name in kinds]
            for row in rows:
                self._raise_if_failed(row)
                if row.ready and row.name not in told:
                    told.add(row.name)
                    after = self.clock.now() - began
                    self.console.print(f"  {row.name:<9} {kinds[row.name]}, pid {row.pid}, ready after {after:.1f} s")
            waiting = [row.name for row in rows if not row.ready]
            if not waiting:
                return
            status.update(f"starting {', '.join(waiting)}")
            await self.clock.sleep(POLL_S)

    async def _until_served(self, settings: Settings, began: float, status: Status) -> None:
        """Wait until the edge itself says that a request would be served."""
        status.update("waiting for the edge")
        limit = began + settings.start_limit_s
        reason = ""
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while True:
                self._raise_if_over(limit, f"the edge ({reason or 'it does not answer'})")
                try:
                    reply = await client.get(f"{http_url(settings)}/health/ready")
                    if reply.status_code == 200:
                        return
                    reason = reply.text[:300]
                except httpx.HTTPError as exc:
                    reason = str(exc) or type(exc).__name__
                await self.clock.sleep(POLL_S)

    def _raise_if_over(self, limit: float, waiting: str) -> None:
        if self.stop.is_set():
            raise _Stopped
        early = self.early_exit
        if early is not None:
            told = nodes.tail(self.logs / f"{early.name}.log")
            raise StartError(f"{early.name} ended with code {early.code} before it was ready\n{told}".rstrip())
        if self.clock.now() > limit:
            raise StartError(
                f"not ready within {self.loaded.settings.start_limit_s:.0f} s: {waiting}; see the logs in {self.logs}"
            )

    def _raise_if_failed(self, row: ChildStatus) -> None:
        assert self.supervisor is not None
        for ref in row.refs:
            member = self.supervisor.membership.view.get(ref)
            if member is not None and member.state == "failed":
                raise StartError(f"{row.name}: {ref.kind} failed: {member.reason}")

    def _say_ready(self, settings: Settings, after_s: float) -> None:
        url = http_url(settings)
        name = served.model_names(settings, self.model)[0]
        self.console.print(f"[green bold]ready[/green bold] after {after_s:.1f} s: {name} at {url}/v1")
        question = [{"role": "user", "content": "What is a headrace?"}]
        body = json.dumps({"model": name, "messages": question, "max_tokens": 64, "stream": True})
        # Printed without markup or wrapping, to be pasted.
        print(f"\ncurl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n")
        print("or: headrace chat    actors: headrace ps    stop: Ctrl-C", flush=True)

    # --- running and stopping --------------------------------------------------------------------------

    def _on_exit(self, event: Exit) -> None:
        # Its pool has no owner any more; a running instance would keep one more after each kill.
        self._reap(self.loaded.settings)
        if event.planned:
            return
        if not self.ready and event.code > 0:
            self.early_exit = self.early_exit or event
            return
        again = "" if event.restart_in_s is None else f"; started again in {event.restart_in_s:.1f} s"
        loop = " (it keeps dying: see its log)" if event.crash_loop else ""
        self.console.print(
            f"[yellow]{event.name}[/yellow] (pid {event.pid}) ended with {event.code} after {event.lived_s:.1f} s"
            f"{again}{loop}"
        )

    async def _leave(self, plans: list[NodePlan]) -> None:
        settings = self.loaded.settings
        if self.supervisor is not None:
            if self.ready:
                self.console.print(f"stopping (up to {settings.drain_limit_s:.0f} s; once more: at once)")
            order = [[plan.name for plan in group] for group in drain_order(plans)]
            limit = settings.drain_limit_s + STOP_MARGIN_S if self.ready else STOP_MARGIN_S
            await self.supervisor.stop(limit, order=order)
        if self.bus is not None:
            await self.bus.close()
        instance.remove_state(settings.runtime_path, settings.instance_name)
        shutil.rmtree(self.home / "bus", ignore_errors=True)
        self._reap(settings)
        if self.supervisor is not None:
            self.console.print("stopped")

    def _reap(self, settings: Settings, prefix: str = "") -> None:
        for name in reap(Path(settings.shm_dir), prefix or settings.pool_prefix, set()):
            logging.getLogger("headrace.up").warning("removed %s, which a dead process had left", name)


class _Stopped(Exception):
    """Raised when a stop is asked for before the start is over."""


def http_url(settings: Settings) -> str:
    """Return the URL of the edge as this machine reaches it."""
    host, port = settings.http_address
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
