"""A running system to hurt: one started for the purpose, or one that runs already, found by its state file."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import nats
from nats.aio.client import Client as Nats

from schemas.settings import load

COMMAND = (sys.executable, "-c", "from headrace.cli import main; main()")
STOP_LIMIT_S = 30.0


class InstanceFailed(Exception):
    """Raised when an instance does not start, or dies; the message ends with the end of its output."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a running instance is reached."""

    http: str
    bus: str
    token: str = ""
    user: str = ""
    password: str = ""

    async def connect(self, name: str) -> Nats:
        """Connect a native client to its bus."""

        async def quiet(_error: Exception) -> None:
            return None  # a broken connection shows as requests without an end

        options: dict[str, Any] = {"name": name, "error_cb": quiet, "max_reconnect_attempts": -1}
        if self.token:
            options["token"] = self.token
        if self.user:
            options |= {"user": self.user, "password": self.password}
        return await nats.connect(self.bus, **options)

    def client(self, limit_s: float = 300.0) -> httpx.AsyncClient:
        """Return an HTTP client for it, with as many connections as anyone asks for."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx.AsyncClient(base_url=self.http, timeout=httpx.Timeout(limit_s, connect=5.0), limits=limits)


def address(instance: str = "") -> Address:
    """Find a running instance by its state file.

    Raises:
        InstanceFailed: if there is none.
    """
    state = read_state(instance)
    return Address(http=str(state["http_url"]), bus=str(state["bus_url"]), token=str(state.get("bus_token") or ""))


def read_state(instance: str = "") -> dict[str, Any]:
    """Read the state file of a running instance.

    Raises:
        InstanceFailed: if there is none, or its process is gone.
    """
    settings = load({"instance": instance or None}).settings
    path = settings.runtime_path / f"{settings.instance_name}.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        os.kill(int(state["pid"]), 0)
    except (OSError, ValueError, KeyError) as exc:
        raise InstanceFailed(f"no instance {settings.instance_name!r} is running ({path}: {exc})") from exc
    return state


def leftovers(instance: str) -> list[str]:
    """Return the shared-memory files of an instance that still lie there."""
    settings = load().settings
    return sorted(str(p) for p in Path(settings.shm_dir).glob(f"headrace-{instance}-*"))


@asynccontextmanager
async def serving(options: argparse.Namespace, *more: str, env: dict[str, str] | None = None) -> AsyncIterator[Address]:
    """Yield the address of the instance that the options name, or of a private one that is stopped at the end.

    Raises:
        InstanceFailed: if it does not start, or if the private one does not stop cleanly.
    """
    if options.instance is not None:
        yield address(options.instance)
        return
    directory = Path(tempfile.mkdtemp(prefix="headrace-check-"))
    name = f"check-{options.port_base}"
    instance = Instance(name, log=directory / "up.log")
    flags = ["--engine", options.engine, *more]
    await instance.start(*flags, port_base=options.port_base, env=env)
    print(f"instance {name} ready after {instance.ready_after_s:.1f} s; log {instance.log}", flush=True)
    try:
        yield instance.address
    finally:
        code = await instance.stop()
        left = leftovers(name)
    if code or left:
        raise InstanceFailed(f"stopped with exit code {code}, left {left}:\n{instance.tail()}")


def add_options(parser: argparse.ArgumentParser, *, port_base: int) -> None:
    """Add the options that `serving` reads."""
    parser.add_argument("--instance", default=None, help="use this running instance instead of starting one")
    parser.add_argument("--engine", default="auto", help="auto, native or torch (the real model) or scripted[:FILE]")
    parser.add_argument("--port-base", type=int, default=port_base, help="ports of the private instance")


def report(name: str, check: Coroutine[Any, Any, dict[str, Any]], *failures: type[Exception]) -> int:
    """Run a check, print its figures as the last line, one JSON object, and return the exit code.

    Args:
        name: of the check, for the line that tells of a failure.
        check: returns the figures, `ok` among them.
        failures: what, besides a failed instance, ends the check with a line instead of a traceback.
    """
    told: tuple[type[Exception], ...] = (InstanceFailed, *failures)
    try:
        figures = asyncio.run(check)
    except told as exc:
        figures = {"check": name, "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


class Instance:
    """One private system: started with `headrace up`, stopped by SIGTERM, checked to have left nothing behind."""

    def __init__(self, name: str, *, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: asyncio.subprocess.Process | None = None
        self.ready_after_s = 0.0
        self.address = Address("", "")

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        assert self._process is not None
        return self._process.pid

    async def start(
        self, *options: str, port_base: int, env: dict[str, str] | None = None, limit_s: float = 120.0
    ) -> None:
        """Start and wait until a request would be served.

        Raises:
            InstanceFailed: if it ends first, or is not ready in time.
        """
        argv = [*COMMAND, "up", "--instance", self.name, "--port-base", str(port_base), *options]
        loop = asyncio.get_running_loop()
        began = loop.time()
        with self.log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdout=out, stderr=out, stdin=asyncio.subprocess.DEVNULL, env={**os.environ, **(env or {})}
            )
        while True:
            if self._process.returncode is not None:
                raise InstanceFailed(f"headrace up ended with {self._process.returncode}:\n{self.tail()}")
            if loop.time() - began > limit_s:
                await self.stop()
                raise InstanceFailed(f"not ready within {limit_s} s:\n{self.tail()}")
            try:
                self.address = address(self.name)
                async with self.address.client(2.0) as http:
                    if (await http.get("/health/ready")).status_code == 200:
                        break
            except (InstanceFailed, httpx.HTTPError, KeyError, json.JSONDecodeError):
                pass
            await asyncio.sleep(0.1)
        self.ready_after_s = loop.time() - began

    def tail(self, lines: int = 30) -> str:
        """Return the end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def stop(self) -> int:
        """SIGTERM, wait, and return the exit code; SIGKILL after the limit."""
        process = self._process
        if process is None:
            return 0
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_LIMIT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode
