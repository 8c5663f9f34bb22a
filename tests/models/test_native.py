"""The decoder on compiled kernels: the numbers of torch, and the same bits for a row however it is computed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels import native
from models import packed, weights
from models.native import COARSE_BELOW, NativeTransformer
from models.quant import checked
from models.source import open_model
from models.transformer import Transformer
from tests.kernels.native_ops import bits, build_portable, need_native
from tests.models.gguf_models import write_pair
from tests.models.hf_files import tiny_folder
from tests.models.native_models import Shape, write_model

need_native()

Array = np.ndarray[Any, Any]
NUM_BLOCKS = 600
K_QUANTS = {
    "token_embd": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_K",
    "ffn_gate": "Q4_K", "ffn_up": "Q4_K", "ffn_down": "Q6_K",
}  # fmt: skip
BIG = Shape(hidden=256, ffn=512, head_dim=64, kinds=K_QUANTS, kind="Q4_K", layers=2)
SHAPES = {
    "plain": Shape(),
    "untied, odd vocabulary": Shape(vocab=301, tied=False),
    "tied, odd vocabulary": Shape(vocab=77, kind="Q8_0"),
    "rope factors": Shape(factors=True),
    "linear scaling": Shape(linear=4.0),
    "one kv head": Shape(kv_heads=1, heads=14),
    "every head its own": Shape(kv_heads=4),
    "wide heads": Shape(head_dim=256, heads=2, kv_heads=1),
    "heads of 80": Shape(head_dim=80, heads=4, kv_heads=2),
    "qkv bias": Shape(family="qwen2"),
    "qk norm": Shape(family="qwen3", head_dim=128),
    "Q4_0": Shape(kind="Q4_0"),
    "Q4_1 and Q8_0 embedding": Shape(kind="Q4_1", kinds={"token_embd": "Q8_0"}),
    "BF16": Shape(kind="BF16"),
    "F16": Shape(kind="F16", tied=False),
    "K-quants": BIG,
    "mixed in a layer": replace(BIG, kinds={"attn_q": "Q4_0", "attn_k": "F16", "ffn_up": "Q6_K", "attn_v": "Q8_0"}),
}


@dataclass
class Run:
    """As the transformers take it."""

    ids: list[int]
    start: int
    blocks: list[int]


@dataclass
class Seq:
    """A sequence on blocks of its own, and the logits after each of its tokens."""

    ids: list[int]
    blocks: list[int]
    done: int = 0
    logits: list[Array] = field(default_factory=list)

    def take(self, count: int) -> Run:
        """Return the run of the next tokens."""
        run = Run(self.ids[self.done : self.done + count], self.done, self.blocks)
        self.done += len(run.ids)
        return run


class Bench:
    """A decoder over a pool that is NaN wherever nothing was written."""

    def __init__(self, path: Path, threads: int = 1, coarse_below: float = COARSE_BELOW) -> None:
        with open_model(path) as source:
            self.config = source.config
            made = packed.load(self.config, functools.partial(checked, source), "any", None)
        self.model = NativeTransformer(self.config, made, threads, looks=50, coarse_below=coarse_below)
        self.pool = np.zeros((NUM_BLOCKS, self.model.block_nbytes), np.uint8)
        self.clear()

    def clear(self) -> None:
        """Forget all sequences."""
        self.pool[...] = 0xFF
        self.free = 0

    def seq(self, seed: int, length: int, room: int = 40) -> Seq:
        """Return a sequence on scattered blocks."""
        ids = np.random.default_rng(seed).integers(0, self.config.vocab_size, length).tolist()
        count = -(-(length + room) // 16)
        blocks = list(range(self.free, self.free + count))
        self.free += count
        assert self.free <= NUM_BLOCKS
        return Seq(ids, blocks[1::2] + blocks[::2])

    def logits(self, seqs: list[Seq], counts: list[int], wanted: list[int]) -> Array:
        """Compute one step; returns the logits of the last tokens of each, as many as are wanted."""
        runs = [seq.take(count) for seq, count in zip(seqs, counts, strict=True)]
        return self.model.forward(runs, self.pool.ctypes.data, wanted).copy()

    def step(self, seqs: list[Seq], counts: list[int]) -> None:
        """Compute one step; logits of all tokens are kept."""
        runs = [seq.take(count) for seq, count in zip(seqs, counts, strict=True)]
        logits = self.model.forward(runs, self.pool.ctypes.data, [len(run.ids) for run in runs]).copy()
        for seq, run in zip(seqs, runs, strict=True):
            seq.logits += list(logits[: len(run.ids)])
            logits = logits[len(run.ids) :]
        assert len(logits) == 0

    def kv(self, seq: Seq) -> Array:
        """Return the KV of the sequence's tokens alone, `[layers, kv_heads · dim, tokens]` twice, as uint16."""
        c = self.config
        blocks = self.pool[seq.blocks].view(np.uint16).reshape(len(seq.blocks), c.num_layers, 2, -1)
        keys = blocks[:, :, 0].reshape(-1, c.num_layers, c.num_kv_heads, c.head_dim // 2, 16, 2)
        values = blocks[:, :, 1].reshape(-1, c.num_layers, c.num_kv_heads, 8, c.head_dim, 2)
        lines = [
            keys.transpose(0, 4, 1, 2, 3, 5).reshape(-1, c.num_layers, c.kv_width),
            values.transpose(0, 3, 5, 1, 2, 4).reshape(-1, c.num_layers, c.kv_width),
        ]
        return np.stack(lines)[:, : seq.done]


@contextmanager
def bench_of(path: Path, threads: int = 1, coarse_below: float = COARSE_BELOW) -> Iterator[Bench]:
    """A bench whose threads end with it."""
    made = Bench(path, threads, coarse_below)
    try:
        yield made
    finally:
        made.model.close()


def torch_logits(path: Path, ids: list[int]) -> tuple[Array, list[int]]:
    """Return float32 logits after each of `ids` and of 31 greedy ids that follow, and the 32 greedy ids."""
    torch.set_num_threads(1)
    with open_model(path) as source, torch.inference_mode():
        model = Transformer(source.config, weights.load(source, torch.float32))
        c = source.config
        pool = torch.full((16 * c.num_layers * 2 * 16, c.kv_width), float("nan"))
        blocks = list(range(16))
        logits = [model.forward([Run(ids, 0, blocks)], pool, [len(ids)])]
        greedy = [int(logits[0][-1].argmax())]
        while len(greedy) < 32:
            run = Run(greedy[-1:], len(ids) + len(greedy) - 1, blocks)
            logits.append(model.forward([run], pool, [1]))
            greedy.append(int(logits[-1].argmax()))
        return torch.cat(logits).numpy(), greedy


def compare(path: Path) -> None:
    """Compare logits with the transformer in torch, float32 on the same weights, along torch's greedy ids."""
    # Keys, values, queries and attention weights are bfloat16: 2^-9 of what they are, through two layers. A head, a
    # position or a layer in the wrong place gives errors as large as the logits. Groups of 8 bits are one 254th of
    # their largest off, and weights drawn at random pass every error on.
    for coarse_below, most, mean in ((0.0, 0.15, 0.01), (COARSE_BELOW, 0.5, 0.04)):
        with bench_of(path, coarse_below=coarse_below) as bench:
            _compare(bench, path, most, mean)


def _compare(bench: Bench, path: Path, most: float, mean: float) -> None:
    seq = bench.seq(5, 40)
    want, greedy = torch_logits(path, seq.ids)

    bench.step([seq], [40])
    for token in greedy[:-1]:
        seq.ids.append(token)
        bench.step([seq], [1])

    got = np.stack(seq.logits)
    error = np.abs(got - want)
    assert error.max() < most * want.std(), error.max() / want.std()
    assert error.mean() < mean * want.std(), error.mean() / want.std()
    best, second = np.sort(want, axis=1)[:, :-3:-1].T
    clear = best - second > 2 * error.max(axis=1)
    assert np.array_equal(got.argmax(axis=1)[clear], want.argmax(axis=1)[clear])
    assert (got.argmax(axis=1)[39:] == greedy).sum() >= 30 - 20 * mean


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_most_likely_ids_are_those_of_torch(name: str, tmp_path: Path) -> None:
    """A prompt of 40 tokens and 31 decoded ones, on the weights that the file holds."""
    path = write_model(tmp_path / "m.gguf", SHAPES[name])

    compare(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_file_and_a_folder_of_the_same_values_give_the_numbers_of_torch(family: str, tmp_path: Path) -> None:
    """Eight kinds of weights in one file, and all of them as F32 in a folder with the other pairing."""
    write_pair(tmp_path, family)

    for path in (tmp_path / f"{family}-gguf.gguf", tmp_path / f"{family}-gguf"):
        compare(path)


# --- rows ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["plain", "K-quants", "BF16", "one kv head", "qk norm", "Q4_0"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose steps take different ways through the kernels."""
    return write_model(tmp_path_factory.mktemp("rows") / "m.gguf", SHAPES[request.param])


@pytest.fixture(scope="module")
def bench(model: Path) -> Iterator[Bench]:
    """One thread."""
    with bench_of(model) as made:
        yield made


@pytest.fixture
def alone(bench: Bench) -> tuple[Array, Array]:
    """Logits and KV of 150 tokens computed one by one, alone."""
    bench.clear()
    seq = bench.seq(1, 150)
    for _ in range(150):
        bench.step([seq], [1])
    assert np.isfinite(np.stack(seq.logits)).all()
    return np.stack(seq.logits), bench.kv(seq)


def same(bench: Bench, seq: Seq, alone: tuple[Array, Array]) -> bool:
    """Whether a sequence has the logits and the KV of the one computed alone, bit for bit."""
    logits, kv = alone
    got = np.stack(seq.logits)
    return np.array_equal(bits(got), bits(logits[: len(got)])) and np.array_equal(bench.kv(seq), kv[:, : seq.done])


@pytest.mark.parametrize("wanted", [0, 1, 3, 70])
def test_logits_that_nobody_asks_for_are_left_out_and_change_nothing(
    wanted: int, bench: Bench, alone: tuple[Array, Array]
) -> None:
    """The last layer computes what is asked for, of each sequence in the step; keys and values are all there."""
    logits, kv = alone
    bench.clear()
    other, seq = bench.seq(2, 60), bench.seq(1, 150)

    first = bench.logits([other, seq], [20, 80], [2, wanted])
    second = bench.logits([seq, other], [70, 1], [wanted, 0])
    last = bench.logits([other], [1], [1])

    assert np.array_equal(bits(first[2:]), bits(logits[80 - wanted : 80]))
    assert np.array_equal(bits(second), bits(logits[150 - wanted : 150]))
    assert np.array_equal(bench.kv(seq), kv[:, :150])
    bench.clear()
    again = bench.seq(2, 60)
    bench.step([again], [22])
    assert np.array_equal(bits(np.concatenate([first[:2], last])), bits(np.stack(again.logits)[[18, 19, 21]]))


@pytest.mark.parametrize("sizes", [[150], [2], [3], [7, 1], [16], [64, 1, 30], [149, 1], [33, 100, 17]])
def test_a_prompt_in_chunks_has_the_bits_of_decoded_tokens(
    sizes: list[int], bench: Bench, alone: tuple[Array, Array]
) -> None:
    """Logits of every token and every byte of KV, whatever the cut."""
    bench.clear()
    seq = bench.seq(1, 150)

    number = 0
    while seq.done < 150:
        bench.step([seq], [sizes[number % len(sizes)]])
        number += 1

    assert same(bench, seq, alone)


@pytest.mark.parametrize("others", [1, 2, 3, 7, 8, 31, 70])
def test_a_row_has_the_same_bits_beside_others(others: int, bench: Bench, alone: tuple[Array, Array]) -> None:
    """Some others decode, some compute prompts; the row stands in the middle of them."""
    bench.clear()
    seq = bench.seq(1, 150)
    crowd = [bench.seq(10 + i, 20 + 3 * i % 50, room=0) for i in range(others)]
    half = others // 2
    bench.step([seq], [120])

    for number in range(30):
        left = [s for s in crowd[:half] if s.done < len(s.ids)]
        right = [s for s in crowd[half:] if s.done < len(s.ids)]
        counts = [9 if number == 3 * i else 1 for i in range(len(right))]
        bench.step([*left, seq, *right], [*[1] * len(left), 1, *counts])

    assert same(bench, seq, alone)
    assert all(np.isfinite(np.stack(s.logits)).all() for s in crowd)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int, model: Path, bench: Bench, alone: tuple[Array, Array]) -> None:
    """Single rows, pairs, chunks and crowds on two and three threads."""
    with bench_of(model, threads) as several:
        assert several.model.threads == threads
        seq, other = several.seq(1, 150), several.seq(2, 150)
        several.step([seq], [100])
        for _ in range(10):
            several.step([seq], [1])
        for _ in range(10):
            several.step([other, seq], [1, 1])
        for _ in range(3):
            several.step([other, seq], [30, 10])

        assert seq.done == 150 and same(several, seq, alone)


def test_recomputed_tokens_have_the_bits_of_decoded_ones(bench: Bench, alone: tuple[Array, Array]) -> None:
    """After a loss the tokens are computed at once on other blocks, and the sequence goes on."""
    bench.clear()
    bench.seq(3, 100)
    seq = bench.seq(1, 150)
    bench.step([seq], [97])
    while seq.done < 150:
        bench.step([seq], [1])

    assert same(bench, seq, alone)


def test_a_shared_prefix_has_the_bits_of_a_computed_one(bench: Bench, alone: tuple[Array, Array]) -> None:
    """The first blocks come from another sequence that goes on differently."""
    bench.clear()
    donor, seq = bench.seq(1, 150), bench.seq(1, 150)
    donor.ids[64:] = donor.ids[:86]
    bench.step([donor], [150])
    seq.blocks[:4] = donor.blocks[:4]
    seq.done = 64
    seq.logits = list(alone[0][:64])
    bench.step([seq], [86])

    assert same(bench, seq, alone)


def test_one_changed_bit_is_seen(bench: Bench, alone: tuple[Array, Array]) -> None:
    """The comparison of these tests can fail."""
    bench.clear()
    seq = bench.seq(1, 150)
    bench.step([seq], [150])
    assert same(bench, seq, alone)

    seq.logits[70] = np.nextafter(seq.logits[70], np.float32(9))

    assert not same(bench, seq, alone)


# --- faults that stay where they are ---------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_poisoned_kv_fails_its_own_sequence_alone(threads: int, model: Path, bench: Bench) -> None:
    """A block that was never written makes NaN logits; neighbours in the same step keep every bit."""
    with bench_of(model, threads) as made:
        good = [made.seq(1, 60), made.seq(2, 60)]
        bad = made.seq(3, 60)
        bad.done = 40  # of tokens that nobody computed
        made.step([good[0], bad, good[1]], [30, 1, 50])
        made.step([good[0], bad, good[1]], [1, 10, 1])
        made.step([good[0], bad], [1, 1])

        assert np.isnan(np.stack(bad.logits)).all()
        bench.clear()
        for seed, seq in zip((1, 2), good, strict=True):
            want = bench.seq(seed, 60)
            bench.step([want], [seq.done])
            assert np.array_equal(bits(np.stack(seq.logits)), bits(np.stack(want.logits)))


def test_an_embedding_that_is_no_number_fails_its_own_sequence_alone(tmp_path: Path) -> None:
    """The token's row is NaN in memory after loading; a sequence without that token does not notice."""
    path = write_model(tmp_path / "m.gguf", Shape(kind="F32", tied=False))
    with bench_of(path) as made:
        weights = made.model._weights
        clean = made.seq(1, 20)
        made.step([clean], [20])
        writable = np.array(weights._data)
        start = weights._entries["embedding"]["at"]
        token = next(t for t in range(16, 264) if t not in clean.ids)
        tiles = writable[start : start + weights._entries["embedding"]["nbytes"]].view("<f4").reshape(-1, 64, 16)
        tiles[token // 16, 5, token % 16] = np.nan
        changed = NativeTransformer(made.config, packed.PackedWeights(memoryview(writable), weights._entries))
        try:
            made.model, old = changed, made.model
            made.clear()
            again, bad = made.seq(1, 20), made.seq(1, 20)
            bad.ids[7] = token
            made.step([bad, again], [20, 20])
        finally:
            made.model = old
            changed.close()

    assert np.isnan(np.stack(bad.logits)[7:]).all()
    assert np.array_equal(bits(np.stack(again.logits)), bits(np.stack(clean.logits)))


# --- another build ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_portable_code_gives_the_same_numbers_and_its_rows_are_as_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same source without vector instructions: logits within rounding, ids of torch, and every row invariant."""
    library = build_portable(tmp_path)
    for name in ("K-quants", "Q4_0", "qk norm"):
        path = write_model(tmp_path / "m.gguf", SHAPES[name])
        with bench_of(path) as fast:
            seq = fast.seq(1, 60)
            fast.step([seq], [60])
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: library)
            with bench_of(path) as made, bench_of(path, threads=2) as two:
                assert made.model.instruction_set == "portable"
                compare(path)
                one_by_one = made.seq(1, 60)
                for _ in range(60):
                    made.step([one_by_one], [1])
                chunked, other = two.seq(1, 60), two.seq(2, 60)
                two.step([other, chunked], [13, 37])
                for _ in range(23):
                    two.step([chunked, other], [1, 2])
        want = np.stack(one_by_one.logits)
        assert np.array_equal(bits(np.stack(chunked.logits)), bits(want))
        assert np.abs(np.stack(seq.logits) - want).max() < 0.15 * want.std()


# --- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (Shape(hidden=48), "hidden width 48"),
        (Shape(ffn=80), "feed-forward width 80"),
        (Shape(heads=3, kv_heads=1), "attention width 48"),
        (Shape(head_dim=8), "heads of 8 elements"),
        (Shape(head_dim=24), "heads of 24 elements"),
        (Shape(head_dim=272, heads=2), "heads of 272 elements"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_that_does_not_fit_is_named(shape: Shape, named: str, tmp_path: Path) -> None:
    """Before anything is packed."""
    path = write_model(tmp_path / "m.gguf", shape)

    with pytest.raises(packed.Unpackable, match=named):
        Bench(path)


def test_a_folder_whose_heads_are_too_small_does_not_fit(tmp_path: Path) -> None:
    """Heads of 8 elements."""
    with pytest.raises(packed.Unpackable, match="heads of 8 elements"):
        Bench(tiny_folder(tmp_path / "m"))


def test_too_many_layers_do_not_fit(tmp_path: Path) -> None:
    """The kernels count their work in a table of 256 layers."""
    with open_model(write_model(tmp_path / "m.gguf", Shape())) as source:
        config = source.config

    packed.check_sizes(replace(config, num_layers=256))
    with pytest.raises(packed.Unpackable, match="257 layers"):
        packed.check_sizes(replace(config, num_layers=257))
