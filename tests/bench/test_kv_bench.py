"""The store's benchmark says of each figure where the blocks came from, and has none over wrong bytes or texts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.client import LoadFailed
from bench.kv import cost, plan, probe, rates
from bench.kv.__main__ import judge
from bench.load import GateFailed
from bench.speculation import Pair
from kvstore.block import BLOCK_TOKENS
from kvstore.disk.tier import DiskTier

SAMPLE = plan.Sample(plan.BEFORE, plan.COLD, 1024, 1, 1.0, 1000, 16, 0, 0, None, "text")


def pairs(*ratios: float) -> list[Pair]:
    """Return pairs in which the tier makes streams that many times as fast."""
    return [Pair(100, r, 1.0, 0, 0, 0) for r in ratios]


@pytest.mark.parametrize("lengths", [(1024, 4096), (4096, 1024), (256, 1024), (512, 1024, 2048)])
def test_prompts_lie_in_the_device_pool_or_not_as_the_plan_says(lengths: tuple[int, ...]) -> None:
    """An LRU pool of that size has all of a prompt when it should be found there, and none when it should not."""
    size = plan.pool_blocks(lengths)
    pool: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    for path, length, number in plan.rounds(lengths, 5):
        blocks = [(length, number, at) for at in range(length // BLOCK_TOKENS)]
        found = sum(block in pool for block in blocks)
        assert found == (len(blocks) if path == plan.DEVICE else 0)
        for block in reversed(blocks):  # a chain loses its tail first
            pool.pop(block, None)
            pool[block] = None
        while len(pool) > size:
            pool.popitem(last=False)
    assert 2 * max(lengths) // BLOCK_TOKENS < size  # a prompt is loaded only beside room for a whole one


@pytest.mark.parametrize("lengths", [(1024,), (64, 4096)])
def test_lengths_that_would_stay_in_the_device_pool_are_refused(lengths: tuple[int, ...]) -> None:
    """One prompt, or a very short one beside a long one, pushes nothing out."""
    with pytest.raises(ValueError, match="push"):
        plan.pool_blocks(lengths)


def test_each_path_is_asked_often_enough_and_every_stored_prompt_was_computed_before() -> None:
    """Five of each length from each tier; nothing is read from a tier that was not computed in an earlier request."""
    before, after = plan.rounds((256, 1024), 5), plan.restarted((256, 1024), 5)

    count = {path: sum(p == path for p, _, _ in [*before, *after]) for path in (plan.HOST, plan.DISK)}
    assert count == {plan.HOST: 10, plan.DISK: 10}
    assert [sum(path == plan.COLD for path, _, _ in part) for part in (before, after)] == [12, 10]
    computed = [(length, number) for path, length, number in before if path in (plan.COLD, plan.WARM_UP)]
    assert len(set(computed)) == len(computed)
    assert {(length, number) for path, length, number in after if path == plan.DISK} <= set(computed)
    assert not {(length, number) for path, length, number in after if path != plan.DISK} & set(computed)


def test_prompts_that_exceed_the_window_become_as_long_as_fits() -> None:
    """With room for an answer and for a prompt that turns out a tenth longer."""
    assert plan.fitting((1024, 4096), 8192, 8) == [1024, 4096]
    short = plan.fitting((1024, 4096), 2048, 8)
    assert short[0] == 1024 and 1024 < short[1] and short[1] * 1.1 + 8 <= 2048


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"path": "cold"}, {"cached_tokens": 500}),
        ({"path": "cold"}, {"loaded_blocks": 60}),
        ({"path": "device", "cached_tokens": 992}, {"loaded_blocks": 2}),
        ({"path": "device", "cached_tokens": 992}, {"cached_tokens": 16}),
        ({"path": "host", "cached_tokens": 992, "loaded_blocks": 61}, {"loaded_blocks": 0}),
        ({"path": "host", "cached_tokens": 992, "loaded_blocks": 61}, {"cached_tokens": 500}),
        ({"path": "host", "cached_tokens": 992, "loaded_blocks": 61}, {"disk_blocks": 61}),
        ({"path": "disk", "cached_tokens": 992, "loaded_blocks": 61, "disk_blocks": 61}, {"disk_blocks": 0}),
        ({"path": "cold"}, {"path": "elsewhere"}),
    ],
)
def test_a_sample_whose_blocks_came_from_elsewhere_is_a_fault(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """By the answer's usage and by the counters."""
    sample = replace(SAMPLE, **right)

    assert sample.fault == ""
    assert replace(sample, **wrong).fault


def test_what_the_disk_brings_too_late_is_a_slow_sample() -> None:
    """The prompt was computed after all; leaving it out would flatter the disk."""
    assert replace(SAMPLE, path="disk", disk_blocks=61, cached_tokens=0).fault == ""


def test_answers_are_compared_with_the_first_run_of_the_same_prompt() -> None:
    """Other prompts, and the same number at another length, have other texts."""
    samples = [SAMPLE, replace(SAMPLE, number=2, text="x"), replace(SAMPLE, length=64, text="y"), SAMPLE]

    assert plan.differing(samples) == 0
    assert plan.differing([*samples, replace(SAMPLE, path="host", phase=plan.AFTER, text="x")]) == 1


def several(ttft: list[float], **fields: Any) -> list[plan.Sample]:
    """Return samples that took so long."""
    return [replace(SAMPLE, number=n, ttft_s=s, **fields) for n, s in enumerate(ttft)]


def test_a_tier_is_held_against_the_cold_runs_of_its_phase() -> None:
    """Medians; a disk that was read says how much came from it."""
    samples = several([1.0, 2.0, 9.0]) + several([0.1, 0.2, 0.3], path="host")
    samples += several([4.0, 4.0, 4.0], phase=plan.AFTER)
    samples += several([1.0, 1.0, 9.0], phase=plan.AFTER, path="disk", read_nbytes=5_000_000)

    rows = {(row["phase"], row["path"]): row for row in plan.table(samples)}

    assert list(rows) == [("before", "cold"), ("before", "host"), ("after", "cold"), ("after", "disk")]
    assert (rows["before", "cold"]["ttft_ms"], rows["before", "cold"].get("over_cold")) == (2000.0, None)
    assert (rows["before", "host"]["over_cold"], rows["before", "host"]["met"]) == (0.1, True)
    assert (rows["after", "disk"]["over_cold"], rows["after", "disk"]["met"]) == (0.25, False)
    assert rows["after", "disk"]["read_mb"] == 5.0


def test_few_samples_and_short_prompts_meet_and_miss_nothing() -> None:
    """Two samples leave a target open; a prompt of a few blocks has none."""
    few = plan.table(several([1.0, 1.0]) + several([0.01, 0.01], path="host"))
    short = plan.table(several([1.0] * 3, length=256) + several([0.5] * 3, length=256, path="host"))

    assert few[1]["met"] is None
    assert "met" not in short[1] and short[1]["over_cold"] == 0.5


def test_arms_take_every_place_equally_often() -> None:
    """Over six rounds of three arms all orders occur."""
    assert len({tuple(plan.order(("a", "b", "c"), n)) for n in range(6)}) == 6


def test_a_cost_is_met_or_missed_by_its_whole_interval_and_open_between() -> None:
    """A mean that only looks right is no proof, and one that only looks wrong is none either."""
    assert plan.cost(pairs(1.0, 0.99, 1.01))["met"] is True
    assert plan.cost(pairs(0.9, 0.91, 0.92))["met"] is False
    assert plan.cost(pairs(0.9, 1.0, 1.06))["met"] is None
    assert plan.cost(pairs(0.5, 0.5))["met"] is None


def test_a_missed_target_fails_and_an_open_one_is_named() -> None:
    """The exit code goes by `ok`."""
    rows: list[dict[str, Any]] = [{"tier": "host", "met": True}, {"tier": "host and disk", "met": None}]
    assert judge({"cost": rows}) == {"missed": [], "open": ["write-back, host and disk"], "ok": True}

    rows[0]["met"] = False
    assert judge({"cost": rows})["missed"] == ["write-back, host"] and not judge({"cost": rows})["ok"]


def run(**fields: Any) -> cost.Run:
    """Return one arm's part of a round."""
    values: dict[str, Any] = {"seconds": 1.0, "cpu_s": 1.0, "store_cpu_s": 0.1, "texts": ("a", "b")}
    values |= {"stored_blocks": 6, "disk_blocks": 0}
    return cost.Run(**(values | fields))


def test_the_store_s_share_is_of_all_processor_time() -> None:
    """Rounds in which the machine was slow count by what they took."""
    off = [run(stored_blocks=0), run(cpu_s=3.0, store_cpu_s=0.3, stored_blocks=0)]
    on = [run(store_cpu_s=0.2), run(cpu_s=3.0, store_cpu_s=0.4)]
    row = cost.row(cost.HOST, off, on, 10)
    assert (row["store_share_off"], row["store_share_on"]) == (0.1, 0.15)


def test_a_round_counts_only_if_each_arm_stored_what_it_should_and_said_the_same() -> None:
    """A tier that was off by mistake costs nothing, and proves nothing."""
    good = {cost.OFF: run(stored_blocks=0), cost.HOST: run(), cost.DISK: run(disk_blocks=6)}
    cost.check(good)

    for arm, bad in ((cost.OFF, run()), (cost.HOST, run(stored_blocks=0)), (cost.DISK, run())):
        with pytest.raises(LoadFailed, match=arm):
            cost.check(good | {arm: bad})
    with pytest.raises(GateFailed):
        cost.check(good | {cost.HOST: run(texts=("a", "x"))})


def test_metrics_are_summed_over_nodes() -> None:
    """Comments and other programs' metrics are left out."""
    page = '# HELP headrace_x y\nheadrace_x{node="a"} 1.5\nheadrace_x{node="b",actor="0"} 2\nheadrace_z 4.0\nother 9\n'

    assert probe.parse(page) == {"x": 3.5, "z": 4.0}


def test_forgetting_a_file_leaves_its_bytes(tmp_path: Path) -> None:
    """And says how many they are; the probe of the system leaves nothing behind."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)

    assert probe.forget([path]) == 10_000
    assert path.read_bytes() == b"x" * 10_000
    assert probe.counts_reads(tmp_path, 1 << 20) in (True, False)
    assert list(tmp_path.iterdir()) == [path]


def test_a_sample_of_another_host_is_one_whose_blocks_it_sent() -> None:
    """By the counters of both sides; with a ratio to the prompts that were new to both."""
    here = replace(SAMPLE, phase="there", path=plan.OTHER, loaded_blocks=62, disk_blocks=62, ttft_s=0.1)
    cold = replace(SAMPLE, phase="there")

    assert replace(here, read_nbytes=4096).fault == ""
    assert here.fault and replace(here, read_nbytes=0).fault and replace(here, read_nbytes=1, disk_blocks=0).fault
    rows = plan.table([cold, replace(here, read_nbytes=2_000_000)], ("there",))
    assert [(row["path"], row.get("over_cold"), row.get("read_mb")) for row in rows] == [
        (plan.COLD, None, None),
        (plan.OTHER, 0.1, 2.0),
    ]


@pytest.mark.slow
def test_rates_are_those_of_real_copies_and_real_files(tmp_path: Path) -> None:
    """Eight blocks of 64 KiB; each path has a rate for each way."""
    rows = rates.measure(tmp_path, 8, 65_536, 3)

    assert [row["path"] for row in rows] == ["host to device", "other host", "disk, remembered", "disk, forgotten"]
    for found in rows:
        assert all(found[f"{way}_mb_s"] > 0 for way in (rates.PLAIN, rates.UNVERIFIED, rates.VERIFIED))
        assert found[rates.VERIFIED]["met"] in (True, False)
    assert len(probe.segments(tmp_path)) == 1


@pytest.mark.slow
def test_a_copy_that_brings_nothing_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever checksums it tells."""
    real = rates.copy_blocks

    def pretend(src: Any, src_refs: Any, dst: Any, dst_refs: Any, **options: Any) -> list[int]:
        sums = real(src, src_refs, dst, dst_refs, **options)
        dst.view()[: dst.block_nbytes] = bytes(dst.block_nbytes)
        return sums

    monkeypatch.setattr(rates, "copy_blocks", pretend)

    with pytest.raises(rates.WrongBytes, match="copy"):
        rates.measure(tmp_path, 4, 4096, 1)


@pytest.mark.slow
def test_a_damaged_file_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong bit in the last block."""
    real = DiskTier.write

    def damage(self: DiskTier, blocks: Any, now: float) -> int:
        stored = real(self, blocks, now)
        for path in probe.segments(tmp_path):
            with path.open("r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([last ^ 1]))
        return stored

    monkeypatch.setattr(DiskTier, "write", damage)

    with pytest.raises(rates.WrongBytes, match="disk"):
        rates.measure(tmp_path, 4, 4096, 1)
