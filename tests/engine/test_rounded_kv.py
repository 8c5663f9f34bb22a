"""Engines that round keys and values: one function of the ids, whoever computes, recomputes or loads a block."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import Time, run

from engine.core import EngineCore
from engine.native_runner import NativeRunner
from engine.real_runner import load_runner
from engine.scheduler import Scheduler
from engine.sequence import Key, Sequence
from engine.speculation.lookup import PromptLookup
from engine.torch_runner import TorchRunner
from kernels import native
from kvstore.block import root_hash
from kvstore.formats import stored_form
from kvstore.handoff import copy_blocks
from kvstore.pool import BlockPool
from schemas.record import Sampling
from tests.models.native_models import Shape, write_model

if not native.available():
    pytest.skip(native.why_not(), allow_module_level=True)

SAMPLING = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True, frequency_penalty=0.5)
FORMS = ("int8", "fp8")
MAKERS = ("native", "torch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 32 elements."""
    shape = Shape(hidden=128, heads=6, kv_heads=2, head_dim=32, layers=3, tied=False, kind="Q4_1")
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape)


class Engine:
    """A core over a runner that rounds, and a pool of NaN."""

    def __init__(self, model: Path, directory: Path, form: str, maker: str = "native", **options: object) -> None:
        chunk, blocks = int(options.pop("chunk", 128)), int(options.pop("blocks", 64))  # type: ignore[call-overload]
        self.runner = load_runner(model, engine=maker, dtype="auto", threads=1, cache=None, kv_format=form)
        number = len(list(directory.iterdir()))
        pool = BlockPool.create(
            directory, f"p{number}", blocks, self.runner.block_nbytes, self.runner.layout, "00", "here"
        )
        pool.view()[:] = b"\xff" * pool.view().nbytes
        clock = Time()
        self.core = EngineCore(
            self.runner, pool, Scheduler(16, max(chunk, 48), 48, chunk), now=clock.now, wall=clock.now,
            root=lambda salt: root_hash("test", self.runner.fingerprint, self.runner.layout, salt), **options,
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


Make = Callable[..., Engine]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes engines that are closed at the end."""
    made: list[Engine] = []

    def engine(form: str, maker: str = "native", **options: object) -> Engine:
        made.append(Engine(model, tmp_path, form, maker, **options))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def prompt(seed: int, length: int) -> list[int]:
    """Return ids."""
    rng = random.Random(seed)
    return [rng.randrange(3, 264) for _ in range(length)]


def seq(seed: int, length: int, **fields: object) -> Sequence:
    """Return a sequence of its own prompt."""
    return Sequence(Key(f"s{seed}", 0), prompt(seed, length), SAMPLING, **fields)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("maker", MAKERS)
def test_ids_do_not_depend_on_chunks_neighbours_or_losses(form: str, maker: str, make: Make) -> None:
    """Alone; cut into chunks beside others; guessed ahead; recomputed after k ids as if it had failed over."""
    alone = make(form, maker).answer(seq(1, 90))[Key("s1", 0)]
    assert len(alone) == 40 and len(set(alone)) > 5

    for chunk in (16, 33):
        crowd = [seq(10 + i, 5 + 13 * i) for i in range(6)]
        got = make(form, maker, chunk=chunk, blocks=200).answer(*crowd, seq(1, 90))
        assert got[Key("s1", 0)] == alone
    for known in (1, 17, 39):
        assert make(form, maker).answer(seq(1, 90, outputs=alone[:known]))[Key("s1", 0)] == alone
    assert make(form, maker, drafter=PromptLookup()).answer(seq(1, 90))[Key("s1", 0)] == alone


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_packed_prefix_gives_the_text_of_one_that_was_computed(
    form: str, maker: str, make: Make, tmp_path: Path
) -> None:
    """Blocks go packed from one engine to another: the same bytes as computed there, so the same ids."""
    first, second, third = make(form, maker), make(form, maker), make(form, maker)
    alone = first.answer(seq(1, 90))[Key("s1", 0)]
    candidates = first.core.stored_candidates()
    assert len(candidates) == 5
    pool = first.core.pool
    layout, nbytes = stored_form(pool.layout, pool.block_nbytes)
    assert nbytes < 0.52 * pool.block_nbytes
    store = BlockPool.create(tmp_path, "store", 5, nbytes, layout, "01", "here")
    refs = store.refs(store.allocate(5))
    copy_blocks(pool, pool.refs([c.block for c in candidates]), store, refs, should_stop=lambda: False)

    again = seq(1, 90)
    second.core.add(again)
    assert second.core.want_load(again.key) == [c.hash for c in candidates]
    blocks = second.core.begin_load(again.key, 5)
    assert blocks is not None
    copy_blocks(store, refs, second.core.pool, second.core.pool.refs(blocks), should_stop=lambda: False)
    assert second.core.load_prefix(again.key, blocks, [c.hash for c in candidates]) == 80
    loaded = run(second.core)[again.key]

    assert loaded == alone and second.core.load()["cached_tokens"] == 80
    third.answer(seq(1, 90))
    size = pool.block_nbytes
    computed = [third.core.pool.block_of(c.hash) for c in candidates]
    for mine, theirs in zip(blocks, computed, strict=True):
        assert theirs is not None
        bytes_ = [p.view()[b * size : (b + 1) * size] for p, b in ((second.core.pool, mine), (third.core.pool, theirs))]
        assert bytes_[0] == bytes_[1]
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS)
def test_formats_differ_in_numbers_names_and_hashes(maker: str, make: Make) -> None:
    """Another format is another chain: its blocks are never found; and rounding does change what is computed."""
    engines = {form: make(form, maker) for form in ("raw", *FORMS)}

    assert (
        len({e.runner.layout for e in engines.values()}) == len({e.runner.fingerprint for e in engines.values()}) == 3
    )
    chains, blocks = set(), set()
    for engine in engines.values():
        engine.answer(seq(1, 90))
        candidates = engine.core.stored_candidates()
        chains.add(candidates[0].hash)
        size = engine.core.pool.block_nbytes
        blocks.add(bytes(engine.core.pool.view()[candidates[0].block * size : (candidates[0].block + 1) * size]))
    assert len(chains) == 3 and len(blocks) == 3


def test_raw_is_the_default_and_keeps_its_name(model: Path) -> None:
    """Nothing that was stored before the setting existed is lost."""
    plain, same = NativeRunner(model), NativeRunner(model, kv_format="raw")
    assert (plain.layout, plain.fingerprint) == (same.layout, same.fingerprint)
    assert plain.layout == "native-1,3,16,2,32,bfloat16" and plain.fingerprint.endswith(plain._model.instruction_set)
    plain.close()
    same.close()
    assert TorchRunner(model).layout == "block,3,2,16,2,32,bfloat16"


def test_heads_that_cannot_be_rounded_are_refused(tmp_path: Path) -> None:
    """By the runner, when it is loaded, with a reason."""
    odd = write_model(tmp_path / "odd.gguf", Shape(hidden=80, heads=2, kv_heads=2, head_dim=40, ffn=96))
    with pytest.raises(ValueError, match="heads of 40 elements"):
        TorchRunner(odd, kv_format="int8")
