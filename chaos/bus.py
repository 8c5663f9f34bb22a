"""A NATS server of one's own with a proxy before it, for faults of the bus."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from pathlib import Path

from chaos.proxy import Delay, Proxy

START_LIMIT_S = 10.0


class ProxiedBus:
    """The server at a free port, and `proxy` before it; whoever uses it is told the proxy's address alone.

    Args:
        directory: for the server's configuration, storage and log.
        seed: of the proxy's delays.
        delay: what each piece takes through the proxy.
    """

    def __init__(self, directory: Path, *, seed: int = 0, delay: Delay | None = None) -> None:
        self._directory = directory / "bus"
        self._port = _free_port()
        self._process: asyncio.subprocess.Process | None = None
        self.proxy = Proxy("127.0.0.1", self._port, seed=seed)
        self.proxy.delay = delay or Delay()

    async def start(self) -> str:
        """Start both; returns the address for nodes and clients.

        Raises:
            RuntimeError: if the server does not come up.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        config = f'listen: 127.0.0.1:{self._port}\njetstream {{ store_dir: "{self._storage}" }}\n'
        (self._directory / "nats.conf").write_text(config)
        await self._serve()
        return f"nats://127.0.0.1:{await self.proxy.start()}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    @property
    def _storage(self) -> Path:
        return self._directory / "jetstream"

    async def _serve(self) -> None:
        beside = Path(sys.executable).parent / "nats-server"
        binary = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server") or "nats-server"
        with (self._directory / "nats.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                binary, "-c", str(self._directory / "nats.conf"), stdout=log, stderr=log
            )
        end = asyncio.get_running_loop().time() + START_LIMIT_S
        while asyncio.get_running_loop().time() < end:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return
        raise RuntimeError(f"nats-server did not come up: {self._directory / 'nats.log'}")

    async def restart(self) -> int:
        """SIGKILL the server and start it again with fresh storage; returns the former process id."""
        assert self._process is not None
        pid = self._process.pid
        await self._kill()
        shutil.rmtree(self._storage, ignore_errors=True)
        await self._serve()
        return pid

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        """End both."""
        await self.proxy.stop()
        await self._kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
