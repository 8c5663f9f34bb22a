"""Preemption by parking blocks in host memory: the area itself, the choice, and that nothing of it shows in a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import expected, make_core, plain, prompt, run, sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.costs import Work
from engine.parking import Parking
from engine.scheduler import Scheduler
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key
from engine.torch_runner import TorchRunner
from kvstore.block import root_hash
from kvstore.pool import BlockPool
from schemas.record import Sampling
from tests.models.files import tiny_model


def slow(core: EngineCore, token_s: float = 0.01) -> EngineCore:
    """Let the core believe that computing a token takes so long."""
    for tokens in (1, 16, 48):
        for _ in range(10):
            core.costs.observe(Work(tokens, tokens), tokens * token_s)
    return core


def test_what_is_parked_comes_back_and_its_slots_too() -> None:
    """Bytes survive while the pool's are overwritten; blocks found elsewhere are not copied; nothing leaks."""
    pool = bytearray(bytes(range(64)))
    parking = Parking(4 * 8, 8, lambda: 0.0)
    key = Key("a", 0)

    assert parking.can_park(4) and not parking.can_park(5)
    assert parking.park(key, memoryview(pool), [5, 2, 7], 37) == 24
    assert parking.num_tokens(key) == 37 and parking.nbytes == 24 and not parking.can_park(2)
    wanted = [bytes(pool[b * 8 : b * 8 + 8]) for b in (5, 2, 7)]
    pool[:] = bytes(64)
    parking.restore(key, memoryview(pool), [1, 0, 3, 4], 1)

    assert [bytes(pool[b * 8 : b * 8 + 8]) for b in (0, 3)] == wanted[1:]
    assert pool[8:16] == bytes(8) and pool[32:] == bytes(32), "only these were written"
    assert parking.nbytes == 0 and parking.num_tokens(key) == 0
    parking.check_integrity()


def test_copies_are_measured() -> None:
    """After copies that took long, an estimate is as long."""
    times = iter(range(100))
    parking = Parking(1 << 20, 1024, lambda: float(next(times)))
    before = parking.seconds(4)

    for number in range(20):
        parking.park(Key(str(number), 0), memoryview(bytearray(8192)), [0, 1, 2, 3], 64)

    assert parking.seconds(4) > 1.9 > before


@pytest.mark.parametrize(
    ("tokens", "token_s", "parked"),
    [(1024, 0.01, True), (0, 0.01, False), (32, 0.01, False), (1024, 1e-10, False)],
    ids=["pays", "no-area", "too-small", "computing-is-cheaper"],
)
def test_the_cheaper_way_is_taken(tmp_path: Path, tokens: int, token_s: float, parked: bool) -> None:
    """Parked where copying is quicker and there is room, computed again where not: the ids are the same."""
    core = slow(make_core(tmp_path, num_blocks=9, parking_tokens=tokens), token_s)
    core.add(sequence("old", prompt(30, 1), max_tokens=90))
    core.add(sequence("young", prompt(30, 2), max_tokens=90))

    ids = run(core)

    counts = core.statistics()
    assert counts["preempted_total"] > 0
    assert (counts["preempted_parked_total"] > 0) is parked
    assert counts["preempted_total"] == counts["preempted_parked_total"] + counts["preempted_recompute_total"]
    assert (counts["parked_bytes_total"] > 0) is parked and counts["parking_bytes"] == 0
    for name, start in (("old", 1), ("young", 2)):
        assert ids[Key(name, 0)] == expected(prompt(30, start), 90)
    computed_once = 2 * (30 + 89)
    assert (counts["tokens_total"] == computed_once) is parked, "what is parked is not computed again"


def test_an_abort_frees_what_is_parked(tmp_path: Path) -> None:
    """A parked sequence that is dropped leaves nothing in the area."""
    core = slow(make_core(tmp_path, num_blocks=9, parking_tokens=1024))
    core.add(sequence("old", prompt(30, 1), max_tokens=90))
    core.add(sequence("young", prompt(30, 2), max_tokens=90))
    while not core.statistics()["parking_bytes"]:
        core.step()

    assert core.abort(Key("young", 0))

    core.check_integrity()
    assert core.statistics()["parking_bytes"] == 0
    assert run(core)[Key("old", 0)][-1] == expected(prompt(30, 1), 90)[-1]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60), st.integers(0, 2)), min_size=2, max_size=8),
    st.integers(10, 14),
    st.integers(0, 300),
)
def test_parking_changes_no_id(
    tmp_path: Path, shapes: list[tuple[int, int, int]], num_blocks: int, parking: int
) -> None:
    """In a pool too small for all, with an area of any size, each block holds what it must at every step."""
    core = slow(make_core(tmp_path, num_blocks=num_blocks, parking_tokens=parking, cache_outputs=True))
    try:
        for number, (length, tokens, priority) in enumerate(shapes):
            core.add(sequence(f"s{number}", prompt(length, number % 3), max_tokens=tokens, priority=priority))

        ids = run(core)

        for number, (length, tokens, _) in enumerate(shapes):
            assert ids[Key(f"s{number}", 0)] == expected(prompt(length, number % 3), tokens)
        assert core.pool.in_use == 0 and core.statistics()["parking_bytes"] == 0
    finally:
        core.pool.close()


def real_core(directory: Path, name: str, model: Path, num_blocks: int, **options: Any) -> EngineCore:
    """A core over the tiny model."""
    runner = TorchRunner(model)
    pool = BlockPool.create(directory, name, num_blocks, runner.block_nbytes, runner.layout, f"{name}0", "here")
    return EngineCore(
        runner, pool, Scheduler(16, 64, 8, 32), root=lambda salt: root_hash(name, salt),
        now=lambda: 0.0, wall=lambda: 0.0, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("tokens", "parked"), [(4096, True), (0, False)])
def test_the_model_says_the_same_after_either_kind_of_preemption(tmp_path: Path, tokens: int, parked: bool) -> None:
    """Greedy and seeded texts in a pool too small for all equal those of a pool with room."""
    model = tiny_model(tmp_path / "tiny.gguf")
    results = []
    for name, num_blocks, options in (("roomy", 100, {}), ("tight", 9, {"parking_tokens": tokens})):
        core = slow(real_core(tmp_path, name, model, num_blocks, **options))
        for number in range(4):
            one = sequence(
                f"s{number}", [(7 * i + number) % 250 + 4 for i in range(20)], max_tokens=40, ignore_eos=True
            )
            if number % 2:
                one.sampling = Sampling(temperature=0.9, seed=number, max_tokens=40, ignore_eos=True)
            core.add(one)
        results.append(run(core))

    counts = core.statistics()
    assert results[0] == results[1]
    assert counts["preempted_total"] > 0 and (counts["preempted_parked_total"] > 0) is parked


def test_a_runner_that_checks_sees_a_wrong_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: a restore that writes nothing is an error of that sequence."""
    core = slow(make_core(tmp_path, num_blocks=9, parking_tokens=1024))
    monkeypatch.setattr(Parking, "restore", lambda self, key, *_: self.drop(key))
    core.add(sequence("old", prompt(30, 1), max_tokens=90))
    core.add(sequence("young", prompt(30, 2), max_tokens=90))
    failed = []
    while core.has_work:
        failed += core.step().failed

    assert [key for key, _ in failed] == [Key("young", 0)] and isinstance(core.runner, ScriptedRunner)
    assert plain([1], 0, 0, Sampling()) > 0
