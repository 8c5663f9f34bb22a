"""Sampling in numpy: the obvious version, in float64, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.sampling import BAD_IDS, LARGEST, NOT_NUMBERS, NOTHING_LEFT, Choice, Request

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_PREFIX = 1024  # how many likely tokens are looked at before everything is sorted


def sample(logits: Floats, requests: Sequence[Request], rows: Sequence[int] | None = None) -> list[Choice]:
    """Choose one id per request from logits `[rows, vocab]` (float32).

    Raises:
        IndexError: a request names a row that there is not.
    """
    return [
        choose(logits[at], request)
        for at, request in zip(range(len(requests)) if rows is None else rows, requests, strict=True)
    ]


def choose(logits: Floats, request: Request) -> Choice:
    """Choose an id from one row `[vocab]` (float32)."""
    top = logits.max()
    if not np.isfinite(top):
        return Choice(-1, 0.0, NOT_NUMBERS)
    values = logits
    if request.edits:
        if not _within(request, len(logits)):
            return Choice(-1, 0.0, BAD_IDS)
        values = adjust(logits, request)
        if values.max() == -np.inf:
            return Choice(-1, 0.0, NOTHING_LEFT)
    token = int(values.argmax()) if request.greedy else _draw(values, request)  # argmax: the first of several
    exact = logits.astype(np.float64) - float(top)
    return Choice(token, float(exact[token] - np.log(np.exp(exact).sum())))


def adjust(logits: Floats, request: Request) -> Floats:
    """Return a copy of a row `[vocab]` after penalties, bias and masks; all ids must be within it."""
    out = logits.copy()
    if request.penalizes:
        seen = np.unique(np.array([*request.prompt_ids, *request.output_ids], np.int64))
        if request.repetition_penalty != 1.0:
            value, r = out[seen].astype(np.float64), request.repetition_penalty
            penalized = np.where(value > 0.0, value / r, value * r)
        else:
            penalized = out[seen].astype(np.float64)
        count = np.bincount(np.array(request.output_ids, np.int64), minlength=len(out))[seen]
        penalized = np.where(
            count > 0, penalized - request.frequency_penalty * count - request.presence_penalty, penalized
        )
        out[seen] = _bounded(penalized)
    if request.logit_bias:
        ids = np.fromiter(request.logit_bias, np.int64)
        out[ids] = _bounded(out[ids].astype(np.float64) + np.fromiter(request.logit_bias.values(), np.float64))
    if len(request.allowed_ids):
        allowed = np.array(request.allowed_ids, np.int64)
        kept = out[allowed]
        out[:] = -np.inf
        out[allowed] = kept
    out[np.array(request.forbidden_ids, np.int64)] = -np.inf
    return out


def _bounded(values: Doubles) -> Floats:
    """Round to float32 within ±1e30; what is impossible stays so."""
    bounded = np.where(values == -np.inf, values, values.clip(-LARGEST, LARGEST))
    return bounded.astype(np.float32)


def _within(request: Request, vocab: int) -> bool:
    groups = [request.logit_bias or (), request.allowed_ids, request.forbidden_ids]
    if request.penalizes:
        groups += [request.prompt_ids, request.output_ids]
    return all(0 <= min(ids) and max(ids) < vocab for ids in groups if len(ids))


def _draw(values: Floats, request: Request) -> int:
    """Invert the cumulative distribution, in order of ids, at the request's point."""
    weights = np.exp((values.astype(np.float64) - float(values.max())) / request.temperature)  # 1 for the heaviest
    if 0 < request.top_k < len(weights) or request.top_p < 1.0:
        kept = _nucleus(values, weights, request)
        left = np.zeros_like(weights)
        left[kept] = weights[kept]
        weights = left
    if request.min_p > 0.0:
        weights = np.where(weights >= request.min_p, weights, 0.0)
    cumulative = weights.cumsum()
    token = int(np.searchsorted(cumulative, request.point * cumulative[-1], side="right"))
    if token >= len(weights):
        # Rounding carried the point past the last token that has any weight.
        token = int(weights.nonzero()[0][-1])
    return token


def _nucleus(values: Floats, weights: Doubles, request: Request) -> Ids:
    """Return the ids that top-k and top-p keep."""
    vocab = len(values)
    limit = request.top_k if 0 < request.top_k < vocab else vocab
    ids = _heaviest(values, min(limit, _PREFIX))
    if limit > len(ids):
        total = weights.sum() if limit == vocab else np.inf
        if request.top_p >= 1.0 or weights[ids].sum() < request.top_p * total:
            ids = _heaviest(values, vocab)
    ids = ids[:limit]
    if request.top_p >= 1.0:
        return ids
    ordered = weights[ids]
    total = weights.sum() if limit == vocab else ordered.sum()
    before = ordered.cumsum() - ordered
    return ids[: max(1, int((before < request.top_p * total).sum()))]


def _heaviest(values: Floats, count: int) -> Ids:
    """Return at least `count` ids (all that equal the last), greatest logit first, of equals the lower id first."""
    if count < len(values):
        # A partition may keep any of several equal ones, so it only gives the bound.
        ids = (values >= np.partition(values, -count)[-count]).nonzero()[0]
    else:
        ids = np.arange(len(values))
    order: Ids = ids[np.argsort(-values[ids], kind="stable")]
    return order
