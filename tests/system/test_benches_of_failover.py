"""One round each of the benches that kill and leave, against a running instance."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from bench import failover_rounds
from bench.cancel import Bench
from bench.failover_rounds import OurVictims, Rounds
from tests.system.cases import assert_drained
from tests.system.launch import System

pytestmark = pytest.mark.slow


def test_leaving_is_measured_in_each_phase(split: System) -> None:
    """Everything comes back, nothing follows, and the times are those of this run."""
    args = argparse.Namespace(seed=3, count=1)

    async def run() -> list[dict[str, object]]:
        nats = await split.address.connect("test-bench-cancel")
        try:
            bench = Bench(split.address, nats, args, long_chars=1200, huge_chars=3000)
            await bench.start()
            phases = (("prefilling", "http"), ("transferring", "native"), ("decoding", "http"), ("decoding", "native"))
            return [await bench.phase(phase, client) for phase, client in phases]
        finally:
            await nats.close()

    for row in asyncio.run(run()):
        assert row["at_rest"] and not row["late_items"], row
        assert row["count"] or row["phase"] == "transferring", row
        if row["count"]:
            assert 0 <= float(str(row["stopped_p99_ms"])) <= float(str(row["free_p99_ms"])) < 5000
    assert_drained(split)


def test_a_kill_is_measured_and_its_texts_are_compared(split: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap is made of its parts, and nothing of a stream is lost."""
    monkeypatch.setattr(failover_rounds, "HEALTHY_S", 0.5)

    async def run() -> failover_rounds.Round:
        nats = await split.address.connect("test-bench-failover")
        try:
            victims = OurVictims(nats, split.address)
            await victims.start()
            rounds = Rounds(
                victims, split.address.http, split.model, streams=3, tokens=120, fault="kill", seed=1, say=print
            )
            return await rounds.one(0)
        finally:
            await nats.close()

    found = asyncio.run(run())

    assert (found.failed, found.differing, found.stuck, found.compared) == (0, 0, 0, 3)
    assert found.moved >= 1 and 0 < found.again_ms < found.gap_ms and found.one_prefill_ms > 0
    assert found.noticed_ms > 0 and found.placed_ms > 0
    assert_drained(split)
