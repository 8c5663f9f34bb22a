"""Prompts that were seen before a restart of everything, with real processes and a real disk."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.system.launch import COMMAND, System, wait_until

pytestmark = pytest.mark.slow

STORY = "The river came down from the hills, past the mill and the old bridge, and nobody knew how long it was. " * 3


def metric(system: System, name: str) -> float:
    """Return the sum of a metric over all nodes."""
    page = httpx.get(system.url + "/metrics", timeout=10.0).text
    return sum(float(v) for v in re.findall(rf"^headrace_{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE))


def ask(system: System) -> str:
    """Send the prompt; returns the answer."""
    response = system.chat(STORY)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def stop(system: System) -> None:
    """Stop as asked, leaving no memory behind."""
    assert (system.stop(), system.leftovers()) == (0, []), system.tail()


def verify(disk: Path) -> dict[str, int]:
    """Return what `headrace kv verify` counts."""
    done = subprocess.run([*COMMAND, "kv", "verify", str(disk)], capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def again(disk: Path, tmp_path: Path, options: tuple[str, ...], env: dict[str, str]) -> str:
    """Start anew, send the prompt, check that its blocks came from the disk; returns the answer."""
    system = System(tmp_path, *options, env=env).start()
    try:
        wait_until(lambda: metric(system, "kv_disk_records") > 0, limit_s=20.0, what="the disk is read")
        wait_until(lambda: metric(system, "decode_kv_index_hashes") > 0, limit_s=10.0, what="the engines know of it")
        assert metric(system, "kv_stored") == 0
        text = ask(system)
        assert metric(system, "kv_disk_loaded_total") > 0 and metric(system, "kv_blocks_loaded_total") > 0
        assert metric(system, "kv_disk_corrupt_total") == 0
    finally:
        stop(system)
    assert verify(disk)["bad"] == 0
    return text


@pytest.mark.parametrize("kv_format", ["raw", "int8", "fp8"])
def test_a_planned_restart_keeps_what_was_computed(
    kv_format: str, tmp_path: Path, model_path: Path, nats_binary: str
) -> None:
    """The real model: the same text without a store, with one, and from disk after a restart of everything."""
    disk = tmp_path / "disk"
    options = ("--model", str(model_path), "--decode", "1")
    rounding = {"HEADRACE_KV_FORMAT": kv_format}
    env = rounding | {"HEADRACE_KV_DISK_DIR": str(disk)}
    plain = System(tmp_path, *options, env=rounding | {"HEADRACE_HOST_TIER_TOKENS": "0"}).start()
    try:
        reference = ask(plain)
    finally:
        stop(plain)
    first = System(tmp_path, *options, env=env).start()
    try:
        assert ask(first) == reference
        wait_until(lambda: metric(first, "kv_stored") > 0, limit_s=10.0, what="the prompt is stored")
        assert (metric(first, "transfer_packed_blocks_total") > 0) == (kv_format != "raw")
    finally:
        stop(first)
    assert verify(disk)["good"] > 0

    assert again(disk, tmp_path, options, env) == reference


def test_killing_everything_loses_nothing_that_was_written(tmp_path: Path, script_file: Path, nats_binary: str) -> None:
    """SIGKILL of all processes at once; scripted engines check each block that they read."""
    disk = tmp_path / "disk"
    options = ("--engine", f"scripted:{script_file}")
    env = {"HEADRACE_KV_DISK_DIR": str(disk), "HEADRACE_KV_DISK_ADMISSION": "all"}
    first = System(tmp_path, *options, env=env).start()
    try:
        reference = ask(first)
        wait_until(lambda: metric(first, "kv_disk_records") > 0, limit_s=10.0, what="the prompt is on disk")
    finally:
        processes = first.processes()
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=10)
        first.stop(signal.SIGKILL)

    assert again(disk, tmp_path, options, env) == reference


def test_a_disk_that_is_damaged_and_then_full_changes_no_text(
    tmp_path: Path, script_file: Path, nats_binary: str
) -> None:
    """Every segment gets a wrong bit while the system runs, then the file system has no room: misses, and a reason."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    options = ("--engine", f"scripted:{script_file}", "--decode", "1")
    env = {"HEADRACE_KV_DISK_DIR": str(place / "kv"), "HEADRACE_KV_DISK_ADMISSION": "all"}
    try:
        first = System(tmp_path, *options, env=env).start()
        try:
            reference = ask(first)
            wait_until(lambda: metric(first, "kv_disk_records") > 0, limit_s=10.0, what="the prompt is on disk")
        finally:
            stop(first)
        second = System(tmp_path, *options, env=env).start()
        try:
            wait_until(lambda: metric(second, "decode_kv_index_hashes") > 0, limit_s=20.0, what="engines know of it")
            for path in (place / "kv").glob("*/segment-*"):
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                data[300] ^= 1
                with path.open("r+b") as file:
                    file.write(data)
            assert ask(second) == reference
            assert metric(second, "kv_disk_corrupt_total") > 0
            wait_until(lambda: metric(second, "kv_disk_queued") == 0, limit_s=10.0, what="good copies are written")
            try:
                (place / "hog").write_bytes(bytes(1 << 20))
            except OSError as exc:
                assert exc.errno == errno.ENOSPC
            text = str(second.chat("CASE-UNICODE " + STORY).json()["choices"][0]["message"]["content"])

            def named() -> bool:
                return "No space left" in " ".join(httpx.get(second.url + "/health").json().get("degraded", []))

            wait_until(named, limit_s=20.0, what="the full disk is named")
            assert ask(second) == reference
            (place / "hog").unlink()
            wait_until(
                lambda: httpx.get(second.url + "/health").json() == {"status": "ready"}, limit_s=60.0, what="well again"
            )
            assert str(second.chat("CASE-UNICODE " + STORY).json()["choices"][0]["message"]["content"]) == text
        finally:
            stop(second)
        assert verify(place / "kv")["bad"] == 0
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_second_instance_does_not_touch_the_disk_of_the_first(
    tmp_path: Path, script_file: Path, nats_binary: str
) -> None:
    """It serves without, and says so; `kv verify` keeps away too."""
    disk = tmp_path / "disk"
    options = ("--engine", f"scripted:{script_file}")
    env = {"HEADRACE_KV_DISK_DIR": str(disk), "HEADRACE_KV_DISK_ADMISSION": "all"}
    systems = [System(tmp_path, *options, env=env)]
    try:
        reference = ask(systems[0].start())
        wait_until(lambda: metric(systems[0], "kv_disk_records") > 0, limit_s=10.0, what="the prompt is on disk")
        systems.append(System(tmp_path, *options, env=env).start())
        assert ask(systems[1]) == reference

        def named() -> bool:
            said = httpx.get(systems[1].url + "/health", timeout=5.0).json()
            return "belongs to" in " ".join(said.get("degraded", []))

        wait_until(named, limit_s=10.0, what="the second instance says that it has no disk")
        assert httpx.get(systems[0].url + "/health", timeout=5.0).json() == {"status": "ready"}
        argv = [sys.executable, "-m", "headrace.cli", "kv", "verify", str(disk)]
        assert subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode == 2
    finally:
        for system in systems:
            stop(system)
    assert verify(disk)["bad"] == 0 and os.listdir(disk)


def test_the_command_shows_stores_engines_and_prefixes(tmp_path: Path, script_file: Path, nats_binary: str) -> None:
    """`headrace kv` over a real bus: what was stored and found, by whom, and no text of it; what takes nothing new."""
    system = System(tmp_path, "--engine", f"scripted:{script_file}", "--decode", "1").start()
    try:
        ask(system)
        wait_until(lambda: metric(system, "kv_stored") > 0, limit_s=10.0, what="the prompt is stored")
        done, shown = (system.command("kv", *options) for options in (["--json"], []))
        frozen = system.command("kv", "freeze", "--tier", "host", "--json")
        marked = system.command("kv")
        thawed, unknown = system.command("kv", "thaw"), system.command("kv", "freeze", "--tier", "tape")
    finally:
        stop(system)
    assert json.loads(frozen.stdout) == {"stores": 1, "answered": 1, "frozen": ["host"]}
    assert "ok, frozen" in marked.stdout and "ok, frozen" not in shown.stdout
    assert thawed.returncode == 0 and "frozen: none" in thawed.stdout
    assert unknown.returncode == 2 and "tape" in unknown.stderr
    found = json.loads(done.stdout)
    assert done.returncode == 0 and [t["kind"] for t in found["stores"][0]["tiers"]] == ["host"]
    assert found["stores"][0]["tiers"][0]["blocks"] > 0 and found["engines"][0]["blocks_cached"] > 0
    assert shown.returncode == 0 and "host" in shown.stdout and "river" not in shown.stdout + done.stdout


def test_a_prefix_is_pinned_from_the_command_line(tmp_path: Path, script_file: Path, nats_binary: str) -> None:
    """Over a real bus: pinned, listed, shown, unpinned once."""
    system = System(tmp_path, "--engine", f"scripted:{script_file}", "--decode", "1").start()
    try:
        ask(system)
        wait_until(lambda: metric(system, "kv_stored") > 0, limit_s=10.0, what="the prompt is stored")
        made = system.command("kv", "pin", STORY, "--ttl", "60", "--id", "story", "--json")
        assert made.returncode == 0, made.stderr
        listed = json.loads(system.command("kv", "pins", "--json").stdout)
        assert metric(system, "kv_held") == len(STORY.encode()) // 16
        ended = [system.command("kv", "unpin", "story").returncode for _ in range(2)]
        refused = system.command("kv", "pin", "short")
    finally:
        stop(system)
    assert json.loads(made.stdout)["blocks"] == len(STORY.encode()) // 16
    assert [row["pin"] for row in listed] == ["story"] and ended == [0, 1]
    assert refused.returncode == 1 and "shorter than a block" in refused.stderr
