"""NVIDIA Dynamo with its mocker: a frontend and workers that simulate an engine, as processes that can be killed."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.client import LoadFailed
from bench.load import model_of, one
from bench.servers import PeerMissing, ServerFailed
from headrace.embedded_nats import free_port

NAME = "tiny"
LIMIT_S = 90.0


def python(directory: Path) -> Path:
    """Return the interpreter of Dynamo's environment.

    Raises:
        PeerMissing: if it or the model's folder (for its tokenizer) is not there.
    """
    if not (directory / "dynamo" / ".headrace-ready").exists() or not (directory / "model-hf" / "config.json").exists():
        raise PeerMissing("Dynamo", directory)
    return directory / "dynamo" / "bin" / "python"


@dataclass(slots=True)
class Dynamo:
    """`async with Dynamo(...)`: one frontend, `workers` mockers, no other service; discovery by files, TCP between."""

    directory: Path
    port: int = 0  # a free one
    workers: int = 2
    base: str = ""
    _processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _home: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="headrace-dynamo-")))

    async def __aenter__(self) -> Dynamo:
        """Start everything and wait until each worker has answered.

        Raises:
            ServerFailed: if that does not happen.
            PeerMissing: if it is not installed.
        """
        self.port = self.port or free_port("127.0.0.1")
        self.base = f"http://127.0.0.1:{self.port}"
        (self._home / "kv").mkdir()
        try:
            for number in range(self.workers):
                await self._worker(number)
            await self._start(
                "frontend", "-m", "dynamo.frontend", "--http-port", str(self.port), "--router-mode", "round-robin",
                "--migration-limit", "3",
            )  # fmt: skip
            await self.whole()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _worker(self, number: int) -> None:
        await self._start(
            f"worker-{number}", "-m", "dynamo.mocker", "--model-path", str(self.directory / "model-hf"),
            "--model-name", NAME, "--speedup-ratio", "1",
        )  # fmt: skip

    async def _start(self, name: str, *argv: str) -> None:
        environment = {
            "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(self._home / "kv"), "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(self._home),
        }  # fmt: skip
        with (self._home / f"{name}.log").open("ab") as out:
            self._processes[name] = await asyncio.create_subprocess_exec(
                str(python(self.directory)), *argv, stdout=out, stderr=out, stdin=asyncio.subprocess.DEVNULL,
                env=environment, start_new_session=True,
            )  # fmt: skip

    async def whole(self) -> None:
        """Start workers that have died, and wait until the frontend has all of them and answers.

        Raises:
            ServerFailed: if that takes too long.
        """
        for number in range(self.workers):
            if self._processes[f"worker-{number}"].returncode is not None:
                await self._worker(number)
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if await self._answers():
                return
            if self._processes["frontend"].returncode is not None:
                break
            await asyncio.sleep(0.2)
        raise ServerFailed(f"Dynamo is not ready within {LIMIT_S} s; logs in {self._home}")

    async def _answers(self) -> bool:
        try:
            async with httpx.AsyncClient(base_url=self.base, timeout=5.0) as http:
                health = (await http.get("/health")).json()
            instances = {i["instance_id"] for i in health.get("instances", ()) if i.get("endpoint") == "generate"}
            if len(instances) != self.workers:
                return False
            await model_of(self.base)
            for _ in range(self.workers):
                await one(self.base, NAME, "Good morning.", 2)
        except (httpx.HTTPError, LoadFailed, OSError, ValueError, LookupError, TypeError, EOFError):
            return False
        return True

    def pid(self, number: int) -> int:
        """Process id of a worker."""
        return self._processes[f"worker-{number}"].pid

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        for sign in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            running = [p for p in self._processes.values() if p.returncode is None]
            for process in running:
                process.send_signal(sign)
            if running and sign is not signal.SIGCONT:
                await asyncio.wait([asyncio.ensure_future(p.wait()) for p in running], timeout=5.0)
