"""Speculation in the core: the ids, ends and blocks of a run with guesses are those of a run without."""

from __future__ import annotations

import random
from collections.abc import Sequence as Listing
from pathlib import Path
from typing import Any

import pytest
from engines import EOS, expected, make_core, plain, prompt, run, sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_pace import paced

from engine.core import EngineCore
from engine.costs import StepCosts
from engine.live import check_ids
from engine.plan import BatchPlan, Row, Sampled
from engine.scheduler import Scheduler
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key
from engine.speculation.drafter import Drafter, Wish
from engine.speculation.gate import Candidate
from engine.speculation.lookup import PromptLookup
from engine.speculation.model import ModelDrafter
from engine.speculation.speculator import Speculator
from engine.torch_runner import TorchRunner
from kvstore.block import root_hash
from kvstore.pool import BlockPool
from schemas.record import Sampling
from tests.models.files import tiny_model


class Oracle:
    """Knows the script, and is wrong as often as it is told."""

    def __init__(self, wrong: float, seed: int = 0) -> None:
        self.wrong, self.rng, self.prompts = wrong, random.Random(seed), dict[Key, int]()
        self.forgotten: list[Key] = []

    def propose(self, wishes: Listing[Wish]) -> list[list[int]]:
        out = []
        for wish in wishes:
            ids, num_prompt = wish.context, self.prompts[wish.key]
            index = len(ids) - num_prompt
            right = [plain(ids[:num_prompt], wish.key.choice, index + i, Sampling()) for i in range(wish.length)]
            cut = self.rng.randint(0, wish.length) if self.rng.random() < 0.3 else wish.length
            out.append([t if self.rng.random() >= self.wrong else 5 for t in right][:cut])
        return out

    def forget(self, key: Key) -> None:
        self.forgotten.append(key)

    def close(self) -> None: ...


def eager(core: EngineCore) -> EngineCore:
    """Let every sequence guess as far as it may, whatever it costs."""
    assert core._speculator is not None

    def all_of_it(candidates: Listing[Candidate], base: object) -> dict[Key, int]:
        return {one.key: one.limit for one in candidates}

    core._speculator.gate.lengths = all_of_it  # type: ignore[method-assign]  # the gate has tests of its own
    return core


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 60)), min_size=1, max_size=8),
    st.integers(10, 40),
    st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    st.integers(1, 8),
    st.integers(0, 200),
    st.booleans(),
)
def test_guesses_change_no_id_and_lose_no_block(
    tmp_path: Path, shapes: list[tuple[int, int]], num_blocks: int, wrong: float, k: int, parking: int, cache: bool
) -> None:
    """Right and wrong guesses, in pools with and without room for them, with preemption, on blocks that are checked."""
    oracle = Oracle(wrong)
    core = eager(
        make_core(
            tmp_path, num_blocks=num_blocks, drafter=oracle, max_draft=k, parking_tokens=parking, cache_outputs=cache
        )
    )
    try:
        for number, (length, tokens) in enumerate(shapes):
            oracle.prompts[Key(f"s{number}", 0)] = length
            core.add(sequence(f"s{number}", prompt(length, number), max_tokens=tokens))

        ids = run(core)

        for number, (length, tokens) in enumerate(shapes):
            assert ids[Key(f"s{number}", 0)] == expected(prompt(length, number), tokens)
        assert core.pool.in_use == 0
        counts = core.statistics()
        assert counts["accepted_total"] <= counts["drafted_total"]
        assert wrong < 1.0 or counts["accepted_total"] == 0
        assert len(oracle.forgotten) == len(shapes)
    finally:
        core.pool.close()


def test_right_guesses_save_steps(tmp_path: Path) -> None:
    """With eight right guesses, nine ids come of one step, and each is a separate item in order."""
    oracle = Oracle(0.0)
    oracle.rng.random = lambda: 1.0  # type: ignore[method-assign]  # never cut short
    oracle.prompts[Key("a", 0)] = 20
    core = eager(make_core(tmp_path, drafter=oracle))
    core.add(sequence("a", prompt(20), max_tokens=28))
    items: list[list[int]] = []

    run(core, each=lambda result: items.append([item.index for item in result.items]))

    assert items == [[0], list(range(1, 10)), list(range(10, 19)), list(range(19, 28))]
    assert core.statistics()["drafted_total"] == core.statistics()["accepted_total"] == 24


def test_ids_behind_an_end_are_dropped(tmp_path: Path) -> None:
    """A guess past an end token is right and still not said; the sequence ends where it would have."""

    class Beyond(Oracle):
        def propose(self, wishes: Listing[Wish]) -> list[list[int]]:
            return [[50, EOS, 50, 50][: w.length] for w in wishes]

    ends: list[tuple[Key, str]] = []
    script = {3: EOS}
    core = eager(make_core(tmp_path, script=lambda p, c, i, s: script.get(i, 50), drafter=Beyond(0.0)))
    core.add(sequence("a", prompt(20), max_tokens=28))

    ids = run(core, each=lambda result: ends.extend(result.ended))

    assert ids[Key("a", 0)] == [50, 50, 50, EOS] and ends == [(Key("a", 0), "stop")]
    assert core.pool.in_use == 0


def test_guesses_stay_within_the_budget_and_never_take_the_last_blocks(tmp_path: Path) -> None:
    """No step computes more than the budget allows, and nobody is preempted for a guess."""
    oracle, sizes = Oracle(0.5), []
    core = eager(make_core(tmp_path, num_blocks=13, scheduler=Scheduler(16, 20, 4, 20), drafter=oracle))
    for number in range(4):
        oracle.prompts[Key(f"s{number}", 0)] = 16
        core.add(sequence(f"s{number}", prompt(16, number), max_tokens=30))

    run(core, each=lambda result: sizes.append(result.num_tokens))

    assert max(sizes) <= 20 and core.statistics()["drafted_total"] > 0
    assert core.statistics()["preempted_total"] == 0


def test_a_prompt_computed_token_by_token_is_not_guessed_into(tmp_path: Path) -> None:
    """A chunk of one token is no decode."""
    oracle = Oracle(0.2)
    oracle.prompts[Key("a", 0)] = 20
    core = eager(make_core(tmp_path, scheduler=Scheduler(16, 32, 4, 1), drafter=oracle))
    core.add(sequence("a", prompt(20), max_tokens=30))

    assert run(core)[Key("a", 0)] == expected(prompt(20), 30)


def test_an_abort_in_the_midst_of_guessing_frees_everything(tmp_path: Path) -> None:
    """Blocks taken for guesses go back as all others."""
    oracle = Oracle(0.5)
    oracle.prompts[Key("a", 0)] = 30
    core = eager(make_core(tmp_path, drafter=oracle))
    core.add(sequence("a", prompt(30), max_tokens=200))
    for _ in range(7):
        core.step()

    assert core.abort(Key("a", 0)) and core.pool.in_use == 0
    core.check_integrity()


@pytest.mark.parametrize(
    ("ids", "indices", "problem"),
    [
        ([5], [3], None),
        ([5, 6, 9], [3, 4, 5], None),
        ([], [], "1 to 3"),
        ([5, 6, 9, 9], [3, 4, 5, 6], "1 to 3"),
        ([5, 6], [3, 5], "turn"),
        ([8, 6], [3, 4], "wrong guess"),
    ],
)
def test_a_runner_that_breaks_the_contract_fails_the_row(ids: list[int], indices: list[int], problem: str) -> None:
    """Too few, too many, out of turn, or on behind a wrong guess: never a wrong text."""
    key = Key("a", 0)
    row = Row(key, [1, 5, 6], 9, 7, [0], True, 3, (0,), Sampling(), [1] * 10, [5, 6])
    got = [Sampled(key, 0, index, one) for index, one in zip(indices, ids, strict=True)]

    found = check_ids(row, got)

    assert (found is None) if problem is None else (found is not None and problem in found)


# --- drafters ---------------------------------------------------------------------------------------


def lookup(context: list[int], length: int = 4) -> list[int]:
    """One guess by a fresh lookup."""
    return PromptLookup().propose([Wish(Key("a", 0), context, length)])[0]


def test_the_longest_match_wins_and_of_equals_the_most_recent() -> None:
    """Two ids must agree; up to four count; then the later place."""
    assert lookup([1, 2, 3, 9, 1, 2]) == [3, 9, 1, 2]
    assert lookup([1, 2, 3, 1, 2, 4, 1, 2], 1) == [4]
    assert lookup([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1) == [3]
    assert lookup([1, 2, 3, 4, 5]) == lookup([1]) == lookup([3, 2, 5, 2]) == []


def test_a_loop_is_guessed_round_and_round() -> None:
    """A match that reaches the end goes on with the guess itself."""
    assert lookup([4, 1, 2, 3, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert lookup([5, 5, 5], 4) == [5, 5, 5, 5]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8))
def test_a_growing_context_is_guessed_as_a_fresh_one(ids: list[int], step: int) -> None:
    """The index that is kept between calls says what one built anew says, and what the rule says."""
    drafter, context, key = PromptLookup(), list[int](), Key("a", 0)
    for at in range(0, len(ids), step):
        context += ids[at : at + step]

        got = drafter.propose([Wish(key, context, 3)])[0]

        assert got == lookup(list(context), 3)
        matches = []
        for end in range(2, len(context)):
            same = 0
            while same < min(4, end) and context[end - 1 - same] == context[-1 - same]:
                same += 1
            if same >= 2:
                matches.append((same, end))
        if matches and len(matches) <= 16:
            assert got[0] == context[max(matches)[1]]
        assert bool(got) == bool(matches)


def real_core(directory: Path, name: str, model: Path, drafter: Drafter | None, **options: Any) -> EngineCore:
    """A core over the tiny model that guesses whenever it can."""
    runner = TorchRunner(model)
    num_blocks = options.pop("num_blocks", 60)
    pool = BlockPool.create(directory, name, num_blocks, runner.block_nbytes, runner.layout, f"{name}0", "here")
    core = EngineCore(
        runner, pool, Scheduler(16, 64, 8, 32), root=lambda salt: root_hash(salt), now=lambda: 0.0,
        wall=lambda: 0.0, drafter=drafter, **options,
    )  # fmt: skip
    return core if drafter is None else eager(core)


def add_all(core: EngineCore, *, greedy: bool = False) -> None:
    """Four requests: greedy, drawn, with penalties, and long; or all greedy."""
    samplings = [
        Sampling(temperature=0.0, max_tokens=60, ignore_eos=True),
        Sampling(temperature=0.4, seed=3, max_tokens=60, ignore_eos=True),
        Sampling(temperature=0.3, seed=4, frequency_penalty=0.1, max_tokens=60, ignore_eos=True),
        Sampling(temperature=0.0, max_tokens=60, repetition_penalty=1.05),
    ]
    for number, sampling in enumerate(samplings):
        one = sequence(f"s{number}", [(7 * i + number) % 250 + 4 for i in range(20 + 40 * (number == 3))])
        one.sampling = samplings[0] if greedy else sampling
        core.add(one)


@pytest.mark.parametrize("num_blocks", [60, 13])
def test_the_models_texts_are_the_same_with_prompt_lookup(tmp_path: Path, num_blocks: int) -> None:
    """Greedy, drawn and penalized, with right and wrong guesses, with and without preemption."""
    model, texts = tiny_model(tmp_path / "tiny.gguf"), []
    for name, drafter in (("plain", None), ("guessing", PromptLookup())):
        core = real_core(tmp_path, name, model, drafter, num_blocks=num_blocks)
        add_all(core)
        texts.append(run(core))

    counts = core.statistics()
    assert texts[0] == texts[1]
    assert 0 < counts["accepted_total"] < counts["drafted_total"]
    assert (counts["preempted_total"] > 0) is (num_blocks == 13)


def test_a_small_model_guesses_what_it_would_say(tmp_path: Path) -> None:
    """Guesses of the model itself are right where it is greedy: the same ids in fewer steps; its memory comes back."""
    model, texts, steps = tiny_model(tmp_path / "tiny.gguf"), [], []
    drafter = ModelDrafter(TorchRunner(model), 20)
    for name, one in (("plain", None), ("guessing", drafter)):
        core = real_core(tmp_path, name, model, one)
        add_all(core, greedy=True)
        texts.append(run(core))
        steps.append(core.statistics()["steps_total"])

    counts = core.statistics()
    assert texts[0] == texts[1]
    assert counts["accepted_total"] > 0.9 * counts["drafted_total"] > 0
    assert steps[1] < 0.6 * steps[0]
    assert sorted(drafter._free) == list(range(20)), "all its blocks came back"


def test_a_small_models_memory_is_checked_and_shared(tmp_path: Path) -> None:
    """On checked blocks: contexts that grow by right and wrong guesses, long ones read in parts, little room."""

    class Strict(ScriptedRunner):
        def execute(self, plan: BatchPlan) -> list[Sampled]:
            out = super().execute(plan)
            assert all(one.error is None for one in out), out
            return out

    drafter, rng = ModelDrafter(Strict(plain, vocab_size=2000, max_context=400), 20), random.Random(4)
    contexts = {Key(f"s{n}", 0): prompt(10 + 60 * n, n) for n in range(4)}
    guessed = given_up = 0
    for _ in range(60):
        asked = rng.sample(sorted(contexts), rng.randint(1, 3))
        got = drafter.propose([Wish(key, contexts[key], rng.randint(1, 8)) for key in asked])
        for key, ids in zip(asked, got, strict=True):
            guessed += bool(ids)
            given_up += not ids
            keep = rng.randint(0, len(ids))
            contexts[key] += [*ids[:keep], rng.randint(0, 1999)]
            if len(contexts[key]) > 300:
                drafter.forget(key)
                contexts[key] = prompt(10, rng.randint(0, 99))
        used = [b for known in drafter._known.values() for b in known.blocks]
        assert sorted(used + drafter._free) == list(range(20))
    assert given_up and guessed > 20, "long contexts are read in parts, and then guessed"


# --- a whole system of parts ------------------------------------------------------------------------


def test_the_speculator_refuses_lengths_that_make_no_sense() -> None:
    """Between one and eight ids."""
    for wrong in (0, 9):
        with pytest.raises(ValueError, match="8"):
            Speculator(PromptLookup(), StepCosts(), lambda: 0.0, wrong)


def test_the_engine_guesses_by_itself_where_it_pays(tmp_path: Path) -> None:
    """A looping answer on a paced engine: the gate opens without help and most guesses are right."""
    core = paced(tmp_path, drafter=PromptLookup())
    core.runner._script = lambda p, c, i, s: 100 + i % 7  # type: ignore[attr-defined]  # repeats itself
    core.add(sequence("a", prompt(60), max_tokens=200))

    ids = run(core)

    counts = core.statistics()
    assert ids[Key("a", 0)] == [100 + i % 7 for i in range(200)]
    assert counts["accepted_total"] > 100 and counts["steps_total"] < 100
