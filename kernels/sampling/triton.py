"""Sampling, one program per draw, without a sort.

Penalties, bias and masks touch few ids of a row: the host lists each once, and one launch rewrites a copy of the row.
Top-k and top-p end at some logit, of whose equals the lowest ids stay; floats in order are integers in order, so that
logit is found bit by bit, by counting (or weighing) what is at least a candidate: 32 passes over the row. Sums are
float64, tile after tile, so a draw has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kernels.launch import OPTIONS, check, has_rows
from kernels.sampling import BAD_IDS, GREEDY_BELOW, LARGEST, NOT_NUMBERS, NOTHING_LEFT, Choice, Request

_WIDTH = 1024
_SEEN, _BIASED, _FORBIDDEN = 1, 2, 4
_ERRORS = (None, NOT_NUMBERS, NOTHING_LEFT)


@triton.jit
def _fill(logits, rows, only, edited, vocab, row_stride, WIDTH: tl.constexpr):
    """Start an edited row as a copy, or as nothing where only some ids are allowed."""
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < vocab
    value = tl.load(logits + tl.load(rows + at) * row_stride + column, mask=inside, other=0.0)
    value = tl.where(tl.load(only + at) != 0, float("-inf"), value)
    tl.store(edited + at * vocab + column, value, mask=inside)


@triton.jit
def _bounded(value, LARGEST: tl.constexpr):
    near = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    return tl.where(value == float("-inf"), value, near).to(tl.float32)


@triton.jit
def _edit(
    logits, rows, begins, ids, flags, counts, biases, penalties, edited, vocab, row_stride,
    SEEN: tl.constexpr, BIASED: tl.constexpr, FORBIDDEN: tl.constexpr, LARGEST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rewrite the listed ids of one row, each from the row as it came."""
    at = tl.program_id(0).to(tl.int64)
    repetition = tl.load(penalties + at * 3)
    frequency = tl.load(penalties + at * 3 + 1)
    presence = tl.load(penalties + at * 3 + 2)
    end = tl.load(begins + at + 1)
    for first in range(tl.load(begins + at), end, WIDTH):
        place = first + tl.arange(0, WIDTH)
        inside = place < end
        token = tl.load(ids + place, mask=inside, other=0)
        flag = tl.load(flags + place, mask=inside, other=0)
        count = tl.load(counts + place, mask=inside, other=0)
        value = tl.load(logits + tl.load(rows + at) * row_stride + token, mask=inside, other=0.0)
        wide = value.to(tl.float64)
        wide = tl.where(wide > 0.0, wide / repetition, wide * repetition)
        wide = tl.where(count > 0, wide - frequency * count.to(tl.float64) - presence, wide)
        value = tl.where((flag & SEEN) != 0, _bounded(wide, LARGEST), value)
        bias = tl.load(biases + place, mask=inside, other=0.0)
        value = tl.where((flag & BIASED) != 0, _bounded(value.to(tl.float64) + bias, LARGEST), value)
        value = tl.where((flag & FORBIDDEN) != 0, float("-inf"), value)
        tl.store(edited + at * vocab + token, value, mask=inside)


@triton.jit
def _key(value):
    """Return integers from 0 to 2^32 in the order of floats; both zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _value(key):
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count_from(row, vocab, least, WIDTH: tl.constexpr):
    """Return how many ids have a key of at least `least`."""
    count = tl.zeros([WIDTH], tl.int32)
    for first in range(0, vocab, WIDTH):
        column = first + tl.arange(0, WIDTH)
        key = _key(tl.load(row + column, mask=column < vocab, other=float("-inf")))
        count += ((key >= least) & (column < vocab)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _weigh_from(row, vocab, least, top, temperature, WIDTH: tl.constexpr):
    """Return the weight of the ids with a key of at least `least`."""
    weight = tl.zeros([WIDTH], tl.float64)
    for first in range(0, vocab, WIDTH):
        column = first + tl.arange(0, WIDTH)
        value = tl.load(row + column, mask=column < vocab, other=float("-inf"))
        each = tl.exp((value.to(tl.float64) - top) / temperature)
        weight += tl.where(_key(value) >= least, each, 0.0)
    return tl.sum(weight, 0)


@triton.jit
def _nucleus(row, vocab, top, temperature, top_k, top_p, WIDTH: tl.constexpr):
    """Return the least key that top-k and top-p keep, and how many of the ids that have it."""
    end = tl.full([], 0, tl.int64)
    ties = vocab.to(tl.int64)
    if (top_k > 0) & (top_k < vocab):
        for bit in range(32):
            candidate = end | (tl.full([], 1, tl.int64) << (31 - bit))
            end = tl.where(_count_from(row, vocab, candidate, WIDTH) >= top_k, candidate, end)
        ties = top_k - _count_from(row, vocab, end + 1, WIDTH)
    if top_p < 1.0:
        # Of the ids at the end of top-k only some are left: they are weighed apart from those above.
        last = tl.exp((_value(end).to(tl.float64) - top) / temperature) * ties.to(tl.float64)
        last = tl.where(ties < vocab, last, 0.0)
        above = tl.where(ties < vocab, end + 1, 0)
        wanted = top_p * (_weigh_from(row, vocab, above, top, temperature, WIDTH) + last)
        found = tl.full([], 0, tl.int64)
        for bit in range(32):
            candidate = found | (tl.full([], 1, tl.int64) << (31 - bit))
            weight = _weigh_from(row, vocab, tl.maximum(candidate, above), top, temperature, WIDTH)
            weight += tl.where(candidate <= end, last, 0.0)
            found = tl.where(weight >= wanted, candidate, found)
        heavier = _weigh_from(row, vocab, tl.maximum(found + 1, above), top, temperature, WIDTH)
        heavier += tl.where(found + 1 <= end, last, 0.0)
        one = tl.exp((_value(found).to(tl.float64) - top) / temperature)
        # Ids with the last key stay while the heavier ones, and equals before them, weigh less than what is wanted.
        room = tl.ceil((wanted - heavier) / tl.where(one > 0.0, one, 1.0))
        room = tl.maximum(tl.minimum(room, vocab.to(tl.float64)), 1.0).to(tl.int64)
        ties = tl.where(found == end, tl.minimum(ties, room), room)
        end = found
    return end, ties


@triton.jit
def _draw(row, vocab, top, temperature, end, ties, min_p, point, WIDTH: tl.constexpr):
    """Return the first id, in order of ids, at which the weights left exceed `point` times their total."""
    total = tl.full([], 0.0, tl.float64)
    goal = tl.full([], 0.0, tl.float64)
    token = tl.full([], -1, tl.int64)
    last = tl.full([], 0, tl.int64)
    for again in range(2):  # the total first, then the same sums once more
        goal = point * total
        total = tl.full([], 0.0, tl.float64)
        equals = tl.full([], 0, tl.int64)
        for first in range(0, vocab, WIDTH):
            column = first + tl.arange(0, WIDTH)
            inside = column < vocab
            value = tl.load(row + column, mask=inside, other=float("-inf"))
            key = _key(value)
            same = ((key == end) & inside).to(tl.int64)
            kept = (key > end) | ((same != 0) & (equals + tl.cumsum(same, 0) <= ties))
            weight = tl.exp((value.to(tl.float64) - top) / temperature)
            weight = tl.where(kept & inside & (weight >= min_p), weight, 0.0)
            running = total + tl.cumsum(weight, 0)
            beyond = tl.where((running > goal) & (weight > 0.0), column, 2147483647)
            reached = tl.min(beyond, 0).to(tl.int64)
            token = tl.where((again == 1) & (token < 0) & (reached < 2147483647), reached, token)
            last = tl.maximum(last, tl.max(tl.where(weight > 0.0, column, 0), 0).to(tl.int64))
            total = tl.max(running, 0)
            equals += tl.sum(same, 0)
    return tl.where(token >= 0, token, last)


@triton.jit
def _choose(
    logits, rows, edited, slots, numbers, top_ks, ids, logprobs, errors, vocab, row_stride,
    GREEDY_BELOW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    came = logits + tl.load(rows + at) * row_stride
    slot = tl.load(slots + at)
    row = came
    if slot >= 0:
        row = edited + slot * vocab
    peak = tl.full([WIDTH], float("-inf"), tl.float32)  # of the row as it came
    wrong = tl.zeros([WIDTH], tl.int32)
    best = tl.full([WIDTH], float("-inf"), tl.float32)  # of the row that is drawn from, and its first place
    place = tl.full([WIDTH], 2147483647, tl.int32)
    for first in range(0, vocab, WIDTH):
        column = first + tl.arange(0, WIDTH)
        raw = tl.load(came + column, mask=column < vocab, other=float("-inf"))
        value = tl.load(row + column, mask=column < vocab, other=float("-inf"))
        wrong += ((raw != raw) | (raw == float("inf"))).to(tl.int32)
        peak = tl.maximum(peak, tl.where(raw != raw, float("-inf"), raw))
        place = tl.where(value > best, column, place)
        best = tl.where(value > best, value, best)
    raw_top, top = tl.max(peak, 0), tl.max(best, 0)
    error = tl.where((tl.sum(wrong, 0) > 0) | (raw_top == float("-inf")), 1, tl.where(top == float("-inf"), 2, 0))
    tl.store(errors + at, error)
    if error == 0:
        temperature, top_p = tl.load(numbers + at * 4), tl.load(numbers + at * 4 + 1)
        min_p, point = tl.load(numbers + at * 4 + 2), tl.load(numbers + at * 4 + 3)
        top_k = tl.load(top_ks + at)
        wide_top = top.to(tl.float64)
        token = tl.min(tl.where(best == top, place, 2147483647), 0).to(tl.int64)
        if (temperature >= GREEDY_BELOW) & (top_k != 1):
            end, ties = _nucleus(row, vocab, wide_top, temperature, top_k, top_p, WIDTH)
            token = _draw(row, vocab, wide_top, temperature, end, ties, min_p, point, WIDTH)
        one = tl.full([], 1.0, tl.float64)
        mass = _weigh_from(came, vocab, tl.full([], 0, tl.int64), raw_top.to(tl.float64), one, WIDTH)
        tl.store(ids + at, token)
        tl.store(logprobs + at, tl.load(came + token).to(tl.float64) - raw_top.to(tl.float64) - tl.log(mass))


@dataclass(slots=True)
class _Edits:
    """What changes in rows before the draw: for each edited row a list of ids, none twice."""

    rows: list[int] = field(default_factory=list)
    only: list[bool] = field(default_factory=list)  # whether ids that are not listed cannot be chosen
    penalties: list[tuple[float, float, float]] = field(default_factory=list)
    begins: list[int] = field(default_factory=lambda: [0])
    ids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    flags: list[npt.NDArray[np.int32]] = field(default_factory=list)
    counts: list[npt.NDArray[np.int32]] = field(default_factory=list)
    biases: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def add(self, row: int, r: Request, vocab: int) -> int | None:
        """Take in one request; returns the number of its edited row, or None for an id outside the vocabulary."""
        seen = np.array([*r.prompt_ids, *r.output_ids] if r.penalizes else [], np.int64)
        outputs = np.array(r.output_ids if r.penalizes else [], np.int64)
        bias = r.logit_bias or {}
        biased, forbidden = np.array(list(bias), np.int64), np.array(r.forbidden_ids, np.int64)
        allowed = np.array(r.allowed_ids, np.int64)
        everything = np.unique(np.concatenate((seen, biased, forbidden, allowed)))
        if len(everything) and not (0 <= everything[0] and everything[-1] < vocab):
            return None
        ids = np.unique(allowed) if len(allowed) else everything
        flags = np.isin(ids, seen) * _SEEN + np.isin(ids, biased) * _BIASED + np.isin(ids, forbidden) * _FORBIDDEN
        times = dict(zip(*np.unique(outputs, return_counts=True), strict=True))
        self.rows.append(row)
        self.only.append(len(allowed) > 0)
        self.penalties.append((r.repetition_penalty, r.frequency_penalty, r.presence_penalty))
        self.begins.append(self.begins[-1] + len(ids))
        self.ids.append(ids)
        self.flags.append(flags.astype(np.int32))
        self.counts.append(np.array([times.get(token, 0) for token in ids], np.int32))
        self.biases.append(np.array([bias.get(int(token), 0.0) for token in ids], np.float64))
        return len(self.rows) - 1

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the edited rows `[edited, vocab]` float32."""
        vocab, device = logits.shape[1], logits.device
        out = torch.empty(len(self.rows), vocab, dtype=torch.float32, device=device)
        if not self.rows:
            return out
        rows = torch.tensor(self.rows, dtype=torch.int64, device=device)
        only = torch.tensor(self.only, dtype=torch.int32, device=device)
        begins = torch.tensor(self.begins, dtype=torch.int64, device=device)
        penalties = torch.tensor(self.penalties, dtype=torch.float64, device=device)
        lists = [torch.from_numpy(np.concatenate(x)).to(device) for x in (self.ids, self.flags, self.counts)]
        biases = torch.from_numpy(np.concatenate(self.biases)).to(device)
        stride = logits.stride(0)
        _fill[(len(rows), triton.cdiv(vocab, _WIDTH))](logits, rows, only, out, vocab, stride, _WIDTH, **OPTIONS)
        _edit[(len(rows),)](
            logits, rows, begins, *lists, biases, penalties, out, vocab, stride,
            _SEEN, _BIASED, _FORBIDDEN, LARGEST, _WIDTH, **OPTIONS,
        )  # fmt: skip
        return out


def sample(
    logits: torch.Tensor | npt.NDArray[np.float32], requests: Sequence[Request], rows: Sequence[int] | None = None
) -> list[Choice]:
    """Choose one id per request from logits `[rows, vocab]` (float32), as `kernels.sampling` says.

    Raises:
        IndexError: a request names a row that there is not.
        ValueError: the logits are not a float32 matrix with contiguous rows.
    """
    logits = torch.as_tensor(logits)
    check(logits.dim() == 2 and logits.dtype == torch.float32, "logits are a float32 matrix")
    check(has_rows(logits), "the rows of logits are contiguous")
    places = list(range(len(requests)) if rows is None else rows)
    if len(places) != len(requests) or not all(0 <= at < len(logits) for at in places):
        raise IndexError(f"{len(requests)} requests name rows {places} of {len(logits)}")
    vocab, device = logits.shape[1], logits.device
    edits, slots = _Edits(), []
    for at, request in zip(places, requests, strict=True):
        slots.append(edits.add(at, request, vocab) if request.edits else -1)
    live = [i for i, slot in enumerate(slots) if slot is not None]
    choices = [Choice(-1, 0.0, BAD_IDS)] * len(requests)
    if not live:
        return choices
    picked = [requests[i] for i in live]
    numbers = torch.tensor([(r.temperature, r.top_p, r.min_p, r.point) for r in picked], dtype=torch.float64)
    whole = torch.tensor([(places[i], slots[i], requests[i].top_k) for i in live], dtype=torch.int64)
    at, slot, top_k = whole.T.contiguous().to(device)
    ids = torch.empty(len(live), dtype=torch.int64, device=device)
    logprobs = torch.empty(len(live), dtype=torch.float64, device=device)
    errors = torch.empty(len(live), dtype=torch.int32, device=device)
    _choose[(len(live),)](
        logits, at, edits.apply(logits), slot, numbers.to(device), top_k, ids, logprobs, errors, vocab,
        logits.stride(0), GREEDY_BELOW, _WIDTH, **OPTIONS,
    )  # fmt: skip
    for i, token, logprob, error in zip(live, ids.tolist(), logprobs.tolist(), errors.tolist(), strict=True):
        choices[i] = Choice(-1, 0.0, _ERRORS[error]) if error else Choice(token, logprob)
    return choices
