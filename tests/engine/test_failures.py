"""Logits that are not numbers: one sequence ends with a typed error and a count; nobody else notices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engines import expected, make_core, plain, prompt, run, sequence
from test_speculation import real_core

from engine.failures import NOT_NUMBERS, error_of
from engine.plan import BatchPlan, Sampled
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key
from engine.speculation.lookup import PromptLookup
from kernels.sampling import BAD_IDS, NOTHING_LEFT
from schemas.errors import BadRequest, EngineFailed, NotNumbers, from_info
from tests.models.files import tiny_model


def test_only_the_row_without_numbers_fails_and_is_counted(tmp_path: Path) -> None:
    """Its blocks come back and are never found again; the neighbour's ids are those of a quiet run."""

    class Sick(ScriptedRunner):
        def execute(self, plan: BatchPlan) -> list[Sampled]:
            out = super().execute(plan)
            sick = [one.key.request_id == "sick" and one.index == 5 for one in out]
            return [
                Sampled(one.key, one.choice, one.index, -1, error=NOT_NUMBERS) if bad else one
                for one, bad in zip(out, sick, strict=True)
            ]

    core = make_core(tmp_path, runner=Sick(plain, vocab_size=2000, max_context=1024))
    core.add(sequence("sick", prompt(40, 1)))
    core.add(sequence("well", prompt(40, 2)))
    failed, ids = [], []
    while core.has_work:
        result = core.step()
        core.check_integrity()
        failed += result.failed
        ids += [item.id for item in result.items if item.key.request_id == "well"]

    assert failed == [(Key("sick", 0), NOT_NUMBERS)]
    assert core.statistics()["nan_rows_total"] == 1 and core.statistics()["failed_total"] == 1
    assert ids == expected(prompt(40, 2), 20) and core.pool.in_use == 0


@pytest.mark.parametrize("guessing", [False, True])
def test_a_model_with_damaged_keys_fails_that_sequence_alone(tmp_path: Path, guessing: bool) -> None:
    """NaN in one sequence's blocks, with and without guesses: a typed error there, the same text beside it."""
    model, texts = tiny_model(tmp_path / "tiny.gguf"), []
    for damage in (False, True):
        core = real_core(tmp_path, f"e{damage}", model, PromptLookup() if guessing else None)
        core.add(sequence("well", [5, 6, 7, 8] * 5, max_tokens=30, ignore_eos=True))
        if damage:
            core.add(sequence("sick", [9, 8, 7, 6] * 5, max_tokens=30, ignore_eos=True))
        well, failed = list[int](), list[tuple[Key, str]]()
        for number in range(60):
            if damage and number == 3:
                [first, *_] = core.refs(Key("sick", 0))
                size = core.pool.block_nbytes
                block = np.frombuffer(core.pool.view(), np.uint8)[first.index * size : (first.index + 1) * size]
                block[:] = 0xFF
            if not core.has_work:
                break
            result = core.step()
            failed += result.failed
            well += [item.id for item in result.items if item.key.request_id == "well"]
        texts.append(well)

    assert texts[0] == texts[1] and len(texts[0]) == 30
    assert failed == [(Key("sick", 0), NOT_NUMBERS)] and core.statistics()["nan_rows_total"] == 1


def test_a_failure_travels_as_its_type() -> None:
    """Numbers that are none, masks that leave nothing, and all else are different errors at the other end too."""
    for message, kind, status in (
        (NOT_NUMBERS, NotNumbers, 500),
        (NOTHING_LEFT, BadRequest, 400),
        (BAD_IDS, BadRequest, 400),
        ("block 3 does not hold", EngineFailed, 500),
    ):
        arrived = from_info(error_of(message).info())

        assert type(arrived) is kind and arrived.status == status and arrived.message == message
    assert isinstance(error_of(NOT_NUMBERS), EngineFailed) and error_of(NOT_NUMBERS).code == "logits_not_numbers"


def test_a_quiet_run_counts_nothing(tmp_path: Path) -> None:
    """The counter stands at zero, and is there before it counts."""
    core = make_core(tmp_path)
    core.add(sequence("a", prompt(5)))
    run(core)

    assert core.statistics()["nan_rows_total"] == 0
