"""Two stores on one host with real processes and real disks: hits from both, and one of them dies."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from kvstore.disk.scrub import scrub, tiers_in
from tests.system.launch import System, wait_until

pytestmark = pytest.mark.slow

STORY = "The river came down from the hills, past the mill and the bridge. " * 3
SMALL = ("--decode", "1", "--pool-tokens", "640")
CLIENT = httpx.Client(timeout=60.0)
PROMPTS = [f"{number}: {STORY}" for number in range(8)]


def metric(system: System, name: str) -> dict[str, float]:
    """Return a metric's sum over each node's actors, by node."""
    page, out = CLIENT.get(system.url + "/metrics").text, dict[str, float]()
    for labels, value in re.findall(rf"^headrace_{name}\{{([^}}]*)\}} (\S+)$", page, re.MULTILINE):
        node = re.search(r'node="([^"]*)"', labels)
        if node:
            out[node[1]] = out.get(node[1], 0.0) + float(value)
    return out


def total(system: System, name: str) -> float:
    """Return the sum of a metric over all nodes."""
    return sum(metric(system, name).values())


def ask(system: System, prompt: str) -> tuple[str, int]:
    """Send a prompt; returns the answer, and how many tokens were not computed."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 16}
    response = CLIENT.post(system.url + "/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    body = response.json()
    return str(body["choices"][0]["message"]["content"]), body["usage"]["prompt_tokens_details"]["cached_tokens"]


def kill(system: System, node: str) -> None:
    """SIGKILL a node, and wait until its successor is ready."""
    (pid,) = {row["pid"] for row in system.rows() if row["node"] == node}
    psutil.Process(pid).send_signal(signal.SIGKILL)

    def renewed() -> bool:
        states = {row["state"] for row in system.rows() if row["node"] == node and row["pid"] != pid}
        return states == {"ready"}

    wait_until(renewed, limit_s=30.0, what=f"another {node}")


def ledgers(system: System) -> list[str]:
    """Return the pools of which more is in use than what is stored, once nothing runs."""
    stored = metric(system, "kv_stored")
    rows = [row for row in system.rows() if row["kind"] in ("kv", "decode")]
    held = {row["node"]: row["load"].get("blocks_in_use", 0) for row in rows}
    return [f"{node}: {count}" for node, count in held.items() if count != stored.get(node, 0)]


def test_prompts_are_found_in_both_stores_and_outlive_one(tmp_path: Path, script_file: Path, nats_binary: str) -> None:
    """Texts are the same when one has died; its successor finds its own part of the disk again."""
    disk = tmp_path / "disk"
    env = {"HEADRACE_KV_DISK_DIR": str(disk), "HEADRACE_KV_DISK_ADMISSION": "all"}
    system = System(tmp_path, "--engine", f"scripted:{script_file}", "--kv", "2", *SMALL, env=env).start()
    try:
        texts = {prompt: ask(system, prompt)[0] for prompt in PROMPTS}
        blocks = 0.0

        def written() -> bool:
            nonlocal blocks
            before, blocks = blocks, total(system, "kv_stored")
            return 0 < blocks == before == total(system, "kv_disk_records")

        wait_until(written, limit_s=10.0, what="all prompts are stored")
        shares = metric(system, "kv_stored")
        assert set(shares) == {"kv-0", "kv-1"} and min(shares.values()) > 0

        # The engine's own pool holds less than three of them.
        wait_until(lambda: total(system, "decode_kv_index_hashes") >= 2 * blocks, limit_s=10.0, what="the engine knows")
        for prompt in PROMPTS:
            text, cached = ask(system, prompt)
            assert text == texts[prompt] and cached > 0
        hits = metric(system, "kv_hits_total")
        assert min(hits[node] for node in ("kv-0", "kv-1")) > 0
        assert total(system, "kv_stored") == blocks  # nothing was stored twice

        kill(system, "kv-1")
        assert [ask(system, prompt)[0] for prompt in PROMPTS] == list(texts.values())
        wait_until(
            lambda: metric(system, "kv_disk_records").get("kv-1") == shares["kv-1"],
            limit_s=10.0,
            what="it has found its own part of the disk again",
        )
        wait_until(lambda: not ledgers(system), limit_s=5.0, what="all ledgers balance")
    finally:
        assert (system.stop(), system.leftovers()) == (0, []), system.tail()
    report = scrub(disk / "kv-0")
    report.add(scrub(disk / "kv-1"))
    assert (report.bad, report.good, tiers_in(disk)) == (0, blocks, [disk / "kv-0", disk / "kv-1"])
