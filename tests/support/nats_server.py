"""A real NATS server as a child process of the tests."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.support.ports import free_ports


class NatsServer:
    """Starts and stops one server on a port that stays the same over restarts."""

    def __init__(self, binary: str, directory: Path, *, max_payload: int = 1_048_576, extra: str = "") -> None:
        self._binary = binary
        self._directory = directory
        self._extra = extra
        self.max_payload = max_payload
        self.port = free_ports()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def write_config(self) -> Path:
        config = self._directory / "nats.conf"
        config.write_text(
            f"listen: 127.0.0.1:{self.port}\nmax_payload: {self.max_payload}\nmax_pending: 8388608\n{self._extra}\n"
        )
        return config

    def start(self) -> None:
        """Start, and return once it accepts connections."""
        config = self.write_config()
        log = open(self._directory / "nats.log", "ab")
        with log:
            self._process = subprocess.Popen([self._binary, "-c", str(config)], stdout=log, stderr=log)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                    if probe.recv(4) == b"INFO":
                        return
            except OSError:
                time.sleep(0.01)
        raise RuntimeError(f"nats-server did not come up: {(self._directory / 'nats.log').read_text()}")

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGTERM, and reap."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    def reload(self, *, max_payload: int) -> None:
        """Change the limit without a restart."""
        self.max_payload = max_payload
        self.write_config()
        self.signal(signal.SIGHUP)
