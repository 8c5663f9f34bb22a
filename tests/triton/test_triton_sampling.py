"""Sampling in Triton: the ids that the plain version draws, and the same draw in any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from triton_cases import DEVICE

from kernels.sampling import BAD_IDS, NOT_NUMBERS, NOTHING_LEFT, Request, reference
from kernels.sampling import triton as fast

Floats = npt.NDArray[np.float32]


def logits_of(kind: str, vocab: int, rows: int = 3) -> Floats:
    """Return seeded logits `[rows, vocab]`: `smooth`, with many `ties`, all `equal`, or with `holes` of -inf."""
    out = np.random.default_rng(vocab).standard_normal((rows, vocab)) * 3
    match kind:
        case "ties":
            out = np.round(out)
        case "equal":
            out[:] = -0.0
        case "holes":
            out[:, 1::2] = -np.inf
    return out.astype(np.float32)


def requests_of(vocab: int, count: int, seed: int) -> list[Request]:
    """Return seeded requests with parameters of all sorts, the ends of their ranges included."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        fields: dict[str, Any] = {
            "temperature": float(rng.choice([0.0, 0.3, 1.0, 1.0, 2.0])),
            "top_k": int(rng.choice([-1, -1, 1, 2, 40, vocab, vocab + 5])),
            "top_p": float(rng.choice([1.0, 0.95, 0.5, 0.1, 1e-9])),
            "min_p": float(rng.choice([0.0, 0.0, 0.05, 1.0])),
            "point": float(rng.choice([0.0, rng.random(), rng.random(), 1 - 2.0**-53])),
        }
        if rng.random() < 0.5:
            fields["presence_penalty"], fields["frequency_penalty"] = rng.uniform(-2, 2, 2).tolist()
            fields["repetition_penalty"] = float(rng.choice([1.0, 1.3, 0.7]))
            fields["prompt_ids"] = rng.integers(0, vocab, 50).tolist()
            fields["output_ids"] = rng.integers(0, min(30, vocab), 60).tolist()
        if rng.random() < 0.3:
            fields["logit_bias"] = {int(i): float(rng.uniform(-100, 100)) for i in rng.integers(0, vocab, 5)}
        if rng.random() < 0.2:
            fields["allowed_ids"] = rng.integers(0, vocab, 9).tolist()
        if rng.random() < 0.2:
            fields["forbidden_ids"] = rng.integers(0, vocab, 3).tolist()
        made.append(Request(**fields))
    return made


@pytest.mark.parametrize("kind", ["smooth", "ties", "equal", "holes"])
@pytest.mark.parametrize("vocab", [1, 2, 17, 1500])
def test_ids_and_logprobs_are_those_of_the_plain_version(vocab: int, kind: str) -> None:
    """Penalties, bias, masks and filters in any mixture; ties at the edge of a filter keep the lower ids."""
    logits, requests = logits_of(kind, vocab), requests_of(vocab, 10, seed=vocab)
    rows = [i % len(logits) for i in range(len(requests))]
    before = logits.copy()

    got = fast.sample(torch.from_numpy(logits).to(DEVICE), requests, rows)

    want = reference.sample(logits, requests, rows)
    assert [(c.id, c.error) for c in got] == [(c.id, c.error) for c in want]
    assert [c.logprob for c in got] == pytest.approx([c.logprob for c in want], abs=1e-6)
    assert np.array_equal(logits, before)


def test_filters_cut_where_they_say() -> None:
    """Every point of a grid, for filters that end among equals."""
    logits = np.array([[2.0, 1.0, 1.0, 1.0, 0.0, 2.0, -1.0, 1.0]], np.float32)
    points = [i / 16 for i in range(16)]

    for fields in (
        {"top_k": 4},
        {"top_p": 0.75},
        {"top_k": 5, "top_p": 0.9},
        {"min_p": 0.3},
        {"top_k": 3, "min_p": 0.4},
    ):
        requests = [Request(point=point, **fields) for point in points]
        got = fast.sample(torch.from_numpy(logits).to(DEVICE), requests, [0] * len(points))
        want = reference.sample(logits, requests, [0] * len(points))
        assert [c.id for c in got] == [c.id for c in want], fields


def test_bad_rows_and_bad_ids_fail_alone() -> None:
    """Each error is its own request's; all others draw as before."""
    logits = logits_of("smooth", 20, rows=5)
    good = Request(point=0.4)
    alone = fast.sample(torch.from_numpy(logits[:1]).to(DEVICE), [good])[0]
    logits[1:] = logits[0]
    logits[1, 3], logits[2, 0], logits[3] = np.nan, np.inf, -np.inf
    requests = [good] * 5 + [Request(allowed_ids=[4], forbidden_ids=[4]), Request(logit_bias={20: 1.0}), good]

    got = fast.sample(torch.from_numpy(logits).to(DEVICE), requests, [0, 1, 2, 3, 4, 0, 0, 4])

    errors = [None, NOT_NUMBERS, NOT_NUMBERS, NOT_NUMBERS, None, NOTHING_LEFT, BAD_IDS, None]
    assert [c.error for c in got] == errors
    assert all(c == alone for c in got if c.error is None)
    assert all(c.id == -1 for c in got if c.error)


def test_a_draw_is_the_same_alone_and_among_others() -> None:
    """Id and logprob, bit for bit."""
    logits = torch.from_numpy(logits_of("smooth", 1500)).to(DEVICE)
    requests = requests_of(1500, 6, seed=9)
    rows = [0, 1, 2, 0, 1, 2]

    together = fast.sample(logits, requests, rows)

    for request, row, among in zip(requests, rows, together, strict=True):
        assert fast.sample(logits[row : row + 1], [request]) == [among]
        assert fast.sample(logits, [request], [row]) == [among]


def test_what_a_kernel_would_misread_is_refused() -> None:
    """Other types, rows that there are not; and nothing to draw is fine."""
    logits = torch.zeros(2, 8, device=DEVICE)

    with pytest.raises(ValueError, match="float32 matrix"):
        fast.sample(logits.double(), [Request()])
    with pytest.raises(IndexError, match="rows"):
        fast.sample(logits, [Request()], [2])
    with pytest.raises(IndexError, match="rows"):
        fast.sample(logits, [Request()] * 3)
    assert fast.sample(logits, []) == []
