"""`headrace up` from start to stop, with real processes and a real bus; engines are scripted."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NAME = f"t-{os.getpid()}"


class Up:
    """One `headrace up` as a child process; what it prints is kept."""

    def __init__(self, directory: Path, *flags: str, name: str = NAME, memory: Path = Path("/dev/shm")) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        self.name = name
        self.memory = memory
        self.env = {
            **clean, "HEADRACE_RUNTIME_DIR": str(directory / "run"), "HEADRACE_INSTANCE": name,
            "HEADRACE_SHM_DIR": str(memory),
        }  # fmt: skip
        self.directory = directory
        self.port = free_ports()
        self.lines: list[str] = []
        self._new = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", "up", "--engine", "scripted", "--http", f"127.0.0.1:{self.port}",
             "--pool-tokens", "512", *flags],
            cwd=directory, env=self.env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._new:
                self.lines.append(line.rstrip())
                self._new.notify_all()
        with self._new:
            self._new.notify_all()

    def wait_for(self, text: str, limit_s: float = 60.0) -> None:
        """Wait until a line begins with `text`."""
        with self._new:
            found = self._new.wait_for(
                lambda: any(line.startswith(text) for line in self.lines) or not self._reader.is_alive(), limit_s
            )
        assert found and any(line.startswith(text) for line in self.lines), "\n".join(self.lines)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "headrace.cli", *arguments], cwd=self.directory, env=self.env, text=True,
            capture_output=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        done = self.command("ps", "--json")
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        return rows

    def chat(self, text: str, max_tokens: int = 12) -> str:
        messages = [{"role": "user", "content": text}]
        body = {"model": "scripted", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=30) as reply:
            return str(json.load(reply)["choices"][0]["message"]["content"])

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def shared_memory(self) -> list[str]:
        return sorted(p.name for p in self.memory.glob(f"headrace-{self.name}-*"))

    def stop(self, number: int = signal.SIGTERM, limit_s: float = 40.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(limit_s)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of its own for pools: whatever instance starts beside it sweeps up what lies in the common one."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One instance for the tests that leave it as they found it."""
    system = Up(tmp_path_factory.mktemp("up"))
    try:
        system.wait_for("ready")
        yield system
    finally:
        system.stop()


def until(condition: Any, limit_s: float = 20.0) -> None:
    """Wait for something that another process does; bounded."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_the_first_request_after_the_ready_line_is_answered(up: Up) -> None:
    """Ready means ready."""
    text = up.chat("hello", max_tokens=12)

    assert len(text) == 12
    assert up.chat("hello", max_tokens=12) == text


def test_the_printed_curl_is_answered_as_it_stands(up: Up) -> None:
    """It is there to be pasted."""
    up.wait_for("or: headrace chat")
    line = next(line for line in up.lines if line.startswith("curl "))
    words = shlex.split(line)
    request = urllib.request.Request(words[1], words[-1].encode(), {"Content-Type": "application/json"})

    with urllib.request.urlopen(request, timeout=30) as reply:
        events = reply.read().decode().split("\n\n")

    assert events[-2] == "data: [DONE]"


def test_ps_shows_every_actor_of_the_layout_with_its_process(up: Up) -> None:
    """One row per actor; the processes are the instance's own."""
    light = ["admission", "tokenize", "detokenize"]
    until(lambda: [r["state"] for r in up.rows() if r["private"]] == ["ready"] * len(light))  # they join a little later
    rows = up.rows()
    assert sorted(r["kind"] for r in rows if r["private"]) == sorted(light)
    assert {r["node"] for r in rows if r["private"]} == {"edge"}
    rows = [row for row in rows if not row["private"]]

    kinds = sorted(row["kind"] for row in rows)
    assert kinds == sorted([*light, *light, "edge", "kv", "transfer", "decode", "decode"])
    assert {row["pid"] for row in rows} <= {p.pid for p in up.descendants()}
    assert {row["state"] for row in rows} == {"ready"}
    assert all(len(row["epoch"]) == 16 for row in rows)


def test_chat_finds_the_running_instance_and_prints_the_answer(up: Up) -> None:
    """Without a URL or a model name."""
    done = up.command("chat", "-m", "hello", "--max-tokens", "12", "--temperature", "0")

    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == up.chat("hello", max_tokens=12)


def test_doctor_finds_a_healthy_instance(up: Up) -> None:
    """Its own port in use is not a fault."""
    done = up.command("doctor", "--json", "--engine", "scripted", "--http", f"127.0.0.1:{up.port}")

    findings = {c["name"]: c for c in json.loads(done.stdout)}
    assert findings["instance"]["verdict"] == "ok", findings["instance"]
    assert findings["http port"]["verdict"] == "ok"


def test_a_second_instance_of_the_same_name_is_refused_and_the_first_not_harmed(up: Up) -> None:
    """The name is a lock."""
    done = up.command("up", "--engine", "scripted", "--http", f"127.0.0.1:{free_ports()}")

    assert done.returncode == 1
    assert "is running already" in done.stderr
    assert up.chat("hello", max_tokens=4)


def test_no_secret_stands_on_a_command_line(up: Up) -> None:
    """Other users of the machine can list processes."""
    state = json.loads((Path(up.env["HEADRACE_RUNTIME_DIR"]) / f"{up.name}.json").read_text())

    assert state["bus_token"]
    assert all(state["bus_token"] not in " ".join(p.cmdline()) for p in up.descendants())


def test_an_actor_started_by_hand_takes_part_and_leaves_when_asked(up: Up) -> None:
    """The same command from anywhere adds a replica."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli", "actor", "decode", "--node", "decode-extra"],
        cwd=up.directory, env=up.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: any(r["id"] == "decode-extra" and r["state"] == "ready" for r in up.rows()))
    finally:
        process.terminate()

    assert process.wait(20) == 0
    assert not any(r["id"] == "decode-extra" for r in up.rows())


def test_a_single_request_takes_the_short_way_and_survives_without_any_light_node(up: Up) -> None:
    """The edge's own light actors serve it: with both light nodes dead at once, requests are answered as before."""
    until(lambda: sum(r["private"] and r["state"] == "ready" for r in up.rows()) == 3)
    expected = up.chat("hello", max_tokens=12)
    lights = {r["pid"] for r in up.rows() if r["node"].startswith("light-")}
    assert len(lights) == 2

    for pid in lights:
        os.kill(pid, signal.SIGKILL)
    answers = [up.chat("hello", max_tokens=12) for _ in range(3)]

    assert answers == [expected] * 3
    page = urllib.request.urlopen(f"http://127.0.0.1:{up.port}/metrics", timeout=10).read().decode()
    ended = [line for line in page.splitlines() if line.startswith("headrace_requests_total{")]
    assert any('node="edge"' in line and float(line.rsplit(" ", 1)[1]) >= 4 for line in ended), ended
    until(lambda: {r["pid"] for r in up.rows() if r["node"].startswith("light-")}.isdisjoint(lights))
    until(lambda: {r["state"] for r in up.rows()} == {"ready"} and len(up.rows()) == 14)


def test_a_killed_node_is_started_again_and_named(up: Up) -> None:
    """The supervisor says what happened and removes its memory; the instance serves on."""
    victim = next(row for row in up.rows() if row["id"] == "decode-1")
    assert any(name.endswith(victim["epoch"]) for name in up.shared_memory())

    os.kill(victim["pid"], signal.SIGKILL)

    up.wait_for("decode-1 (pid")
    assert up.chat("hello", max_tokens=8)
    until(lambda: any(r["id"] == "decode-1" and r["epoch"] != victim["epoch"] for r in up.rows()))
    until(lambda: {r["state"] for r in up.rows()} == {"ready"})
    assert not any(name.endswith(victim["epoch"]) for name in up.shared_memory())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_no_process_no_shared_memory_and_no_state(number: int, tmp_path: Path) -> None:
    """Exit code 0, and nothing remains but logs."""
    system = Up(tmp_path, name=f"{NAME}-stop")
    system.wait_for("ready")
    children = system.descendants()
    assert system.shared_memory()

    code = system.stop(number)

    assert code == 0, "\n".join(system.lines)
    assert psutil.wait_procs(children, timeout=5)[1] == []
    assert system.shared_memory() == []
    assert list((tmp_path / "run").glob("*.json")) == []


def test_children_die_with_a_killed_supervisor_and_the_next_start_sweeps_up(tmp_path: Path, memory: Path) -> None:
    """No orphan computes on; shared memory of the dead is removed at the next start."""
    first = Up(tmp_path, name=f"{NAME}-kill", memory=memory)
    first.wait_for("ready")
    children = first.descendants()

    first.stop(signal.SIGKILL)

    assert psutil.wait_procs(children, timeout=10)[1] == []
    left = set(first.shared_memory())
    assert left
    second = Up(tmp_path, name=f"{NAME}-kill", memory=memory)
    try:
        second.wait_for("ready")
        assert left.isdisjoint(second.shared_memory())
    finally:
        assert second.stop() == 0
    assert second.shared_memory() == []


def test_two_instances_run_side_by_side_by_their_port_base(tmp_path: Path, up: Up) -> None:
    """All ports move, and the name with them."""
    base = free_ports(2)
    (tmp_path / "b").mkdir()
    other = Up(tmp_path / "b", "--port-base", str(base), name=f"{NAME}-b")
    try:
        other.wait_for("ready")
        assert other.chat("hello", max_tokens=8) == up.chat("hello", max_tokens=8)
        state = json.loads((tmp_path / "b" / "run" / f"{NAME}-b.json").read_text())
        assert state["bus_url"].endswith(f":{base + 1}")
    finally:
        assert other.stop() == 0
