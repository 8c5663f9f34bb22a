"""The default model: the same bits for a row however it is computed. `scripts/check_rows.py` runs more of this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from models.exactness import Exactness
from scripts.check_rows import Bench, Seq, baseline, beside, cached, chunked, recomputed
from tests.models.files import default_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def bench() -> Bench:
    """A bf16 runner with a pool of NaN."""
    return Bench(default_model(), "bfloat16", 2, num_output=24)


@pytest.fixture(scope="module")
def alone(bench: Bench) -> tuple[Seq, bytes]:
    """Ids, logits and KV of the sequence computed alone, its prompt at once."""
    return baseline(bench)


@pytest.fixture
def careless(bench: Bench) -> Iterator[Bench]:
    """The same runner with the call shapes that come naturally."""
    bench.runner._model.exact = Exactness(dict.fromkeys(bench.exact.min_rows, 1), 1)
    yield bench
    bench.runner._model.exact = bench.exact


@pytest.mark.parametrize("others", [1, 7, 31])
def test_a_row_has_the_same_bits_beside_others(others: int, bench: Bench, alone: tuple[Seq, bytes]) -> None:
    """Ids, logits and KV of 24 outputs, while one of the others computes its prompt in the same steps."""
    assert beside(bench, others, *alone) == 0


@pytest.mark.parametrize("sizes", [[100], [37, 1, 64], [33, 2, 3]])
def test_the_cut_into_chunks_leaves_no_trace(sizes: list[int], bench: Bench, alone: tuple[Seq, bytes]) -> None:
    """Chunks of any size, single tokens among them."""
    assert chunked(bench, sizes, *alone) == 0


@pytest.mark.parametrize("lost_at", [1, 21])
def test_recomputed_outputs_have_the_bits_of_decoded_ones(lost_at: int, bench: Bench, alone: tuple[Seq, bytes]) -> None:
    """After a loss, prompt and outputs are computed at once or in chunks, and decoding goes on."""
    assert recomputed(bench, lost_at, [512], *alone) == 0
    assert recomputed(bench, lost_at, [90, 7, 1], *alone) == 0


@pytest.mark.parametrize("num_cached", [16, 144, 288])
def test_a_cached_prefix_gives_the_bits_of_a_computed_one(
    num_cached: int, bench: Bench, alone: tuple[Seq, bytes]
) -> None:
    """The blocks come from another sequence, cut inside and at the border of a tile."""
    assert cached(bench, num_cached, *alone) == 0


def test_the_comparison_can_fail(careless: Bench, alone: tuple[Seq, bytes]) -> None:
    """Without canonical shapes the same check finds differences, where this machine's libraries need them at all."""
    exact = careless.exact
    if exact.repeat == 1 and set(exact.min_rows.values()) == {1} and not exact.max_rows:
        pytest.skip("every call shape is exact on this machine")

    assert recomputed(careless, 20, [512], *alone) > 0


def test_one_changed_bit_is_seen(bench: Bench, alone: tuple[Seq, bytes]) -> None:
    """The comparison counts a single bit of the KV, and a single bit of one logit."""
    want, kv = alone
    changed = bytearray(kv)
    changed[len(kv) // 3] ^= 1
    assert chunked(bench, [100], want, bytes(changed)) == 1

    logits = [x.clone() for x in want.logits]
    logits[3].view(torch.int32)[17] ^= 1
    assert chunked(bench, [100], replace(want, logits=logits), kv) == 1
