"""Bits that flip in the store's memory under a running instance with the real model."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.system.launch import System, wait_until

pytestmark = pytest.mark.slow

STORY = "The river came down from the hills, past the mill and the old bridge, and nobody knew how long it was. " * 3
TRAILER_NBYTES = 4096


def metric(system: System, name: str) -> float:
    """Return the sum of a metric over all nodes."""
    page = httpx.get(system.url + "/metrics", timeout=10.0).text
    return sum(float(v) for v in re.findall(rf"^headrace_{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE))


def ask(system: System) -> str:
    """Send the prompt; returns the answer."""
    response = system.chat(STORY)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def renew_engine(system: System) -> None:
    """Kill the engine: its successor has nothing in its own pool, and knows what the store holds."""
    (pid,) = (row["pid"] for row in system.rows() if row["kind"] == "decode")
    psutil.Process(pid).send_signal(signal.SIGKILL)

    def renewed() -> bool:
        ready = [row["pid"] for row in system.rows() if row["kind"] == "decode" and row["state"] == "ready"]
        return bool(ready) and pid not in ready

    wait_until(renewed, limit_s=60.0, what="another engine")
    wait_until(
        lambda: metric(system, "decode_kv_index_hashes") >= metric(system, "kv_stored"), limit_s=10.0,
        what="the engine knows of the store",
    )  # fmt: skip


def flip_a_bit_of_each_block(system: System) -> None:
    """In the very file that the store shares with its readers."""
    (path,) = Path("/dev/shm").glob(f"headrace-{system.name}-kv-*")
    nbytes, blocks = path.stat().st_size - TRAILER_NBYTES, round(metric(system, "kv_blocks_total"))
    with path.open("r+b") as file:
        for block in range(blocks):
            file.seek(block * (nbytes // blocks) + 4321)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 64]))


def test_bits_that_flip_in_host_memory_change_no_text(tmp_path: Path, model_path: Path, nats_binary: str) -> None:
    """The same text; the bad blocks are gone from the store, and good ones are stored in their place."""
    system = System(tmp_path, "--model", str(model_path), "--decode", "1").start()
    try:
        reference = ask(system)
        stored = wait_until(lambda: metric(system, "kv_stored"), limit_s=10.0, what="the prompt is stored")
        flip_a_bit_of_each_block(system)
        renew_engine(system)

        assert ask(system) == reference

        damaged = metric(system, "kv_blocks_damaged_total")
        assert damaged > 0 and metric(system, "kv_blocks_loaded_total") == 0
        wait_until(lambda: metric(system, "kv_corrupt_total") == damaged, limit_s=5.0, what="the store has looked")
        wait_until(lambda: metric(system, "kv_stored") == stored, limit_s=10.0, what="good blocks are stored")
        renew_engine(system)

        assert ask(system) == reference

        assert metric(system, "kv_blocks_loaded_total") > 0
        assert metric(system, "kv_corrupt_total") == damaged and metric(system, "kv_blocks_damaged_total") == 0
    finally:
        assert (system.stop(), system.leftovers()) == (0, []), system.tail()
