"""The compiled runner in an engine: its contract, and the same ids for a sequence whatever happens around it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import Time, run

from engine.core import EngineCore
from engine.native_runner import NativeRunner
from engine.plan import BatchPlan, Row
from engine.scheduler import Scheduler
from engine.sequence import Key, Sequence
from engine.speculation.drafter import Wish
from engine.speculation.gate import Candidate
from kernels import native
from kvstore.block import root_hash
from kvstore.pool import BlockPool
from models.errors import ModelFileError
from models.packed import PackedWeights
from schemas.record import Sampling
from tests.models.files import ROOT
from tests.models.native_models import Shape, write_model

if not native.available():
    pytest.skip(native.why_not(), allow_module_level=True)

# The penalty keeps a model of random weights from saying one token for ever, which would make all ids alike.
GREEDY = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True, frequency_penalty=0.5)
SEEDED = Sampling(
    temperature=0.9, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True, frequency_penalty=0.3, repetition_penalty=1.1
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with integer weights and three query heads to a KV head."""
    shape = Shape(heads=6, kv_heads=2, tied=False, kind="Q4_1", kinds={"token_embd": "Q8_0"})
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape)


@pytest.fixture
def runner(model: Path) -> Iterator[NativeRunner]:
    """A runner with a pool of 16 blocks full of NaN."""
    made = NativeRunner(model)
    made.bind(memoryview(bytearray(b"\xff" * 16 * made.block_nbytes)), 16)
    yield made
    made.close()


def _row(
    ids: list[int], start: int = 0, blocks: list[int] | None = None, *, key: str = "a", sampling: Sampling = GREEDY,
    sample: bool = True, choices: tuple[int, ...] = (0,), index: int = 0,
) -> Row:  # fmt: skip
    blocks = blocks if blocks is not None else [3, 1]
    return Row(Key(key, 0), ids, start, len(ids), blocks, sample, index, choices, sampling, [])


# --- the contract of a runner ----------------------------------------------------------------------


def test_it_tells_what_the_file_says(runner: NativeRunner) -> None:
    """Sizes, layout, end tokens; a block is 2 layers × key and value × 16 tokens × 32 bfloat16."""
    assert runner.block_nbytes == 2 * 2 * 16 * 32 * 2
    assert runner.vocab_size == 264 and runner.max_context == 512 and runner.eos_ids == {2}
    assert runner.layout == "native-1,2,16,2,16,bfloat16"
    assert runner.fingerprint.endswith(runner._model.instruction_set)


def test_each_choice_of_a_row_gets_its_own_draw_in_the_order_of_rows(runner: NativeRunner) -> None:
    """Rows without `sample` answer nothing; draws of a choice repeat."""
    flat = Sampling(temperature=50.0, seed=5)
    rows = [
        _row([1, 2, 3], blocks=[0], key="a", sample=False),
        _row([4, 5], blocks=[1], key="b", sampling=flat, choices=(0, 1, 2), index=3),
        _row([6], blocks=[2], key="c", choices=(4,)),
    ]

    got = runner.execute(BatchPlan(0, rows))

    assert [(s.key.request_id, s.choice, s.index) for s in got] == [("b", 0, 3), ("b", 1, 3), ("b", 2, 3), ("c", 4, 0)]
    assert len({s.id for s in got[:3]}) > 1
    assert runner.execute(BatchPlan(1, rows)) == got
    assert runner.execute(BatchPlan(2, [])) == []


def test_a_row_that_goes_wrong_leaves_its_neighbours_alone(runner: NativeRunner) -> None:
    """NaN in one sequence's prefix is an error of that row; the other's answer keeps every bit."""
    good, bad = _row([1, 2, 3], blocks=[0], key="good"), _row([4], 1, blocks=[7], key="bad")
    alone = runner.execute(BatchPlan(0, [good]))[0]

    together = runner.execute(BatchPlan(1, [bad, good]))

    assert together[0].error is not None and together[1] == alone


def test_warm_up_leaves_the_pool_as_it_is(model: Path) -> None:
    """It works before and after `bind`, on scratch memory."""
    runner = NativeRunner(model)
    runner.warm_up()
    pool = bytearray(b"\xab" * 4 * runner.block_nbytes)
    runner.bind(memoryview(pool), 4)

    runner.warm_up()

    assert pool == b"\xab" * len(pool)
    runner.execute(BatchPlan(0, [_row([1], blocks=[2])]))
    assert pool != b"\xab" * len(pool)
    runner.close()


def test_warm_up_refuses_a_model_that_computes_no_numbers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of NaN are found before the first request."""
    nan = np.full(64, np.nan, np.float32)
    real = PackedWeights.address
    monkeypatch.setattr(
        PackedWeights, "address", lambda self, name: nan.ctypes.data if name == "norm" else real(self, name)
    )
    runner = NativeRunner(model)

    with pytest.raises(ModelFileError, match="first step"):
        runner.warm_up()

    runner.close()


def test_close_lets_go_of_the_pool(model: Path) -> None:
    """The owner can close its map afterwards; closing twice is nothing."""
    runner = NativeRunner(model, threads=2)
    pool = bytearray(2 * runner.block_nbytes)
    view = memoryview(pool)
    runner.bind(view, 2)

    runner.close()
    runner.close()
    view.release()

    pool.extend(b"x")  # raises BufferError while anything holds a view


def test_bad_arguments_are_refused(runner: NativeRunner, tmp_path: Path) -> None:
    """A small or read-only buffer, a file that is no model."""
    with pytest.raises(ValueError, match="writable"):
        runner.bind(memoryview(bytearray(10)), 1)
    with pytest.raises(ValueError, match="writable"):
        runner.bind(memoryview(bytes(runner.block_nbytes)), 1)
    (tmp_path / "x.gguf").write_bytes(b"nothing here that could be a model")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        NativeRunner(tmp_path / "x.gguf")


@pytest.mark.slow
def test_a_process_that_serves_never_loads_torch(model: Path) -> None:
    """Reading, packing, warming up and a step, without torch, transformers or triton."""
    program = (
        "import sys; from pathlib import Path; from engine.native_runner import NativeRunner\n"
        "runner = NativeRunner(Path(sys.argv[1])); runner.warm_up(); runner.close()\n"
        "print(sorted({'torch', 'transformers', 'triton'} & sys.modules.keys()))"
    )

    done = subprocess.run([sys.executable, "-c", program, str(model)], cwd=ROOT, capture_output=True, text=True)

    assert done.stdout == "[]\n", done.stderr


# --- in an engine ----------------------------------------------------------------------------------


class Engine:
    """A core over the compiled runner and a pool of NaN."""

    def __init__(
        self, model: Path, directory: Path, *, blocks: int = 64, threads: int = 1, chunk: int = 128, **options: object
    ) -> None:
        self.runner = NativeRunner(model, threads)
        pool = BlockPool.create(
            directory, f"p{len(list(directory.iterdir()))}", blocks, self.runner.block_nbytes, self.runner.layout,
            "00", "here",
        )  # fmt: skip
        pool.view()[:] = b"\xff" * pool.view().nbytes
        clock = Time()
        self.core = EngineCore(
            self.runner, pool, Scheduler(16, max(chunk, 48), 48, chunk), root=lambda salt: root_hash("test", salt),
            now=clock.now, wall=clock.now, **options,
        )  # type: ignore[arg-type]  # fmt: skip

    def answer(self, *sequences: Sequence) -> dict[Key, list[int]]:
        """Compute sequences to their ends; outputs that they came with count."""
        for one in sequences:
            self.core.add(one)
        came = {one.key: list(one.outputs) for one in sequences}
        return {key: came.get(key, []) + ids for key, ids in run(self.core).items()}

    def close(self) -> None:
        """End threads and give the pool back."""
        self.runner.close()
        self.core.pool.close()


def _prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 264) for _ in range(length)]


def _seq(seed: int, length: int, sampling: Sampling = GREEDY, *, choice: int = 0, **fields: object) -> Sequence:
    return Sequence(Key(f"s{seed}", choice), _prompt(seed, length), sampling, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def sampling(request: pytest.FixtureRequest) -> Sampling:
    """Greedy, and drawn with penalties."""
    made: Sampling = request.param
    return made


@pytest.fixture(scope="module")
def alone(model: Path, sampling: Sampling, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The 40 ids of sequence 1 computed alone, its prompt of 90 tokens at once."""
    engine = Engine(model, tmp_path_factory.mktemp("pools"))
    ids = engine.answer(_seq(1, 90, sampling))[Key("s1", 0)]
    engine.close()
    assert len(ids) == 40 and len(set(ids)) > 5
    return ids


def test_ids_are_the_same_beside_others(model: Path, sampling: Sampling, alone: list[int], tmp_path: Path) -> None:
    """Beside 1, 7 and 31 others of many lengths, on one and on two threads."""
    for others, threads in ((1, 1), (7, 2), (31, 1)):
        engine = Engine(model, tmp_path, blocks=600, threads=threads)
        crowd = [_seq(10 + i, 5 + 7 * i % 90, SEEDED if i % 2 else GREEDY) for i in range(others)]
        got = engine.answer(*crowd[: others // 2], _seq(1, 90, sampling), *crowd[others // 2 :])
        assert got[Key("s1", 0)] == alone and len(got) == others + 1
        engine.close()


def test_ids_are_the_same_when_admitted_in_mid_run(
    model: Path, sampling: Sampling, alone: list[int], tmp_path: Path
) -> None:
    """Others have decoded for a while, and some end before it does."""
    engine = Engine(model, tmp_path, blocks=200)
    for i in range(5):
        engine.core.add(_seq(10 + i, 30 + i, replace_tokens(GREEDY, 12 + 9 * i)))
    for _ in range(10):
        engine.core.step()

    assert engine.answer(_seq(1, 90, sampling))[Key("s1", 0)] == alone
    engine.close()


def replace_tokens(sampling: Sampling, count: int) -> Sampling:
    """Return the same with another number of tokens."""
    return sampling.model_copy(update={"max_tokens": count})


@pytest.mark.parametrize("chunk", [16, 33, 48])
def test_ids_are_the_same_in_chunks(
    chunk: int, model: Path, sampling: Sampling, alone: list[int], tmp_path: Path
) -> None:
    """A token budget that cuts the prompt, with another prompt in the same steps."""
    engine = Engine(model, tmp_path, chunk=chunk)

    assert engine.answer(_seq(2, 50), _seq(1, 90, sampling))[Key("s1", 0)] == alone
    engine.close()


@pytest.mark.parametrize("parking", [0, 4000])
def test_ids_are_the_same_after_preemption(
    parking: int, model: Path, sampling: Sampling, alone: list[int], tmp_path: Path
) -> None:
    """A pool too small for all: sequences lose their blocks, or park them, and go on."""
    engine = Engine(model, tmp_path, blocks=20, parking_tokens=parking)

    got = engine.answer(_seq(5, 80), _seq(1, 90, sampling), _seq(6, 70, SEEDED))

    assert engine.core.statistics()["preempted_total"] > 0
    assert got[Key("s1", 0)] == alone
    engine.close()


def test_ids_are_the_same_from_cached_blocks(model: Path, sampling: Sampling, alone: list[int], tmp_path: Path) -> None:
    """Blocks of prompt and answer of an earlier request, found again."""
    engine = Engine(model, tmp_path, cache_outputs=True)
    first = _seq(1, 90, sampling)
    assert engine.answer(first)[first.key] == alone
    before = engine.core.load()["cached_tokens"]

    again = replace_key(_seq(1, 90, sampling), "again")
    longer = Sequence(Key("longer", 0), _prompt(1, 90) + alone[:30], sampling)
    got = engine.answer(again, longer)

    assert engine.core.load()["cached_tokens"] >= before + 80 + 112
    assert got[again.key] == alone
    engine.close()


def replace_key(seq: Sequence, name: str) -> Sequence:
    """Return the sequence of another request."""
    return replace(seq, key=Key(name, seq.key.choice))


@pytest.mark.parametrize("known", [1, 17, 39])
def test_ids_are_the_same_after_a_loss(
    known: int, model: Path, sampling: Sampling, alone: list[int], tmp_path: Path
) -> None:
    """Another engine gets prompt and first ids, computes them as one prompt and goes on."""
    engine = Engine(model, tmp_path)

    got = engine.answer(_seq(7, 20), _seq(1, 90, sampling, outputs=alone[:known]))

    assert got[Key("s1", 0)] == alone
    engine.close()


def test_several_choices_are_those_of_each_alone(model: Path, tmp_path: Path) -> None:
    """Choices of one prompt differ from each other, and no choice depends on the others."""
    together = Engine(model, tmp_path)
    got = together.answer(*(_seq(1, 40, SEEDED, choice=c) for c in range(3)))
    together.close()

    assert len({tuple(ids) for ids in got.values()}) == 3
    for choice in range(3):
        engine = Engine(model, tmp_path)
        assert engine.answer(_seq(1, 40, SEEDED, choice=choice))[Key("s1", choice)] == got[Key("s1", choice)]
        engine.close()


class HalfRight:
    """Guesses what a run alone has said, and is wrong in places."""

    def __init__(self, answer: list[int], num_prompt: int) -> None:
        self.answer, self.num_prompt, self.rng = answer, num_prompt, random.Random(3)

    def propose(self, wishes: Listing[Wish]) -> list[list[int]]:
        out = []
        for wish in wishes:
            at = len(wish.context) - self.num_prompt
            right = self.answer[at : at + wish.length] if wish.key == Key("s1", 0) else [9] * wish.length
            out.append([t if self.rng.random() < 0.7 else 5 for t in right])
        return out

    def forget(self, key: Key) -> None: ...

    def close(self) -> None: ...


def test_ids_are_the_same_with_guesses(model: Path, sampling: Sampling, alone: list[int], tmp_path: Path) -> None:
    """Right guesses save steps and wrong ones leave no trace, beside a sequence whose guesses are all wrong."""
    plain = Engine(model, tmp_path)
    want = plain.answer(_seq(8, 30, sampling))
    plain.close()
    engine = Engine(model, tmp_path, drafter=HalfRight(alone, 90))
    speculator = engine.core._speculator
    assert speculator is not None

    def all_of_it(candidates: Listing[Candidate], base: object) -> dict[Key, int]:
        return {one.key: one.limit for one in candidates}

    speculator.gate.lengths = all_of_it  # type: ignore[method-assign]  # the gate has tests of its own

    got = engine.answer(_seq(1, 90, sampling), _seq(8, 30, sampling))

    counts = engine.core.statistics()
    assert 0 < counts["accepted_total"] < counts["drafted_total"]
    assert got[Key("s1", 0)] == alone and got[Key("s8", 0)] == want[Key("s8", 0)]
    engine.close()
