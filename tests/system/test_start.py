"""From starting to ready, and what happens when a start cannot succeed."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.system.launch import COMMAND, System

pytestmark = pytest.mark.slow


def test_ready_means_ready(script_file: Path, tmp_path: Path, nats_binary: str) -> None:
    """Until readiness says 200 a chat gets 503 with `Retry-After`; afterwards none fails."""
    system = System(tmp_path, "--engine", f"scripted:{script_file}")
    system.launch()
    seen: list[tuple[int, int, int]] = []
    first_live = first_ready = 0.0
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and sum(ready == 200 for _, ready, _ in seen) < 10:
            live = system.status("/health/live")
            if not live:
                time.sleep(0.01)
                continue
            first_live = first_live or time.monotonic()
            ready = system.status("/health/ready")
            if ready == 200:
                first_ready = first_ready or time.monotonic()
            body = {"messages": [{"role": "user", "content": "CASE-ALIVE"}], "max_tokens": 4, "model": "scripted"}
            chat = httpx.post(system.url + "/v1/chat/completions", json=body, timeout=10)
            if chat.status_code == 503:
                assert "retry-after" in chat.headers
            seen.append((live, ready, chat.status_code))
    finally:
        code = system.stop()

    assert code == 0, system.tail()
    assert first_live and first_ready
    assert all(live == 200 for live, _, _ in seen)
    assert {ready for _, ready, _ in seen} <= {200, 503}
    after = [chat for at, (_, _, chat) in enumerate(seen) if any(r == 200 for _, r, _ in seen[: at + 1])]
    assert len(after) >= 10 and set(after) == {200}
    assert all(chat in (200, 503) for _, _, chat in seen)


def fails(tmp_path: Path, *options: str, limit_s: float = 60.0) -> str:
    """Run a start that cannot succeed; returns what it said."""
    argv = [*COMMAND, "up", *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr + done.stdout
    return done.stderr + done.stdout


def test_a_busy_port_is_named(tmp_path: Path, script_file: Path, nats_binary: str) -> None:
    """The start ends at once and says which port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        options = ("--engine", f"scripted:{script_file}", "--http", f"127.0.0.1:{port}", "--instance", "busy")
        said = fails(tmp_path, *options)

    assert str(port) in said


def test_a_missing_model_file_is_named(tmp_path: Path) -> None:
    """Nothing is left running, and the message has the path."""
    said = fails(tmp_path, "--model", str(tmp_path / "absent.gguf"), "--instance", "absent")

    assert "absent.gguf" in said


def test_a_cut_model_file_is_refused(tmp_path: Path, model_path: Path) -> None:
    """A file that ends too early is refused before anything serves."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model_path.read_bytes()[:1_000_000])

    said = fails(tmp_path, "--model", str(cut), "--instance", "cut", limit_s=90.0)

    assert "cut.gguf" in said


def test_an_absent_bus_is_named(tmp_path: Path, script_file: Path) -> None:
    """The wait is bounded, and the message has the address."""
    import os

    env = {**os.environ, "HEADRACE_BUS_WAIT_S": "1"}
    argv = [*COMMAND, "up", "--engine", f"scripted:{script_file}", "--bus", "nats://127.0.0.1:1", "--instance", "nobus"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=env)

    assert done.returncode != 0
    assert "127.0.0.1:1" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout


def test_an_unknown_setting_is_fatal(tmp_path: Path) -> None:
    """It names where it stands."""
    (tmp_path / "headrace.toml").write_text("decod = 3\n")

    assert "decod" in fails(tmp_path)
