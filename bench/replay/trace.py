"""Traces of requests: Mooncake's (JSON lines with hashes of blocks) and Azure's (CSV with lengths alone)."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512  # of Mooncake's blocks; the last one of a prompt may be partial
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(Exception):
    """Raised when a file is no trace of a known form."""

    def __init__(self, path: Path, line: int, why: str) -> None:
        """Name the line."""
        super().__init__(f"{path}, line {line}: {why}")
        self.path, self.line = path, line


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    `hashes` name its prompt's blocks, each with all before it. `after` is the position of the turn before of the same
    conversation, if there is one in the trace.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hashes: tuple[bytes, ...] = ()
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by time, the first at zero."""

    path: Path
    arrivals: tuple[Arrival, ...]

    @property
    def has_hashes(self) -> bool:
        """Whether prefixes can be told."""
        return any(arrival.hashes for arrival in self.arrivals)

    @property
    def input_tokens(self) -> int:
        """All prompts together."""
        return sum(arrival.input_tokens for arrival in self.arrivals)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at_s - self.arrivals[0].at_s

    def first(self, share: float) -> Trace:
        """Return the first part of the trace, at least two requests."""
        return replace(self, arrivals=self.arrivals[: max(2, int(len(self.arrivals) * share))])

    def spread(self, seed: int = 1) -> Trace:
        """Return the trace with requests of one recorded moment drawn apart, up to the next moment, in their order.

        Mooncake's conversation trace has ticks of three seconds, with ten requests at each.
        """
        draw = random.Random(seed)
        moments = sorted({arrival.at_s for arrival in self.arrivals})
        until = dict(itertools.pairwise(moments))
        out: list[Arrival] = []
        for at, group in itertools.groupby(self.arrivals, key=lambda arrival: arrival.at_s):
            together = list(group)
            times = sorted(draw.uniform(at, until.get(at, at)) for _ in together[1:])
            out += [replace(arrival, at_s=time) for arrival, time in zip(together, [at, *times], strict=True)]
        return replace(self, arrivals=tuple(out))


def read(path: Path) -> Trace:
    """Return the trace in a file; its form is told by its first character.

    Raises:
        TraceError: if a line is not of that form, or there is none.
        OSError: if it cannot be read.
    """
    with path.open(encoding="utf-8", newline="") as file:
        start = file.read(1)
        file.seek(0)
        arrivals = list(_mooncake(path, file) if start == "{" else _azure(path, file))
    if not arrivals:
        raise TraceError(path, 1, "no requests")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    begin = arrivals[0].at_s
    return Trace(path, tuple(_linked([replace(a, at_s=a.at_s - begin) for a in arrivals])))


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[Arrival]:
    keys: dict[int, bytes] = {}  # one object per hash: comparing an object with itself costs nothing
    for number, line in enumerate(lines, 1):
        try:
            yield _request(json.loads(line), keys)
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(path, number, f"{type(error).__name__}: {error}") from error


def _request(fields: dict[str, Any], keys: dict[int, bytes]) -> Arrival:
    hashes = []
    for name in fields["hash_ids"]:
        if name not in keys:
            keys[name] = hashlib.blake2b(str(int(name)).encode(), digest_size=32).digest()
        hashes.append(keys[name])
    tokens = int(fields["input_length"])
    if tokens <= 0 or len(hashes) != -(-tokens // BLOCK_TOKENS):
        raise ValueError(f"{len(hashes)} blocks of {BLOCK_TOKENS} for {tokens} tokens")
    return Arrival(float(fields["timestamp"]) / 1000.0, tokens, int(fields["output_length"]), tuple(hashes))


def _azure(path: Path, lines: Iterable[str]) -> Iterator[Arrival]:
    rows = csv.DictReader(lines)
    if tuple(rows.fieldnames or ()) != AZURE_FIELDS:
        raise TraceError(path, 1, f"neither JSON lines nor a table of {', '.join(AZURE_FIELDS)}")
    for row in rows:
        try:
            moment, fraction = row["TIMESTAMP"].split(".")
            at = datetime.fromisoformat(moment + "+00:00").timestamp() + float(f"0.{fraction}")
            yield Arrival(at, max(1, int(row["ContextTokens"])), int(row["GeneratedTokens"]))
        except (ValueError, TypeError, AttributeError) as error:
            raise TraceError(path, rows.line_num, f"{type(error).__name__}: {error}") from error


def _linked(arrivals: list[Arrival]) -> list[Arrival]:
    """Link each turn to the one before: the last request whose prompt this one repeats but for its last block.

    That last block is partial, or ends where the answer began, so the next turn has another one there. Prompts of less
    than two whole blocks in common are taken for strangers: those are system prompts.
    """
    latest: dict[bytes, int] = {}  # block → the last request that has it
    out = []
    for position, arrival in enumerate(arrivals):
        before = next((latest[block] for block in reversed(arrival.hashes[1:]) if block in latest), None)
        if before is not None and not _continues(arrivals[before], arrival):
            before = None
        out.append(replace(arrival, after=before))
        for block in arrival.hashes[1:]:
            latest[block] = position
    return out


def _continues(first: Arrival, second: Arrival) -> bool:
    common = 0
    for ours, theirs in zip(first.hashes, second.hashes, strict=False):
        if ours != theirs:
            break
        common += 1
    return common >= max(2, len(first.hashes) - 1) and first.at_s < second.at_s
