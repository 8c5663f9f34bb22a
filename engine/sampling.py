"""Choosing a token: greedy, or drawn with counter-based random numbers.

A draw is a pure function of (seed, choice, output index, purpose) and of that row's logits, so that a replay after a
failover draws the same ids, whatever else is in the batch. Order of the filters: temperature, top-k, top-p over what
top-k left (renormalized), min-p relative to the most likely token. Ties keep the lower id.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch

from schemas.record import Sampling

GREEDY_BELOW = 1e-5  # temperature
_PREFIX = 1024  # how many likely tokens are looked at before everything is sorted


@dataclass(frozen=True, slots=True)
class Choice:
    """The id chosen from a row and its log-probability under the model (before temperature and filters)."""

    id: int
    logprob: float
    error: str | None = None


def uniform(seed: int, choice: int, index: int, purpose: str = "token") -> float:
    """Return a number in [0, 1) with 53 random bits, a function of its arguments alone."""
    name = struct.pack("<QQQ", seed & (1 << 64) - 1, choice, index) + purpose.encode()
    bits = int.from_bytes(hashlib.blake2b(name, digest_size=8, person=b"headrace draw").digest(), "little")
    return (bits >> 11) * 2.0**-53


def choose(logits: torch.Tensor, sampling: Sampling, choice: int, index: int) -> Choice:
    """Choose the id for output `index` of one choice.

    Args:
        logits: float32 `[vocab]`.

    Returns:
        The choice; its `error` is set when the logits are not finite where they must be.
    """
    top = logits.max()
    if not bool(torch.isfinite(top)):
        return Choice(-1, 0.0, "the model produced logits that are not numbers")
    if sampling.temperature < GREEDY_BELOW:
        token = int(logits.argmax())  # the first of several maxima
    else:
        token = _draw(logits, float(top), sampling, uniform(sampling.seed, choice, index))
    logprob = logits[token].double() - torch.logsumexp(logits.double(), 0)
    return Choice(token, float(logprob))


def _draw(logits: torch.Tensor, top: float, sampling: Sampling, at: float) -> int:
    """Invert the cumulative distribution, in order of ids, at the point `at`."""
    weights = torch.exp((logits.double() - top) / sampling.temperature)  # [vocab], 1 for the most likely
    if sampling.top_k == 1:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(weights) or sampling.top_p < 1.0:
        kept = _nucleus(weights, sampling)
        weights = torch.zeros_like(weights).index_copy_(0, kept, weights[kept])
    if sampling.min_p > 0.0:
        weights = torch.where(weights >= sampling.min_p, weights, 0.0)
    cumulative = weights.cumsum(0)
    token = int(torch.searchsorted(cumulative, at * float(cumulative[-1]), right=True))
    if token >= len(weights) or float(weights[token]) == 0.0:
        # Rounding carried the point past the last token that has any weight.
        token = int(weights.nonzero()[-1])
    return token


def _nucleus(weights: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the ids that top-k and top-p keep."""
    limit = sampling.top_k if 0 < sampling.top_k < len(weights) else len(weights)
    ids, ordered = _ordered(weights, min(limit, _PREFIX))
    if limit > len(ids):
        total = float(weights.sum()) if limit == len(weights) else float("inf")
        if sampling.top_p >= 1.0 or float(ordered.sum()) < sampling.top_p * total:
            ids, ordered = _ordered(weights, len(weights))
    ids, ordered = ids[:limit], ordered[:limit]
    if sampling.top_p >= 1.0:
        return ids
    total = float(weights.sum()) if limit == len(weights) else float(ordered.sum())
    before = ordered.cumsum(0) - ordered
    kept = int((before < sampling.top_p * total).sum())
    return ids[: max(1, kept)]


def _ordered(weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return at least the `count` heaviest ids (all that weigh as much as the last), heaviest first, ties by id."""
    if count < len(weights):
        # topk may keep any of several equal ones, so it only gives the bound.
        ids = (weights >= torch.topk(weights, count, sorted=False).values.min()).nonzero().flatten()
    else:
        ids = torch.arange(len(weights))
    ordered, order = torch.sort(weights[ids], descending=True, stable=True)
    return ids[order], ordered
