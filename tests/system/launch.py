"""Starts whole systems for tests, as a user would: `headrace up` in a process of its own."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from chaos.instance import COMMAND, Address, InstanceFailed, address, leftovers, read_state
from chaos.watch import Watch
from tests.support.ports import free_ports

PR_SET_PDEATHSIG = 1
START_LIMIT_S = 90.0
STOP_LIMIT_S = 40.0


def wait_until(condition: Callable[[], Any], *, limit_s: float, what: str) -> Any:
    """Poll until the condition gives something true, and return that; a bounded wait, not a pause."""
    end = time.monotonic() + limit_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {limit_s} s")
        time.sleep(0.02)


def _die_with_the_tests() -> None:
    # A test run that is killed must not leave whole systems behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class System:
    """One running instance."""

    def __init__(self, directory: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.port_base = free_ports(2)
        self.name = f"test-{self.port_base}"
        self.log = directory / f"{self.name}.log"
        self.options = options
        self._env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start without waiting."""
        argv = [*COMMAND, "up", "--instance", self.name, "--port-base", str(self.port_base), *self.options]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self._env, preexec_fn=_die_with_the_tests
            )

    def start(self) -> System:
        """Start and wait until it is ready."""
        self.launch()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Wait until the edge says that a request would be served."""

        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"headrace up ended with {self.process.returncode}:\n{self.tail()}")
            return self.status("/health/ready") == 200

        try:
            wait_until(ready, limit_s=START_LIMIT_S, what="ready")
        except AssertionError as exc:
            self.stop()
            raise AssertionError(f"{exc}\n{self.tail()}") from exc

    def tail(self, lines: int = 40) -> str:
        """Return the end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def url(self) -> str:
        """Address of the edge."""
        return f"http://127.0.0.1:{self.port_base}"

    @property
    def address(self) -> Address:
        """Address by the state file."""
        return address(self.name)

    @property
    def state(self) -> dict[str, Any]:
        """The state file."""
        return read_state(self.name)

    def status(self, path: str) -> int:
        """Return the status of a GET; 0 if nobody answers."""
        try:
            return httpx.get(self.url + path, timeout=5.0).status_code
        except httpx.HTTPError:
            return 0

    def chat(self, text: str, **options: Any) -> httpx.Response:
        """Send one chat request."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0.0, "max_tokens": 32, **options}
        return httpx.post(self.url + "/v1/chat/completions", json={"model": self.model, **body}, timeout=60.0)

    @property
    def model(self) -> str:
        """Name of the model that is served."""
        return str(httpx.get(self.url + "/v1/models", timeout=10.0).json()["data"][0]["id"])

    def stream(self, text: str, **options: Any) -> Streamed:
        """Send one streamed chat request and read it to its end."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0.0, "max_tokens": 32, **options}
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", self.url + "/v1/chat/completions", json=body, timeout=60.0) as response:
            assert response.status_code == 200, response.read()
            return Streamed(list(response.iter_lines()))

    def rows(self) -> list[dict[str, Any]]:
        """Return what `ps` would show, from heartbeats heard here: no process is started for it."""

        async def listen() -> list[dict[str, Any]]:
            nats = await self.address.connect("test-rows")
            try:
                watch = Watch(time.monotonic)
                await watch.start(nats)
                await asyncio.sleep(0.3)
            finally:
                await nats.close()
            beats = [seen.beat for seen in watch.live()]
            return [
                {"kind": b.ref.kind, "id": b.ref.id, "node": b.node, "pid": b.pid, "state": b.state, "load": b.load,
                 "running": b.load.get("running", 0), "waiting": b.load.get("waiting", 0)}
                for b in beats
            ]  # fmt: skip

        return asyncio.run(listen())

    def ps(self) -> list[dict[str, Any]]:
        """Return what `headrace ps --json` prints."""
        argv = [*COMMAND, "ps", "--json", "--instance", self.name]
        out = subprocess.run(argv, capture_output=True, text=True, timeout=20, env=self._env, check=True)
        return list(json.loads(out.stdout))

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another command of the program beside this instance."""
        argv = [*COMMAND, *words, "--instance", self.name]
        return subprocess.run(argv, capture_output=True, text=True, timeout=20, env=self._env, check=False)

    def processes(self) -> list[psutil.Process]:
        """Return the supervisor and everything under it."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, wait for its end, and return the exit code."""
        process = self.process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return process.returncode

    def leftovers(self) -> list[str]:
        """Return the shared-memory files that it left."""
        return leftovers(self.name)


class Streamed:
    """A streamed answer that was read to its end."""

    def __init__(self, lines: list[str]) -> None:
        self.events = [line[5:].strip() for line in lines if line.startswith("data:")]
        self.chunks: list[dict[str, Any]] = [json.loads(e) for e in self.events if e != "[DONE]"]

    @property
    def deltas(self) -> list[str]:
        """Non-empty texts of choice 0, as they came."""
        parts = [c["choices"][0]["delta"].get("content") for c in self.chunks if c.get("choices")]
        return [part for part in parts if part]

    @property
    def text(self) -> str:
        """The concatenated text of choice 0."""
        return "".join(self.deltas)

    @property
    def reason(self) -> str:
        """The finish reason of choice 0."""
        reasons = [c["choices"][0].get("finish_reason") for c in self.chunks if c.get("choices")]
        return next(r for r in reasons if r)

    @property
    def usage(self) -> dict[str, Any]:
        """Usage of the answer."""
        return next(dict(c["usage"]) for c in self.chunks if c.get("usage"))


__all__ = ["InstanceFailed", "Streamed", "System", "wait_until"]
