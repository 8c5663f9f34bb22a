"""The real runner on a tiny model: its contract, and faults that stay in their row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.plan import BatchPlan, Row
from engine.sequence import Key
from engine.torch_runner import TorchRunner
from models.errors import ModelFileError
from schemas.record import Sampling
from tests.models.files import tiny_model

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model file."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def runner(model: Path) -> TorchRunner:
    """A runner with a pool of 16 blocks full of NaN."""
    made = TorchRunner(model, "float32")
    made.bind(memoryview(bytearray(b"\xff" * 16 * made.block_nbytes)), 16)
    return made


def _row(
    ids: list[int], start: int = 0, blocks: list[int] | None = None, *, key: str = "a", sampling: Sampling = GREEDY,
    sample: bool = True, choices: tuple[int, ...] = (0,), index: int = 0,
) -> Row:  # fmt: skip
    blocks = blocks if blocks is not None else [3, 1]
    return Row(Key(key, 0), ids, start, len(ids), blocks, sample, index, choices, sampling, [])


def test_it_tells_what_the_file_says(runner: TorchRunner) -> None:
    """Sizes, layout, end tokens; a block is 2 layers × key and value × 16 tokens × 16 floats."""
    assert runner.block_nbytes == 2 * 2 * 16 * 16 * 4
    assert runner.vocab_size == 264 and runner.max_context == 256
    assert runner.eos_ids == {2}
    assert runner.layout == "block,2,2,16,2,8,float32"


def test_another_type_has_another_layout_and_fingerprint(model: Path, runner: TorchRunner) -> None:
    """Blocks of both can never be mixed up."""
    other = TorchRunner(model)

    assert other.layout != runner.layout and other.fingerprint != runner.fingerprint
    assert other.block_nbytes * 2 == runner.block_nbytes


def test_chunks_and_single_steps_give_the_same_answer(runner: TorchRunner) -> None:
    """20 ids at once, in chunks, and one by one, each on other blocks."""
    ids = [(7 * i) % 250 for i in range(20)]

    at_once = runner.execute(BatchPlan(0, [_row(ids)]))[0]
    assert runner.execute(BatchPlan(1, [_row(ids[:13], 0, [5, 6], sample=False)])) == []
    in_chunks = runner.execute(BatchPlan(2, [_row(ids[13:], 13, [5, 6])]))[0]
    for at in range(20):
        one_by_one = runner.execute(BatchPlan(3 + at, [_row(ids[at : at + 1], at, [9, 8])]))[0]

    assert at_once.error is None
    assert in_chunks.id == one_by_one.id == at_once.id
    assert in_chunks.logprob == pytest.approx(at_once.logprob, abs=1e-4)
    assert one_by_one.logprob == pytest.approx(at_once.logprob, abs=1e-4)


def test_each_choice_of_a_row_gets_its_own_draw_in_the_order_of_rows(runner: TorchRunner) -> None:
    """Rows without `sample` answer nothing; draws of a choice repeat."""
    flat = Sampling(temperature=50.0, seed=5)
    rows = [
        _row([1, 2, 3], blocks=[0], key="a", sample=False),
        _row([4, 5], blocks=[1], key="b", sampling=flat, choices=(0, 1, 2), index=3),
        _row([6], blocks=[2], key="c", choices=(4,)),
    ]

    got = runner.execute(BatchPlan(0, rows))
    again = runner.execute(BatchPlan(1, rows))

    assert [(s.key.request_id, s.choice, s.index) for s in got] == [("b", 0, 3), ("b", 1, 3), ("b", 2, 3), ("c", 4, 0)]
    assert len({s.id for s in got[:3]}) > 1
    assert got == again


def test_a_row_that_goes_wrong_leaves_its_neighbours_alone(model: Path, runner: TorchRunner) -> None:
    """NaN in one sequence's prefix is an error of that row; the other's answer keeps every bit."""
    good = _row([1, 2, 3], blocks=[0], key="good")
    bad = _row([4], 1, blocks=[7], key="bad")  # position 0 of its block is NaN: never written
    alone = runner.execute(BatchPlan(0, [good]))[0]

    together = runner.execute(BatchPlan(1, [bad, good]))

    assert together[0].error is not None
    assert together[1] == alone


def test_an_empty_plan_is_an_empty_answer(runner: TorchRunner) -> None:
    """Nothing to do is not an error."""
    assert runner.execute(BatchPlan(0, [])) == []


def test_warm_up_leaves_the_pool_as_it_is(model: Path) -> None:
    """It works before and after `bind`, on scratch memory."""
    runner = TorchRunner(model)
    runner.warm_up()
    pool = bytearray(b"\xab" * 4 * runner.block_nbytes)
    runner.bind(memoryview(pool), 4)

    runner.warm_up()

    assert pool == b"\xab" * len(pool)
    runner.execute(BatchPlan(0, [_row([1], blocks=[2])]))
    assert pool != b"\xab" * len(pool)


def test_warm_up_refuses_a_model_that_computes_no_numbers(model: Path) -> None:
    """Weights of NaN are found before the first request."""
    runner = TorchRunner(model)
    runner._model.weights.norm.fill_(float("nan"))

    with pytest.raises(ModelFileError, match="first step"):
        runner.warm_up()


def test_close_lets_go_of_the_pool(model: Path) -> None:
    """The owner can close its map afterwards."""
    runner = TorchRunner(model)
    pool = bytearray(2 * runner.block_nbytes)
    view = memoryview(pool)
    runner.bind(view, 2)

    runner.close()
    view.release()

    pool.extend(b"x")  # raises BufferError while anything holds a view


def test_bad_arguments_are_refused(model: Path, tmp_path: Path) -> None:
    """An unknown type, a small or read-only buffer, a file that is no model."""
    runner = TorchRunner(model)

    with pytest.raises(ValueError, match="float16"):
        TorchRunner(model, "float16")
    with pytest.raises(ValueError, match="writable"):
        runner.bind(memoryview(bytearray(10)), 1)
    with pytest.raises(ValueError, match="writable"):
        runner.bind(memoryview(bytes(runner.block_nbytes)), 1)
    (tmp_path / "x.gguf").write_bytes(b"nothing here that could be a model")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        TorchRunner(tmp_path / "x.gguf")


def test_a_tensor_in_an_inference_step_needs_no_gradient(runner: TorchRunner) -> None:
    """Logits come out of inference mode, one row per sampling row."""
    logits = runner.logits([_row([1, 2]), _row([3], blocks=[5], key="b", sample=False)])

    assert logits.shape == (1, 264) and logits.dtype == torch.float32 and logits.is_inference()
