"""The command line as a user meets it: separate processes, exit codes, messages."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.commands.chat import ChatError, stream_answer
from tests.models.hf_files import tiny_folder

pytestmark = pytest.mark.slow


def headrace(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run one command away from this process's settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    clean["HEADRACE_RUNTIME_DIR"] = str(cwd / "run")
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", *arguments],
        cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_importing_the_command_line_loads_neither_torch_nor_the_actors(tmp_path: Path) -> None:
    """`headrace --help` has to be quick."""
    code = "import sys, headrace.cli; print(*sorted(m for m in sys.modules if '.' not in m))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)

    loaded = set(out.stdout.split())

    assert "headrace" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "nats", "pydantic", "actors", "engine", "uvicorn", "httpx"})


def test_assembling_a_node_loads_torch_only_for_an_engine(tmp_path: Path) -> None:
    """The light nodes stay light."""
    code = "import sys, headrace.assembly, headrace.commands.up, headrace.commands.actor; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)

    assert out.stdout.strip() == "False"


def test_config_shows_values_with_their_sources_and_masks_secrets(tmp_path: Path) -> None:
    """A token in the environment does not reach the screen."""
    (tmp_path / "headrace.toml").write_text("decode = 4\n")

    done = headrace("config", "--json", cwd=tmp_path, HEADRACE_BUS_TOKEN="very-secret")

    shown = json.loads(done.stdout)
    assert done.returncode == 0
    assert shown["decode"] == {"value": 4, "source": "file headrace.toml"}
    assert shown["bus_token"] == {"value": "********", "source": "env HEADRACE_BUS_TOKEN"}
    assert "very-secret" not in done.stdout + headrace("config", cwd=tmp_path, HEADRACE_BUS_TOKEN="very-secret").stdout


@pytest.mark.parametrize("command", [["up"], ["ps"], ["doctor"], ["config"], ["actor", "decode"]])
def test_an_unknown_setting_stops_every_command_and_is_named(command: list[str], tmp_path: Path) -> None:
    """It is fatal before anything starts."""
    done = headrace(*command, cwd=tmp_path, HEADRACE_DECOED="3")

    assert done.returncode == 2
    assert "env HEADRACE_DECOED" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["ps"], ["chat", "-m", "x"], ["actor", "decode"]])
def test_without_a_running_instance_a_command_says_how_to_start_one(command: list[str], tmp_path: Path) -> None:
    """Not a stack of connection errors."""
    done = headrace(*command, cwd=tmp_path)

    assert done.returncode == 1
    assert "headrace up" in done.stderr
    assert "Traceback" not in done.stderr


def test_up_refuses_a_busy_port_before_anything_starts(tmp_path: Path) -> None:
    """The port is named, and so is the way out."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]

        done = headrace("up", "--engine", "scripted", "--http", f"127.0.0.1:{port}", cwd=tmp_path)

    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "--http" in done.stderr
    assert not list((tmp_path / "run").glob("*.json"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"not a model", "not a GGUF file"),
        (b"GGUF", "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 272, 33), "corrupt: claims 33 metadata values and 272 tensors"),
    ],
)
def test_up_refuses_a_file_that_is_no_model(content: bytes | None, said: str, tmp_path: Path) -> None:
    """A wrong path or file is told at once, by name."""
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)

    done = headrace("up", "--model", str(path), "--http", "127.0.0.1:0", cwd=tmp_path)

    assert done.returncode == 1
    assert str(path) in done.stderr
    assert said in done.stderr


@pytest.mark.slow
def test_up_refuses_a_folder_with_a_shard_cut_short(tmp_path: Path) -> None:
    """By the name of the shard, before any process starts; doctor says that the whole folder is well."""
    folder = tiny_folder(tmp_path / "tiny", shards=2)

    good = headrace("doctor", "--json", "--model", str(folder), cwd=tmp_path)
    shard = next(folder.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    bad = headrace("up", "--model", str(folder), "--http", "127.0.0.1:0", cwd=tmp_path)

    assert {c["name"]: c["verdict"] for c in json.loads(good.stdout)}["model"] == "ok"
    assert bad.returncode == 1
    assert str(shard) in bad.stderr and "truncated" in bad.stderr
    assert "Traceback" not in bad.stderr


def test_up_waits_for_an_absent_bus_as_long_as_documented_and_then_fails(tmp_path: Path) -> None:
    """It says that it waits, and for what."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{unused.getsockname()[1]}"

        done = headrace(
            "up", "--engine", "scripted", "--http", "127.0.0.1:0", "--bus", url, cwd=tmp_path, HEADRACE_BUS_WAIT_S="3"
        )

    assert done.returncode == 1
    assert "waiting" in done.stdout
    assert url in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_actor_kind_is_refused_with_the_list_of_known_ones(tmp_path: Path) -> None:
    """Before the bus is touched."""
    done = headrace("actor", "decoder", "--bus", "nats://127.0.0.1:1", cwd=tmp_path)

    assert done.returncode == 2
    assert "decoder" in done.stderr
    assert "detokenize" in done.stderr


def test_doctor_finds_a_wrong_model_and_says_so_by_its_exit_code(tmp_path: Path) -> None:
    """Each finding has a verdict, and what is not well has advice."""
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"junk")

    done = headrace("doctor", "--json", "--model", str(bad), cwd=tmp_path)

    findings = {c["name"]: c for c in json.loads(done.stdout)}
    assert done.returncode == 1
    assert findings["model"]["verdict"] == "fail"
    assert findings["bus"]["verdict"] == "ok"
    assert {"python", "torch", "cpu", "memory", "shared memory", "http port", "instance"} <= set(findings)
    assert all(c["advice"] or "headrace up" in c["detail"] for c in findings.values() if c["verdict"] != "ok")


def test_chat_reports_a_dead_instance_as_an_error_of_its_own() -> None:
    """No library exception reaches the user."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        with pytest.raises(ChatError, match="does not answer"):
            list(stream_answer(url, [], {}))
