"""Sampling by the compiled kernels: requests are packed into records, all rows are sampled by one call."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.native import library
from kernels.sampling import BAD_IDS, NOT_NUMBERS, NOTHING_LEFT, Choice, Request

_ERRORS = (None, NOT_NUMBERS, NOTHING_LEFT, BAD_IDS)
_DRAW = struct.Struct("<7d2qQ2q2QqQqQq")  # `Draw` in native.hpp
_PICKED = struct.Struct("<dii")
_INT32 = np.iinfo(np.int32)


def sample(
    logits: npt.NDArray[np.float32],
    requests: Sequence[Request],
    rows: Sequence[int] | None = None,
    *,
    team: int | None = None,
) -> list[Choice]:
    """Choose one id per request from logits `[rows, vocab]` (float32, contiguous).

    Args:
        logits: read only.
        requests: the draws.
        rows: the row of each; absent: request `i` draws from row `i`.
        team: address of the threads that share the rows (`hr_team_new`); absent: this thread alone. Same results.

    Raises:
        BuildError: the compiled kernels cannot be used here.
        IndexError: a request names a row that there is not.
        ValueError: the logits are not a contiguous float32 matrix.
    """
    return sample_with(_function(), logits, requests, rows, team)


@functools.cache
def _function() -> Any:
    return bind(library())


def bind(loaded: ctypes.CDLL) -> Any:
    """Return the library's function with the types of its arguments set."""
    function = loaded.hr_sample
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, size, pointer, size, pointer]
    function.restype = None
    return function


def sample_with(
    function: Any,
    logits: npt.NDArray[np.float32],
    requests: Sequence[Request],
    rows: Sequence[int] | None = None,
    team: int | None = None,
) -> list[Choice]:
    """Do what `sample` says with a function that `bind` returned."""
    if logits.ndim != 2 or logits.dtype != np.float32 or not logits.flags.c_contiguous:
        raise ValueError(f"logits must be a contiguous float32 matrix, not {logits.dtype} {logits.shape}")
    at = range(len(requests)) if rows is None else rows
    if len(at) != len(requests):
        raise IndexError(f"{len(requests)} requests, but rows for {len(at)}")
    if len(at) and not (0 <= min(at) and max(at) < len(logits)):
        raise IndexError(f"a request names a row outside the {len(logits)} rows of logits")
    draws, picked = bytearray(len(requests) * _DRAW.size), bytearray(len(requests) * _PICKED.size)
    alive: list[npt.NDArray[Any]] = []  # what the records point to must live until the call is over
    for number, (row, request) in enumerate(zip(at, requests, strict=True)):
        _pack(draws, number, row, request, alive)
    function(team, logits.ctypes.data, logits.shape[1], _address(draws), len(requests), _address(picked))
    return [Choice(token, logprob, _ERRORS[status]) for logprob, token, status in _PICKED.iter_unpack(picked)]


def _pack(draws: bytearray, number: int, row: int, r: Request, alive: list[npt.NDArray[Any]]) -> None:
    context = bias_ids = bias = allowed = forbidden = 0
    num_prompt = num_output = num_bias = 0
    if r.edits:
        if r.penalizes:
            num_prompt, num_output = len(r.prompt_ids), len(r.output_ids)
            context = _ids([*r.prompt_ids, *r.output_ids], alive)
        if r.logit_bias:
            num_bias = len(r.logit_bias)
            bias_ids = _ids(list(r.logit_bias), alive)
            bias = _kept(np.fromiter(r.logit_bias.values(), np.float64, num_bias), alive)
        allowed, forbidden = _ids(r.allowed_ids, alive), _ids(r.forbidden_ids, alive)
    _DRAW.pack_into(
        draws, number * _DRAW.size, r.temperature, r.top_p, r.min_p, r.point, r.presence_penalty, r.frequency_penalty,
        r.repetition_penalty, r.top_k, row, context, num_prompt, num_output, bias_ids, bias, num_bias, allowed,
        len(r.allowed_ids), forbidden, len(r.forbidden_ids),
    )  # fmt: skip


def _ids(ids: Sequence[int], alive: list[npt.NDArray[Any]]) -> int:
    """Return the address of ids as int32; what does not fit becomes -1, which is no id either."""
    if not len(ids):
        return 0
    wide = np.asarray(ids, np.int64)
    return _kept(np.where((wide < 0) | (wide > _INT32.max), -1, wide).astype(np.int32), alive)


def _kept(array: npt.NDArray[Any], alive: list[npt.NDArray[Any]]) -> int:
    alive.append(array)
    return int(array.ctypes.data)


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0
