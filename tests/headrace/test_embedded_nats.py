"""The embedded bus: a real server with our configuration."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
import pytest

from headrace import embedded_nats


@contextmanager
def served(directory: Path, **options: int) -> Iterator[embedded_nats.BusServer]:
    """Run a server until the block ends."""
    server = embedded_nats.prepare(directory, **options)
    process = subprocess.Popen(server.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_it_listens(server)
        yield server
    finally:
        process.terminate()
        process.wait(10)


def wait_until_it_listens(server: embedded_nats.BusServer) -> None:
    """Block until the server greets, at most 10 s."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            with socket.create_connection((server.host, server.port), timeout=1) as probe:
                if probe.recv(4) == b"INFO":
                    return
        except OSError:
            time.sleep(0.01)
    raise AssertionError("the server does not listen")


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_client_with_the_token_gets_in_and_finds_our_limits(tmp_path: Path) -> None:
    """Payload limit, loopback and JetStream are as written."""
    with served(tmp_path) as server:
        client = await nats.connect(server.url, token=server.token)
        account = await client.jetstream().account_info()

        assert client.max_payload == embedded_nats.MAX_PAYLOAD
        assert server.host == "127.0.0.1"
        assert account.limits.max_storage != 0
        await client.close()


@pytest.mark.slow
def test_a_client_without_the_token_is_refused(tmp_path: Path) -> None:
    """Other users of this machine cannot read along."""
    with served(tmp_path) as server, socket.create_connection((server.host, server.port), timeout=5) as client:
        client.sendall(b'CONNECT {"auth_token":"wrong","verbose":true}\r\nPING\r\n')
        with client.makefile("rb") as lines:
            answer = lines.readline() + lines.readline()

    assert b"Authorization Violation" in answer


def test_the_configuration_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    """It holds the token."""
    server = embedded_nats.prepare(tmp_path / "bus")

    assert server.config.stat().st_mode & 0o777 == 0o600
    assert server.token in server.config.read_text()
    assert server.token not in " ".join(server.argv)


def test_every_server_gets_its_own_token(tmp_path: Path) -> None:
    """A token of yesterday opens nothing today."""
    assert embedded_nats.prepare(tmp_path).token != embedded_nats.prepare(tmp_path).token


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    """The message leads to the flag that helps."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]

        with pytest.raises(embedded_nats.BusServerError, match=f"port {port}.*--port-base"):
            embedded_nats.prepare(tmp_path, port=port)
